"""Every sampler of TorchRL's: its samples carry usable stamps, and its priorities are safe."""

from __future__ import annotations

import inspect
import threading
from functools import partial

import numpy as np
import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, Thread, buffer, ids, leaves, td_buffer
from tensordict import TensorDict, lazy_stack, tensorclass
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import (
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from torchrl.data.replay_buffers.generations import (
    ConditionalPriorityUpdates,
    ReplayBuffer,
    SlotGenerations,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import (
    ExcludeTransform,
    RenameTransform,
    SelectTransform,
    UnsqueezeTransform,
)

SLICES = {"slice_len": 2, "traj_key": "episode"}
WITHOUT_PRIORITIES = {
    "random": RandomSampler,
    "without_replacement": SamplerWithoutReplacement,
    "consuming": lambda: ConsumingSampler(max_sample_count=100),
    "staleness": StalenessAwareSampler,
    "prompt_groups": lambda: PromptGroupSampler(num_groups=2, group_key="episode"),
    "slices": lambda: SliceSampler(**SLICES),
    "slices_without_replacement": lambda: SliceSamplerWithoutReplacement(**SLICES),
    "streaming_slices": lambda: StreamingSliceSampler(slice_len=2, traj_key="episode"),
}
WITH_PRIORITIES = {
    "prioritized": lambda **more: PrioritizedSampler(CAPACITY, **PER, **more),
    "prioritized_slices": lambda **more: PrioritizedSliceSampler(CAPACITY, **PER, **SLICES, **more),
}


def episodes(first=0, count=CAPACITY, length=4):
    """Transitions with ids from ``first`` on, in episodes of ``length`` steps."""
    at = torch.arange(first, first + count)
    return ids(
        at,
        episode=at // length,
        policy_version=torch.zeros(count, dtype=torch.int64),
        **{"next": TensorDict({"done": (at % length == length - 1).unsqueeze(-1)}, [count])},
    )


def td_rb(sampler, records=CAPACITY, batch_size=4, **kwargs):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=sampler,
        batch_size=batch_size,
        track_generations=True,
        **kwargs,
    )
    if records:
        rb.extend(episodes(0, records))
    return rb


def is_live(rb, sample):
    slots = sample["index"].reshape(sample.shape[0], -1)[:, 0]
    return SlotGenerations.attach(rb.storage).is_live(slots, sample["index_generation"])


# ------------------------------------------------------------------ stamps


@pytest.mark.parametrize("make", [*WITHOUT_PRIORITIES.values(), *WITH_PRIORITIES.values()])
def test_a_sample_carries_the_stamps_of_its_records(make):
    rb = td_rb(make())
    rb.extend(episodes(8, 4))  # slots 0 to 3 a second time

    sample = rb.sample()

    slots = sample["index"].reshape(4, -1)[:, 0]
    assert sample["index_generation"].tolist() == (slots < 4).long().tolist()
    assert is_live(rb, sample).all()
    rb.extend(episodes(12, 4))  # the other half
    assert is_live(rb, sample).tolist() == (slots < 4).tolist()


@pytest.mark.parametrize("make", WITHOUT_PRIORITIES.values())
def test_a_sampler_without_priorities_refuses_an_update_and_says_what_to_use(make):
    rb = td_rb(make())
    sample = rb.sample().set("td_error", torch.ones(4))
    with pytest.raises(RuntimeError, match=r"PrioritizedSampler\(\.\.\.\)"):
        rb.update_tensordict_priority_if_present(sample)
    with pytest.raises(RuntimeError, match=r"PrioritizedSampler\(\.\.\.\)"):
        rb.update_priority_if_present(index=[0], generation=[0], priority=1.0)


def test_a_slice_batch_has_a_flag_per_record_and_none_is_live_after_a_lap():
    rb = td_rb(WITH_PRIORITIES["prioritized_slices"]())
    sample = rb.sample()
    assert sample["index"].shape == (4, 1)
    assert sample["index_generation"].shape == (4,)

    now = rb.update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=torch.ones(4)
    )
    rb.extend(episodes(8))
    late = rb.update_priority_if_present(
        index=sample["index"], generation=sample["index_generation"], priority=torch.ones(4)
    )

    assert now.updated_mask.tolist() == [True] * 4
    assert late.updated_mask.tolist() == [False] * 4


def test_a_slice_sample_goes_back_as_it_came():
    rb = td_rb(WITH_PRIORITIES["prioritized_slices"]())
    sample = rb.sample()
    sample["td_error"] = torch.tensor([2.0, 3.0, 4.0, 5.0])
    expected = [1.0] * CAPACITY
    for slot, priority in zip(sample["index"][:, 0].tolist(), [2.0, 3, 4, 5], strict=True):
        expected[slot] = priority
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 4
    assert leaves(rb) == expected


# ------------------------------------------------------------------ prioritized slices


def test_a_prioritized_slice_sample_leaves_no_masked_leaf_behind():
    rb = td_rb(WITH_PRIORITIES["prioritized_slices"]())
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    for _ in range(5):
        rb.sample()
    assert leaves(rb) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_update_waits_for_a_prioritized_slice_sample_and_keeps_its_leaf(monkeypatch):
    rb = td_rb(WITH_PRIORITIES["prioritized_slices"]())
    inside, go_on = threading.Event(), threading.Event()
    stock = PrioritizedSampler.sample

    def sample_slowly(self, storage, batch_size):
        inside.set()  # the ends of the episodes, slots 3 and 7, are masked
        assert go_on.wait(30)
        return stock(self, storage, batch_size)

    monkeypatch.setattr(PrioritizedSampler, "sample", sample_slowly)
    sampling = Thread(rb.sample)
    assert inside.wait(30)
    updating = Thread(
        lambda: rb.update_priority_if_present(index=[3, 4], generation=[0, 0], priority=[6.0, 5.0])
    )
    updating.join_briefly(0.2)
    assert updating.is_alive()
    go_on.set()
    sampling.join()

    assert updating.join().num_updated == 2
    assert leaves(rb) == [1, 1, 1, 6, 5, 1, 1, 1]


def test_a_write_of_another_buffer_waits_for_a_prioritized_slice_sample(monkeypatch):
    rb = td_rb(WITH_PRIORITIES["prioritized_slices"]())
    rb.update_priority(torch.arange(8), torch.full((8,), 3.0))
    rb.sampler._max_priority = (torch.tensor(2.0), torch.tensor(0))  # the default of a new record
    other = TensorDictReplayBuffer(storage=rb.storage, track_generations=True)
    other.writer._cursor = 3
    inside, go_on = threading.Event(), threading.Event()
    stock = PrioritizedSampler.sample

    def sample_slowly(self, storage, batch_size):
        inside.set()
        assert go_on.wait(30)
        return stock(self, storage, batch_size)

    monkeypatch.setattr(PrioritizedSampler, "sample", sample_slowly)
    sampling = Thread(rb.sample)
    assert inside.wait(30)
    writing = Thread(lambda: other.extend(episodes(3, 1)))
    writing.join_briefly(0.2)
    assert writing.is_alive()
    go_on.set()
    sampling.join()
    writing.join()

    assert leaves(rb) == [3, 3, 3, 2, 3, 3, 3, 3]


def test_a_prioritized_slice_sample_that_fails_gives_its_masked_leaves_back():
    sampler = PrioritizedSliceSampler(
        CAPACITY, **PER, slice_len=2, traj_key="episode", strict_length=True
    )
    rb = td_rb(sampler, records=0)
    rb.extend(episodes(0, 5, length=1))  # no episode is as long as a slice
    rb.update_priority(torch.arange(5), torch.arange(2.0, 7.0))
    with pytest.raises(RuntimeError):
        rb.sample()
    assert leaves(rb) == [2, 3, 4, 5, 6, 0, 0, 0]


def test_a_sample_that_is_interrupted_gives_the_masked_leaves_back(monkeypatch):
    rb = td_rb(WITH_PRIORITIES["prioritized_slices"]())
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))

    def interrupted(self, storage, batch_size):
        assert leaves(rb) == [1, 2, 3, 0, 5, 6, 7, 0]
        raise KeyboardInterrupt

    monkeypatch.setattr(PrioritizedSampler, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rb.sample()
    assert leaves(rb) == [1, 2, 3, 4, 5, 6, 7, 8]


# ------------------------------------------------------------------ consuming


def consuming(**kwargs):
    return td_rb(None, consume_after_n_samples=1, batch_size=2, **kwargs)


def test_a_record_that_was_consumed_stays_live_until_another_takes_its_slot():
    rb = consuming()
    sample = rb.sample()
    assert is_live(rb, sample).all()
    index, generation = rb.extend(episodes(8, 2), return_generation=True)
    assert sorted(index.tolist()) == sorted(sample["index"].tolist())  # consumed slots come first
    assert generation.tolist() == [1, 1]
    assert not is_live(rb, sample).any()


def test_a_consumed_slot_and_the_cursor_in_one_extend():
    rb = consuming(records=6)
    first = rb.sample()["index"].tolist()
    index, generation = rb.extend(episodes(8, 4), return_generation=True)
    assert sorted(index[:2].tolist()) == sorted(first)
    assert index[2:].tolist() == [6, 7]
    assert generation.tolist() == [1, 1, 0, 0]


# ------------------------------------------------------------------ prefetch, running maximum


@pytest.mark.parametrize("make", WITH_PRIORITIES.values())
def test_a_prefetched_sample_carries_the_stamps_of_when_it_was_read(make):
    rb = td_rb(make(), prefetch=2)
    rb.sample()  # reads two more ahead
    for future in list(rb._prefetch_queue):
        future.result()
    rb.extend(episodes(8))

    ahead = rb.sample()

    assert ahead["index_generation"].tolist() == [0] * 4
    assert (ahead["id"] < 8).all()
    ahead["td_error"] = torch.full((4,), 9.0)
    assert rb.update_tensordict_priority_if_present(ahead).num_stale == 4
    assert leaves(rb) == [1] * 8


@pytest.mark.parametrize("make", WITH_PRIORITIES.values())
def test_the_maximum_within_the_buffer_follows_conditional_updates(make):
    rb = td_rb(make(max_priority_within_buffer=True))
    rb.update_priority_if_present(index=[2, 5], generation=[0, 0], priority=[6.0, 3.0])
    assert rb.sampler.default_priority == 6
    rb.update_priority_if_present(index=[2], generation=[0], priority=[2.0])
    assert rb.sampler.default_priority == 3  # that of slot 5 is the largest now
    rb.update_priority_if_present(index=[5], generation=[7], priority=[50.0])  # stale
    assert rb.sampler.default_priority == 3
    assert leaves(rb) == [1, 1, 2, 1, 1, 3, 1, 1]


def test_the_maximum_leaves_the_buffer_with_its_record_also_when_another_buffer_writes():
    rb = td_rb(WITH_PRIORITIES["prioritized"](max_priority_within_buffer=True))
    other = TensorDictReplayBuffer(storage=rb.storage, track_generations=True)
    rb.update_priority_if_present(index=[0, 5], generation=[0, 0], priority=[6.0, 3.0])
    other.writer._cursor = 0
    other.extend(episodes(0, 1))
    rb.update_priority_if_present(index=[0], generation=[1], priority=[1.0])
    assert rb.sampler.default_priority == 3


# ------------------------------------------------------------------ transforms


def test_a_transform_that_drops_or_renames_record_keys_leaves_the_stamps():
    for transform in (
        ExcludeTransform("id"),
        SelectTransform("episode"),
        RenameTransform(["episode"], ["renamed"]),
        UnsqueezeTransform(dim=-1, in_keys=["episode"]),
    ):
        rb = td_rb(WITH_PRIORITIES["prioritized"](), transform=transform)
        sample = rb.sample().set("td_error", torch.full((4,), 2.0))
        assert rb.update_tensordict_priority_if_present(sample).num_updated == 4


@pytest.mark.parametrize(
    "drop",
    [
        lambda sample: sample.exclude("index_generation"),
        lambda sample: sample.select("index", "td_error", strict=False),
        lambda sample: sample.rename_key_("index_generation", "stamp"),
    ],
)
def test_a_sample_that_lost_its_stamps_is_refused_with_the_keys_that_it_has(drop):
    rb = td_rb(WITH_PRIORITIES["prioritized"]())
    with pytest.raises(KeyError, match="dropped the key"):
        rb.update_tensordict_priority_if_present(drop(rb.sample()))
    assert leaves(rb) == [1] * 8


def made_up(kind):
    """Records and info as a storage, a transform, a sampler or a user's _sample may give them."""
    records, info = ids(range(4)), {"index": torch.arange(4), "weight": torch.rand(4)}
    if kind == "dimensions":
        records = TensorDict({"id": torch.arange(6).view(3, 2)}, [3, 2])
        info = {
            "index": (torch.arange(3).repeat(2).view(3, 2), torch.ones(3, 2, dtype=torch.int64))
        }
    elif kind == "rows":
        records = TensorDict({"id": torch.arange(6).view(3, 2)}, [3, 2])
        info = {"index": torch.arange(3), "of_all": np.arange(3), ("next", "mask"): [True] * 3}
    elif kind == "one":
        records, info = (
            TensorDict({"id": torch.arange(3).view(3, 1)}, [3, 1]),
            {"at": torch.ones(1)},
        )
    elif kind == "locked":
        records = records.lock_()
    elif kind == "device":
        records = records.to("cpu")
    elif kind == "stacked":
        records = lazy_stack(list(records.unbind(0)))
    elif kind == "tensorclass":
        records = Step(obs=torch.arange(4.0), reward=torch.ones(4), batch_size=[4])
    elif kind == "tensor":
        records = torch.arange(4)
    return records, info


@pytest.mark.parametrize(
    "kind",
    ["plain", "dimensions", "rows", "one", "locked", "device", "stacked", "tensorclass"],
)
def test_a_sample_is_what_torchrls_own_method_makes_of_it(kind, monkeypatch):
    rb = td_rb(RandomSampler())
    samples = []
    for sample in (rb.sample, partial(torchrl.data.TensorDictReplayBuffer.sample, rb)):
        torch.manual_seed(0)
        monkeypatch.setattr(rb, "_sample", lambda size: made_up(kind))
        samples.append(sample())
    ours, theirs = samples
    assert type(ours) is type(theirs)
    assert (ours.batch_size, ours.device) == (theirs.batch_size, theirs.device)
    assert ours.is_locked == theirs.is_locked == (kind == "locked")
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert (ours == theirs).all()
    if kind not in ("tensorclass", "one"):
        assert {"index", "id"} <= set(ours.keys())


def test_a_sample_without_a_tensordict_is_refused(monkeypatch):
    rb = td_rb(RandomSampler())
    monkeypatch.setattr(rb, "_sample", lambda size: made_up("tensor"))
    with pytest.raises(RuntimeError, match="records in a tensordict: got Tensor"):
        rb.sample()


class Labelled(torchrl.data.TensorDictReplayBuffer):
    """A user's buffer on TorchRL's."""

    def sample(self, *args, **kwargs):
        return super().sample(*args, **kwargs).set("by_sample", torch.ones(4))

    def _sample(self, batch_size):
        data, info = super()._sample(batch_size)
        return data, {**info, "by_info": torch.ones(batch_size)}


class Annealed(torchrl.data.TensorDictReplayBuffer):
    """The same with arguments in another order."""

    def sample(self, batch_size=None, beta=None, return_info=False):
        assert beta is None
        return super().sample(batch_size, return_info=return_info)


class Marked(torchrl.data.ReplayBuffer):
    """A user's buffer below TorchRL's tensordict buffer."""

    def sample(self, batch_size=None, return_info=False):
        data, info = super().sample(batch_size, return_info=True)
        info["by_sample"] = torch.ones_like(info["index"])
        return (data, info) if return_info else data


class MarkedTensorDict(torchrl.data.TensorDictReplayBuffer, Marked):
    pass


def on_ours(users, first=ConditionalPriorityUpdates):
    cls = type("OnOurs", (first, users), {})
    rb = cls(storage=LazyTensorStorage(8), batch_size=4, track_generations=True)
    rb.extend(ids(range(8)))
    return rb


@pytest.mark.parametrize(
    ("users", "first", "adds"),
    [
        (Labelled, TensorDictReplayBuffer, {"by_sample", "by_info"}),
        (Labelled, ConditionalPriorityUpdates, {"by_sample", "by_info"}),
        (Annealed, ConditionalPriorityUpdates, set()),
        (Marked, TensorDictReplayBuffer, {"by_sample"}),
        (MarkedTensorDict, ConditionalPriorityUpdates, {"by_sample"}),
    ],
)
def test_what_a_users_buffer_does_in_sample_is_done(users, first, adds):
    rb = on_ours(users, first)
    for sample in (rb.sample(), rb.sample(4), rb.sample(batch_size=4)):
        assert {"index_generation", *adds} <= set(sample.keys())


@pytest.mark.parametrize("cls", [torchrl.data.ReplayBuffer, torchrl.data.TensorDictReplayBuffer])
def test_a_patch_of_torchrls_sample_is_called(cls, monkeypatch):
    rb, calls, torchrls = td_rb(RandomSampler()), [], cls.sample

    def counted(*args, **kwargs):
        calls.append(args)
        return torchrls(*args, **kwargs)

    monkeypatch.setattr(cls, "sample", counted)
    assert "index_generation" in rb.sample().keys()  # noqa: SIM118
    assert len(calls) == 1


def test_sample_has_the_arguments_of_torchrls():
    rb = td_rb(RandomSampler())
    expected = inspect.signature(torchrl.data.TensorDictReplayBuffer.sample)
    assert inspect.signature(TensorDictReplayBuffer.sample) == expected
    assert len(rb.sample(batch_size=4)) == len(rb.sample(4, False)) == 4
    with pytest.warns(UserWarning, match="conflicting batch_sizes"):
        assert len(rb.sample(2)) == 2
    with pytest.raises(TypeError, match="multiple values for argument 'batch_size'"):
        rb.sample(4, batch_size=4)
    with pytest.warns(UserWarning, match="include_info"):
        assert "index_generation" not in rb.sample(include_info=False).keys()  # noqa: SIM118


@pytest.mark.parametrize("value", [None, torch.arange(3)])
def test_an_info_that_does_not_go_with_the_records_is_refused_with_its_name(value, monkeypatch):
    rb = td_rb(RandomSampler())
    monkeypatch.setattr(rb, "_sample", lambda size: (ids(range(4)), {"odd": value}))
    with pytest.raises(RuntimeError, match=r"'odd'.* for records of batch size \[4\]"):
        rb.sample()


def test_a_transform_that_changes_the_number_of_records_is_refused_at_the_sample():
    rb = td_rb(WITH_PRIORITIES["prioritized"](), transform=lambda td: td.reshape(2, 2))
    with pytest.raises(RuntimeError, match=r"batch size \[2, 2\]"):
        rb.sample()


def test_rows_that_a_user_dropped_or_reordered_keep_their_own_handles():
    rb = td_rb(WITH_PRIORITIES["prioritized"](), batch_size=8)
    sample = rb.sample()[torch.tensor([5, 0])]
    sample["td_error"] = torch.tensor([4.0, 9.0])
    rb.update_tensordict_priority_if_present(sample)
    first, second = sample["index"].tolist()
    assert leaves(rb)[second] == 9
    assert leaves(rb)[first] == (9 if first == second else 4)


# ------------------------------------------------------------------ records


def test_trajectory_records_are_reduced_to_one_priority_each():
    rb = td_buffer(0, storage=LazyTensorStorage(4), batch_size=4)
    rb.extend(TensorDict({"obs": torch.zeros(4, 2)}, [4, 2]))
    sample = TensorDict({"td_error": torch.tensor([[1.0, 5], [7, 2], [3, 3], [0.5, 9]])}, [4, 2])
    sample["index"] = torch.arange(4).unsqueeze(-1).expand(4, 2)
    sample["index_generation"] = torch.zeros(4, 2, dtype=torch.int64)

    assert rb.update_tensordict_priority_if_present(sample).updated_mask.tolist() == [True] * 4
    assert leaves(rb) == [5, 7, 3, 9]

    rb.update_priority(torch.arange(4), torch.ones(4))
    rb.writer._cursor = 0
    rb.extend(TensorDict({"obs": torch.zeros(1, 2)}, [1, 2]))
    rb.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    late = rb.update_tensordict_priority_if_present(sample)
    assert late.updated_mask.tolist() == [False, True, True, True]
    assert leaves(rb) == [1, 7, 3, 9]


def test_a_sample_of_trajectory_records_goes_back_as_it_came():
    rb = td_buffer(0, storage=LazyTensorStorage(4), batch_size=6)
    rb.extend(TensorDict({"obs": torch.zeros(4, 2)}, [4, 2]))
    sample = rb.sample()
    assert sample["index_generation"].shape == sample["index"].shape == (6, 2)
    sample["td_error"] = torch.stack([sample["index"][:, 0] + 2.0, torch.ones(6)], 1)
    assert rb.update_tensordict_priority_if_present(sample).updated_mask.tolist() == [True] * 6
    for slot in sample["index"][:, 0].tolist():
        assert leaves(rb)[slot] == slot + 2


@tensorclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


def test_tensorclass_records_come_with_their_stamps_in_the_info():
    rb = buffer(0, batch_size=4)
    steps = Step(obs=torch.arange(8.0), reward=torch.ones(8), batch_size=[8])
    index, generation = rb.extend(steps, return_generation=True)
    assert (index.tolist(), generation.tolist()) == (list(range(8)), [0] * 8)
    sample, info = rb.sample(return_info=True)
    assert isinstance(sample, Step)
    assert sample.obs.tolist() == info["index"].tolist()
    rb.extend(steps[:4])
    result = rb.update_priority_if_present(
        index=info["index"], generation=info["index_generation"], priority=2.0
    )
    assert result.updated_mask.tolist() == (info["index"] >= 4).tolist()


def test_numpy_and_pytree_records():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(4),
        sampler=PrioritizedSampler(4, **PER),
        batch_size=4,
        track_generations=True,
    )
    rb.extend((torch.arange(4), {"b": torch.arange(4.0)}))
    (_, _), info = rb.sample(return_info=True)
    index = np.asarray(info["index"])
    rb.extend((torch.arange(1), {"b": torch.arange(1.0)}))
    result = rb.update_priority_if_present(
        index=index, generation=np.asarray(info["index_generation"]), priority=np.float64(3)
    )
    assert result.updated_mask.tolist() == (index != 0).tolist()
