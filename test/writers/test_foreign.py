"""Writers that are not simply ours: a user's, and TorchRL's that tracks."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, handles, ids, leaves, stamps, td_buffer
from tensordict import TensorDict
from torchrl.data import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
)
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


@pytest.mark.parametrize("base", OURS.values(), ids=OURS)
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
    assert not rb._table.writing.is_watched


def test_a_users_write_that_fails_leaves_no_handle_and_no_old_priority():
    class Failing(RoundRobinWriter):
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
    assert not rb._table.writing.is_watched


@pytest.mark.parametrize("base", [TensorDictRoundRobinWriter, TensorDictMaxValueWriter])
def test_a_write_that_fails_in_our_own_method_kills_only_the_handles_that_it_must(
    base, monkeypatch
):
    class Named(base):
        """A user's writer that overrides no write."""

        name = "mine"

    writer = Named(track_generations=True)
    writer._rank_key = "id"
    rb = prioritized(writer)
    data = TensorDict({"id": torch.arange(8), "b": torch.zeros(8, 2)}, [8])
    rb.extend(data)
    held = handles(rb)
    with pytest.raises(ValueError, match="must have the shape"):  # refused beforehand
        rb.extend(TensorDict({"id": torch.arange(100, 103), "b": torch.zeros(3, 5)}, [3]))
    assert live(rb, held) == [True] * 8
    monkeypatch.setattr(rb.storage, "set", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rb.extend(TensorDict({"id": torch.arange(100, 103), "b": torch.zeros(3, 2)}, [3]))
    assert live(rb, held) == [False] * 3 + [True] * 5


def test_a_max_value_writer_whose_choice_is_the_users():
    class Even(TensorDictMaxValueWriter):
        def get_insert_index(self, data):
            return super().get_insert_index(data) if int(data["id"]) % 2 == 0 else None

    rb = prioritized(Even(rank_key="id", track_generations=True))
    index, generation = rb.extend(ids([2, 3, 4]), return_generation=True)
    assert index.tolist() == [0, -1, 1]
    assert generation.tolist() == [0, -1, 0]


def test_a_writer_whose_write_contains_another_is_watched_to_the_end():
    class Twice(RoundRobinWriter):
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


def test_a_writer_that_rejects_or_refuses_records_leaves_others_alone():
    storage = LazyTensorStorage(4)
    tracking = TensorDictReplayBuffer(storage=storage, track_generations=True)
    best = TensorDictReplayBuffer(
        storage=storage, writer=torchrl.data.TensorDictMaxValueWriter(rank_key="id")
    )
    for value in (1.0, 2.0, 3.0, 4.0, 0.0):
        index = best.add(TensorDict({"id": torch.tensor(value)}))
    assert index is None
    held = tracking._table.of(range(4))
    assert held.tolist() == [0] * 4
    immutable = TensorDictReplayBuffer(storage=storage, writer=ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        immutable.extend(ids(range(2)))
    assert tracking._table.is_live(range(4), held).all()


# ------------------------------------------------------------------ TorchRL's writer that tracks


@pytest.mark.parametrize("writer", THEIRS.values(), ids=THEIRS)
def test_torchrls_writer_that_stamps_after_the_data_is_refused(writer):
    rule = f"{writer.__name__}, which stamps after them. Pass generations.{writer.__name__}"
    with pytest.raises(ValueError, match=rule):
        prioritized(writer(track_generations=True))
    with pytest.raises(ValueError, match=rule):
        prioritized(partial(writer, track_generations=True))
    rb = td_buffer()
    with pytest.raises(ValueError, match=rule):
        rb.set_writer(writer(track_generations=True))
    assert type(rb.writer) is TensorDictRoundRobinWriter
    assert live(rb, handles(rb)) == [True] * 8


def test_a_torchrl_buffer_beside_ours_advances_the_table_also_after_a_restore():
    ours = td_buffer()
    theirs = torchrl.data.TensorDictReplayBuffer(
        storage=ours.storage,
        writer=torchrl.data.TensorDictRoundRobinWriter(track_generations=True),
    )
    held = handles(ours)
    theirs.extend(ids(range(3)))
    assert live(ours, held) == [False] * 3 + [True] * 5
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))  # draws a base, which it doesn't know
    held = handles(ours)
    theirs.extend(ids(range(2)))
    written = (torch.arange(2) + 3).tolist()
    assert [slot for slot in range(8) if not live(ours, held)[slot]] == written
    assert (ours._table.of(written) >= ours._table.counters.base).all()
