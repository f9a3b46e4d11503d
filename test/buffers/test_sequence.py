"""The handle of an update is the anchor's, whatever the anchor expands into."""

from __future__ import annotations

import pickle

import pytest
import torch
from common import PER, leaves, td_buffer
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SampleUnit,
    Sequence,
    Transition,
)
from torchrl.data.replay_buffers.generations import (
    ReplayBuffer,
    RoundRobinWriter,
    SlotGenerations,
    TensorDictReplayBuffer,
)


class At(PrioritizedSampler):
    """Samples the slots that the test says, with the priorities of a prioritized sampler."""

    index: torch.Tensor

    def sample(self, storage, batch_size):
        return self.index, {}


def steps(first, count, done=()):
    """Transitions with ids from ``first`` on; an episode ends where ``done`` says."""
    ids = torch.arange(first, first + count)
    ends = torch.isin(ids, torch.tensor(done, dtype=torch.int64)).unsqueeze(-1)
    return TensorDict({"id": ids, ("next", "done"): ends}, [count])


def sequences(anchors, *, capacity=8, done=(), records=8, **unit):
    """A buffer whose samples are the windows of ``anchors``."""
    sampler = At(capacity, **PER)
    sampler.index = torch.tensor(anchors)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=sampler,
        sample_unit=Sequence(**unit),
        batch_size=len(anchors),
        track_generations=True,
    )
    rb.extend(steps(0, records, done))
    return rb


def test_each_record_of_a_window_carries_the_stamp_of_its_anchor():
    rb = sequences([1, 6], length=3)
    rb.extend(steps(8, 2))  # slots 0 and 1 a second time

    sample = rb.sample()

    assert sample["index"].tolist() == [1, 1, 1, 6, 7, 0]  # the newest record ends the window
    assert sample["anchor_index"].tolist() == [1, 1, 1, 6, 6, 6]
    assert sample["anchor_generation"].tolist() == [1, 1, 1, 0, 0, 0]
    assert sample["index_generation"].tolist() == [1, 1, 1, 0, 0, 1]


def test_the_stamp_of_an_anchor_outside_of_its_window_is_the_anchors_own():
    rb = sequences([6], length=3, dilation=2, episode_boundary="stop", done=[7])
    sample = rb.sample()
    assert sample["index"].tolist() == [3, 5, 7]  # shifted back to end at the boundary: no 6
    rb.extend(steps(8, 6))  # rewrites 0 to 5: the window's 3 and 5, and not the anchor
    sample["td_error"] = torch.tensor([2.0, 5.0, 3.0])

    result = rb.update_tensordict_priority_if_present(sample)

    assert result.updated_mask.tolist() == [True, True, True]
    assert leaves(rb) == [1, 1, 1, 1, 1, 1, 5, 1]


def test_an_overwritten_anchor_is_stale_however_many_of_its_window_are_left():
    rb = sequences([0, 4], length=3)
    sample = rb.sample()
    rb.extend(steps(8, 1))  # slot 0 only: 1 and 2 of its window are still there
    sample["td_error"] = torch.tensor([9.0, 9.0, 9.0, 2.0, 6.0, 4.0])

    result = rb.update_tensordict_priority_if_present(sample)

    assert result.updated_mask.tolist() == [False, False, False, True, True, True]
    assert (result.num_updated, result.num_stale) == (3, 3)
    assert leaves(rb) == [1, 1, 1, 1, 6, 1, 1, 1]


def test_padded_records_give_no_priority_to_their_anchor():
    rb = sequences([3], length=4, done=[4])
    sample = rb.sample()
    assert sample["index"].tolist() == [3, 4, 4, 4]
    assert sample["validity_mask"].tolist() == [True, True, False, False]
    sample["td_error"] = torch.tensor([2.0, 3.0, 100.0, torch.nan])

    assert rb.update_tensordict_priority_if_present(sample).num_stale == 0

    assert leaves(rb) == [1, 1, 1, 3, 1, 1, 1, 1]


def test_burn_in_and_bootstrap_count_as_in_torchrls_own_update():
    windows = {"length": 2, "burn_in": 1, "bootstrap": 1}
    rb, stock = sequences([2, 5], **windows), sequences([2, 5], **windows)
    errors = torch.tensor([8.0, 1.0, 2.0, 3.0, 1.0, 2.0, 7.0, 4.0])

    rb.update_tensordict_priority_if_present(rb.sample().set("td_error", errors))
    stock.update_tensordict_priority(stock.sample().set("td_error", errors))

    assert leaves(rb) == leaves(stock) == [1, 1, 8, 1, 1, 7, 1, 1]


def test_an_anchor_in_two_windows_gets_the_largest_of_both():
    rb = sequences([2, 2, 5], length=2)
    sample = rb.sample()
    sample["td_error"] = torch.tensor([1.0, 2.0, 4.0, 3.0, 6.0, 0.5])
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 6
    assert leaves(rb) == [1, 1, 4, 1, 1, 6, 1, 1]


def test_of_an_anchor_with_two_stamps_the_later_record_alone_is_updated():
    rb = sequences([0], length=2)
    before = rb.sample()
    rb.extend(steps(8, 2))
    both = torch.cat([before, rb.sample()])
    both["td_error"] = torch.tensor([50.0, 60.0, 3.0, 2.0])

    result = rb.update_tensordict_priority_if_present(both)

    assert result.updated_mask.tolist() == [False, False, True, True]
    assert leaves(rb) == [3, 1, 1, 1, 1, 1, 1, 1]


def test_a_sample_reshaped_to_windows_gets_a_flag_for_each_window():
    rb = sequences([0, 4], length=3)
    sample = rb.sample().reshape(2, 3)
    rb.extend(steps(8, 1))
    sample["td_error"] = torch.tensor([[9.0, 9.0, 9.0], [2.0, 6.0, 4.0]])
    assert rb.update_tensordict_priority_if_present(sample).updated_mask.tolist() == [False, True]
    assert leaves(rb) == [1, 1, 1, 1, 6, 1, 1, 1]


def test_several_numbers_per_record_are_reduced_first():
    rb = sequences([4], length=2)
    sample = rb.sample()
    sample["td_error"] = torch.tensor([[1.0, 7.0], [3.0, 2.0]])
    rb.update_tensordict_priority_if_present(sample)
    assert leaves(rb) == [1, 1, 1, 1, 7, 1, 1, 1]


def test_without_priorities_the_anchors_get_the_default():
    rb = sequences([4], length=2)
    rb.update_priority(torch.arange(8), torch.full((8,), 3.0))
    rb.sampler._max_priority = (torch.tensor(2.0), torch.tensor(0))
    assert rb.update_tensordict_priority_if_present(rb.sample()).num_updated == 2
    assert leaves(rb) == [3, 3, 3, 3, 2, 3, 3, 3]


@pytest.mark.parametrize("key", ["anchor_index", "anchor_generation"])
def test_a_sample_whose_anchors_are_gone_is_refused(key):
    rb = sequences([4], length=2)
    with pytest.raises(KeyError, match=key):
        rb.update_tensordict_priority_if_present(rb.sample().exclude(key))


def test_a_bad_priority_in_a_valid_record_is_refused_and_nothing_is_written():
    rb = sequences([0, 4], length=2)
    sample = rb.sample().set("td_error", torch.tensor([1.0, 2.0, torch.nan, 3.0]))
    with pytest.raises(ValueError, match="finite"):
        rb.update_tensordict_priority_if_present(sample)
    assert leaves(rb) == [1] * 8


def test_anchor_stamps_are_taken_under_the_lock_that_the_anchors_were_sampled_under():
    class Overwrites(Sequence):
        """Another thread would write here, if the lock were free."""

        def expand(self, index, info, storage):
            assert SlotGenerations.attach(storage).lock.is_held()
            return super().expand(index, info, storage)

    rb = td_buffer(0, sample_unit=Overwrites(length=2), batch_size=2)
    rb.extend(steps(0, 8))
    assert rb.sample()["anchor_generation"].tolist() == [0] * 4


def test_an_asynchronous_learner_writes_to_the_anchors_too():
    rb = td_buffer(0, sample_unit=Sequence(length=2), batch_size=8, sync=False)
    rb.extend(steps(0, 8))
    sample = rb.sample()
    rb.extend(steps(8, 4))  # slots 0 to 3
    sample["td_error"] = torch.full((16,), 5.0)

    result = rb.update_tensordict_priority_if_present(sample)

    live = sample["anchor_index"] >= 4
    assert result.updated_mask.tolist() == live.tolist()
    updated = set(sample["anchor_index"][live].tolist())
    assert leaves(rb)[4:] == [5.0 if slot in updated else 1.0 for slot in range(4, 8)]


def test_a_sequence_unit_of_an_untracked_buffer_adds_no_key():
    storage = LazyTensorStorage(8)
    tracking = ReplayBuffer(storage=storage, track_generations=True)
    plain = TensorDictReplayBuffer(storage=storage, sample_unit=Sequence(length=2), batch_size=2)
    tracking.extend(steps(0, 8))
    assert not {"index_generation", "anchor_generation"} & set(plain.sample().keys())
    plain.set_writer(RoundRobinWriter(track_generations=True))
    assert plain.sample()["anchor_generation"].tolist() == [0] * 4
    plain.set_writer(RoundRobinWriter())
    assert "anchor_generation" not in plain.sample()


def test_the_unit_keeps_its_class_and_configuration_also_in_a_copy():
    rb = td_buffer(0, sample_unit=Sequence(length=2, dilation=3), batch_size=2)
    rb.extend(steps(0, 8))
    for buffer in (rb, pickle.loads(pickle.dumps(rb))):
        assert isinstance(buffer._sample_unit, Sequence)
        assert (buffer._sample_unit.length, buffer._sample_unit.dilation) == (2, 3)
        assert buffer.sample()["anchor_generation"].tolist() == [0] * 4


def test_a_transition_unit_changes_nothing():
    rb = td_buffer(sample_unit=Transition(), batch_size=8)
    sample = rb.sample().set("td_error", torch.full((8,), 2.0))
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 8


def test_the_records_of_a_users_unit_are_handles_themselves():
    class WithNext(SampleUnit):
        def expand(self, index, info, storage):
            both = torch.stack([index, (index + 1) % 8], 1).flatten()
            return both, {"twice": torch.ones(len(both), dtype=torch.bool)}

    rb = td_buffer(0, sample_unit=WithNext(), batch_size=2)
    rb.extend(steps(0, 8))
    sample = rb.sample()
    assert "anchor_generation" not in sample
    sample["td_error"] = torch.arange(2.0, 6.0)

    rb.update_tensordict_priority_if_present(sample)

    expected = [1.0] * 8
    for slot, priority in zip(sample["index"].tolist(), [2.0, 3.0, 4.0, 5.0], strict=True):
        expected[slot] = priority
    assert leaves(rb) == expected


def test_a_uniform_sampler_still_reports_the_anchors_stamps():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=RandomSampler(),
        sample_unit=Sequence(length=2),
        batch_size=3,
        track_generations=True,
    )
    assert isinstance(rb.sampler, Sampler)
    rb.extend(steps(0, 8))
    _, info = rb.sample(return_info=True)
    table = SlotGenerations.attach(rb.storage)
    assert table.is_live(info["anchor_index"], info["anchor_generation"]).all()
    rb.extend(steps(8, 8))
    assert not table.is_live(info["anchor_index"], info["anchor_generation"]).any()
