"""Writers that are not simply ours: a user's, and TorchRL's that tracks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, handles, ids, leaves, stamps, td_buffer
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler
from torchrl.data.replay_buffers.generations import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

OURS = {"ring": RoundRobinWriter, "td ring": TensorDictRoundRobinWriter}
THEIRS = {
    "TorchRL's": torchrl.data.RoundRobinWriter,
    "TorchRL's td": torchrl.data.TensorDictRoundRobinWriter,
}


def prioritized(writer, cls=TensorDictPrioritizedReplayBuffer, **kwargs):
    return cls(**PER, storage=LazyTensorStorage(CAPACITY), writer=writer, **kwargs)


def live(rb, held):
    return rb._table.is_live(**held).tolist()


def that_overrides(base):
    class Logged(base):
        """A user's writer that only looks on."""

        calls = 0

        def extend(self, data):
            self.calls += 1
            return super().extend(data)

        def add(self, data):
            self.calls += 1
            return super().add(data)

    return Logged(track_generations=True)


@pytest.mark.parametrize("base", [*OURS.values(), *THEIRS.values()], ids=[*OURS, *THEIRS])
def test_a_writer_that_calls_its_base_stamps_each_slot_once_per_write(base):
    rb = prioritized(that_overrides(base), track_generations=True)
    index, generation = rb.extend(ids(range(6)), return_generation=True)
    assert (index.tolist(), generation.tolist()) == (list(range(6)), [0] * 6)
    held = handles(rb)
    rb.extend(ids(range(3)))
    assert stamps(rb).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert rb.add(ids([9])[0], return_generation=True) == (1, 1)
    assert live(rb, held) == [False, False, True, True, True, True, False, False]
    assert rb.writer.calls == 3


class WithoutStamps(TensorDictRoundRobinWriter):
    """Writes by itself into slots 0, 1, ..., tells no sampler and stamps nothing."""

    def extend(self, data):
        index = torch.arange(len(data))
        self._storage.set(index, data)
        return index

    def add(self, data):
        self._storage.set(2, data)
        return 2


def test_what_a_users_writer_left_unstamped_the_buffer_stamps():
    rb = prioritized(WithoutStamps(track_generations=True))
    first = rb.extend(ids(range(8)), return_generation=True)
    assert first[1].tolist() == [0] * 8
    held = handles(rb)
    rb.update_priority_if_present(**held, priority=torch.arange(2.0, 10.0))
    assert rb.extend(ids(range(2)), return_generation=True)[1].tolist() == [1, 1]
    assert rb.add(ids([5])[0], return_generation=True) == (2, 1)
    assert live(rb, held) == [False] * 3 + [True] * 5
    # No priority of a record that is gone: the default, which is the largest ever given.
    assert leaves(rb) == [9, 9, 9, 5, 6, 7, 8, 9]


def test_the_priorities_that_its_records_carry_are_kept():
    rb = prioritized(WithoutStamps(track_generations=True))
    rb.extend(ids(range(8)))
    rb.extend(ids(range(2), td_error=torch.tensor([3.0, 4.0])))
    rb.add(ids([5], td_error=torch.tensor([6.0]))[0])
    assert leaves(rb)[:3] == [3, 4, 6]
    assert stamps(rb).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


class InPart(TensorDictRoundRobinWriter):
    """Writes the first half of a batch by the ring and the rest by itself, at the end."""

    def extend(self, data):
        half = len(data) // 2
        first = super().extend(data[:half])
        rest = torch.arange(CAPACITY - (len(data) - half), CAPACITY)
        self._storage.set(rest, data[half:])
        return torch.cat([first, rest])


def test_slots_that_it_stamped_only_in_part_are_completed():
    rb = prioritized(InPart(track_generations=True))
    index, generation = rb.extend(ids(range(8)), return_generation=True)
    assert index.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert generation.tolist() == [0] * 8
    held = handles(rb)
    index, generation = rb.extend(ids(range(4)), return_generation=True)
    assert index.tolist() == [4, 5, 6, 7]
    assert generation.tolist() == [1, 1, 1, 1]
    assert live(rb, held) == [True] * 4 + [False] * 4


class StampsAfterItself(WithoutStamps):
    def extend(self, data):
        index = super().extend(data)
        self.table.advance(index[: len(index) // 2])
        return index


def test_what_it_stamped_by_itself_is_not_stamped_again():
    rb = prioritized(StampsAfterItself(track_generations=True))
    rb.extend(ids(range(4)))
    assert stamps(rb)[:4].tolist() == [0, 0, 0, 0]
    rb.extend(ids(range(4)))
    assert stamps(rb)[:4].tolist() == [1, 1, 1, 1]


class OfTorchRL(torchrl.data.TensorDictRoundRobinWriter):
    """A user's writer on top of TorchRL's that writes by itself and stamps nothing."""

    extend = WithoutStamps.extend


def test_a_subclass_of_torchrls_writer_that_does_not_stamp_is_completed_too():
    rb = prioritized(OfTorchRL(track_generations=True))
    rb.extend(ids(range(8)))
    held = handles(rb)
    rb.extend(ids(range(2)))
    assert stamps(rb).tolist() == [1, 1] + [0] * 6
    assert live(rb, held) == [False] * 2 + [True] * 6


class Nested(TensorDictRoundRobinWriter):
    """Writes a part through another buffer on the same storage."""

    other: ReplayBuffer

    def extend(self, data):
        self.other.extend(data[:2])
        self._storage.set(torch.arange(2, len(data)), data[2:])
        return torch.arange(len(data))


def test_stamps_of_a_write_within_a_write_count():
    rb = prioritized(Nested(track_generations=True))
    rb.writer.other = ReplayBuffer(storage=rb.storage, writer=WithoutStamps())
    rb.extend(ids(range(4)))
    assert stamps(rb).tolist() == [0] * 4 + [-1] * 4
    assert rb._table._noted is None


@pytest.mark.parametrize("base", [RoundRobinWriter, torchrl.data.RoundRobinWriter])
def test_a_users_write_that_fails_leaves_no_handle_and_no_old_priority(base):
    class Failing(base):
        fails = False

        def extend(self, data):
            index = super().extend(data)
            if self.fails:
                self._storage.set(torch.tensor([7]), data[:1])  # behind everybody's back
                raise RuntimeError("broken")
            return index

    rb = prioritized(Failing(track_generations=True), cls=PrioritizedReplayBuffer)
    rb.extend(torch.arange(8))
    held = handles(rb)
    rb.update_priority_if_present(**held, priority=torch.arange(2.0, 10.0))
    rb.writer.fails = True
    with pytest.raises(RuntimeError, match="broken"):
        rb.extend(torch.arange(2))
    assert live(rb, held) == [False] * 8
    assert leaves(rb) == [9] * 8
    rb.writer.fails = False
    rb.extend(torch.arange(2))
    assert rb._table._noted is None
    assert "_bump_generation" not in vars(rb.writer)


@pytest.mark.parametrize("base", [TensorDictRoundRobinWriter, TensorDictMaxValueWriter])
def test_a_write_that_fails_in_our_own_method_kills_only_the_handles_that_it_must(base):
    class Named(base):
        """A user's writer that overrides no write."""

        name = "mine"

    writer = Named(track_generations=True)
    writer._rank_key = "id"
    rb = prioritized(writer)
    data = TensorDict({"id": torch.arange(8), "b": torch.zeros(8, 2)}, [8])
    rb.extend(data)
    held = handles(rb)
    with pytest.raises(RuntimeError):
        rb.extend(TensorDict({"id": torch.arange(100, 103), "b": torch.zeros(3, 5)}, [3]))
    assert live(rb, held) == [False] * 3 + [True] * 5


def test_a_max_value_writer_whose_choice_is_the_users():
    class Even(TensorDictMaxValueWriter):
        def get_insert_index(self, data):
            return super().get_insert_index(data) if int(data["id"]) % 2 == 0 else None

    rb = prioritized(Even(rank_key="id", track_generations=True))
    index, generation = rb.extend(ids([2, 3, 4]), return_generation=True)
    assert index.tolist() == [0, -1, 1]
    assert generation.tolist() == [0, -1, 0]


def test_a_torchrl_writer_whose_write_contains_another_is_watched_to_the_end():
    class Twice(torchrl.data.RoundRobinWriter):
        rb: ReplayBuffer

        def extend(self, data):
            if len(data) > 1:
                self.rb.extend(data[:1])
                return torch.cat([torch.tensor([0]), super().extend(data[1:])])
            return super().extend(data)

    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=Twice(track_generations=True))
    rb.writer.rb = rb
    assert rb.extend(torch.arange(3), return_generation=True)[1].tolist() == [0, 0, 0]
    assert stamps(rb).tolist() == [0, 0, 0, -1]
    assert "_bump_generation" not in vars(rb.writer)


# ------------------------------------------------------------------ TorchRL's writer that tracks


@pytest.mark.parametrize("writer", THEIRS.values(), ids=THEIRS)
@pytest.mark.parametrize(
    "cls", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer]
)
def test_torchrls_writer_serves_every_buffer_of_ours(cls, writer):
    kwargs = PER if "Prioritized" in cls.__name__ else {"sampler": PrioritizedSampler(8, 1.0, 1.0)}
    rb = cls(
        **kwargs,
        storage=LazyTensorStorage(CAPACITY),
        writer=writer(track_generations=True),
        track_generations=True,
        batch_size=4,
    )
    held = rb.extend(ids(range(8)), return_generation=True)
    assert held[1].tolist() == [0] * 8
    assert rb.add(ids([8])[0], return_generation=True) == (0, 1)
    result = rb.update_priority_if_present(index=held[0], generation=held[1], priority=3.0)
    assert result.updated_mask.tolist() == [False] + [True] * 7
    _, info = rb.sample(return_info=True)
    assert info["index_generation"].tolist() == stamps(rb)[info["index"]].tolist()
    assert rb.update_priority_if_present(
        index=info["index"], generation=info["index_generation"], priority=5.0
    ).updated_mask.all()
    rb.empty()
    assert not rb._table.is_live(info["index"], info["index_generation"]).any()
    assert rb.extend(ids(range(2)), return_generation=True)[1].tolist() == [3, 2]


@pytest.mark.parametrize("writer", THEIRS.values(), ids=THEIRS)
@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_a_restore_under_torchrls_writer_kills_every_handle(writer, way, tmp_path):
    """It replaces the counters at a load and knows no lineage."""
    rb = prioritized(writer(track_generations=True), batch_size=4)
    rb.extend(ids(range(8)))
    held = handles(rb)
    if way == "dumps":
        rb.dumps(tmp_path)
    state = copy.deepcopy(rb.state_dict())
    rb.extend(ids(range(4)))
    later = handles(rb)
    rb.loads(tmp_path) if way == "dumps" else rb.load_state_dict(state)
    assert live(rb, held) == live(rb, later) == [False] * 8
    rb.extend(ids(range(4)))
    assert live(rb, held) == live(rb, later) == [False] * 8
    sample = rb.sample()
    assert rb._table.is_live(sample["index"], sample["index_generation"]).all()


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_under_torchrls_writer_is_independent(copy_of):
    rb = prioritized(torchrl.data.TensorDictRoundRobinWriter(track_generations=True), batch_size=4)
    rb.extend(ids(range(8)))
    held = handles(rb)
    twin = copy_of(rb)
    ours = rb.extend(ids(range(2)), return_generation=True)
    theirs = twin.extend(ids(range(2)), return_generation=True)
    assert live(rb, held) == live(twin, held) == [False] * 2 + [True] * 6
    assert not twin._table.is_live(*ours).any()
    assert not rb._table.is_live(*theirs).any()
    sample = twin.sample()
    assert twin._table.is_live(sample["index"], sample["index_generation"]).all()


def test_after_our_restore_the_first_sample_under_torchrls_writer_is_live():
    ours = td_buffer()
    theirs = TensorDictReplayBuffer(
        storage=ours.storage,
        writer=torchrl.data.TensorDictRoundRobinWriter(track_generations=True),
        batch_size=64,
    )
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))  # draws a base, which it doesn't know
    generation = theirs.extend(ids(range(3)), return_generation=True)[1]
    sample = theirs.sample()
    assert theirs._table.is_live(sample["index"], sample["index_generation"]).all()
    assert (generation >= ours._table.base).all()
    theirs.extend(ids(range(3)))
    sample = theirs.sample()
    assert theirs._table.is_live(sample["index"], sample["index_generation"]).all()


def test_set_storage_works_under_torchrls_writer():
    rb = prioritized(torchrl.data.TensorDictRoundRobinWriter(track_generations=True))
    rb.extend(ids(range(8)))
    held = handles(rb)
    rb.set_storage(LazyMemmapStorage(CAPACITY))
    rb.extend(ids(range(8)))
    assert live(rb, held) == [False] * 8
    assert live(rb, handles(rb)) == [True] * 8
    assert rb._write_lock is rb._table.lock
    assert rb.extend(ids(range(1)), return_generation=True)[1].tolist() == [int(stamps(rb)[0])]
