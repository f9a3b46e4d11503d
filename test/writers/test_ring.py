from __future__ import annotations

import pytest
import torch
import torchrl.data
from common import (
    CAPACITY,
    PER,
    STORAGES,
    Thread,
    buffer,
    failing_writes,
    handles,
    ids,
    leaves,
    stamps,
    td_buffer,
)
from tensordict import TensorDict, lazy_stack, tensorclass
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, PrioritizedSampler
from torchrl.data.replay_buffers import generations
from torchrl.data.replay_buffers.generations import (
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.generations.core.update import last_rows


@tensorclass
class Record:
    id: torch.Tensor


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_tracking_is_off_by_default_and_then_nothing_is_allocated(writer):
    storage = LazyTensorStorage(CAPACITY)
    rb = ReplayBuffer(storage=storage, writer=writer(), batch_size=2)
    rb.extend(ids(range(8)))
    assert not rb.writer.tracks_generations
    assert not hasattr(storage, "_slot_generations")
    assert rb.writer.generations_of([0, 1]).tolist() == [-1, -1]
    assert "_generation" not in rb.state_dict()["_writer"]
    assert set(rb.sample(return_info=True)[1]) == {"index"}


@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
@pytest.mark.parametrize("rows", [9, 16, 18, 24, 27])
@pytest.mark.parametrize("start", [0, 3])
def test_a_batch_larger_than_the_storage_keeps_its_last_rows_whole(make, rows, start):
    rb = ReplayBuffer(storage=make(CAPACITY), track_generations=True)
    if start:
        rb.extend(torch.arange(1000, 1000 + start))
    before = stamps(rb).clone() if start else torch.full((CAPACITY,), -1)
    data = torch.arange(rows)
    index, generation = rb.extend(
        list(data) if make is ListStorage else data, return_generation=True
    )
    slots = [(start + row) % CAPACITY for row in range(rows)]
    holder = {slot: row for row, slot in enumerate(slots)}  # the last row of a slot holds it
    assert index.tolist() == slots
    assert [int(record) for record in rb[:]] == [holder[slot] for slot in range(CAPACITY)]
    writes = torch.bincount(torch.tensor(slots), minlength=CAPACITY)
    if make is not STORAGES["tensor"]:  # that one is full from the start
        assert stamps(rb).tolist() == (before + writes).tolist()
    assert generation.tolist() == [
        int(stamps(rb)[slot]) if holder[slot] == row else -1 for row, slot in enumerate(slots)
    ]
    assert rb.writer._cursor == (start + rows) % CAPACITY
    assert rb.write_count == start + rows
    rb.add(torch.tensor(77))
    assert int(rb[(start + rows) % CAPACITY]) == 77


def test_one_extend_of_18_rows_into_an_empty_buffer():
    rb = buffer(0)
    index, generation = rb.extend(torch.arange(18), return_generation=True)
    assert stamps(rb).tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    assert index.tolist() == [row % 8 for row in range(18)]
    assert generation.tolist() == [-1] * 10 + [1] * 6 + [2] * 2
    assert rb._table.is_live(index, generation).tolist() == [False] * 10 + [True] * 8
    assert rb[:].tolist() == [16, 17, 10, 11, 12, 13, 14, 15]
    assert rb.storage._last_cursor_index == 1  # where the ring was written last, for slice samplers


def test_priorities_of_rows_that_a_batch_overwrote_itself_are_not_written():
    rb = td_buffer(0)
    data = ids(range(18), td_error=torch.arange(18.0).flip(0) + 1)
    rb.extend(data)
    assert leaves(rb) == [2, 1, 8, 7, 6, 5, 4, 3]
    assert rb.sampler.default_priority == 8  # not 18: that record is gone


def test_pytrees_and_lists_of_tensordicts_may_exceed_the_storage_too():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), track_generations=True)
    rb.extend({"a": torch.arange(6), "b": (torch.arange(6) * 10,)})
    assert rb[:]["a"].tolist() == [4, 5, 2, 3]
    assert rb[:]["b"][0].tolist() == [40, 50, 20, 30]
    rb = TensorDictReplayBuffer(storage=ListStorage(4), track_generations=True, batch_size=4)
    rb.extend(ids(range(6)))
    assert [int(record["id"]) for record in rb.storage[:]] == [4, 5, 2, 3]


def test_a_batch_without_rows_is_refused_as_ever_and_advances_nothing():
    rb = buffer(3)
    with pytest.raises(RuntimeError, match="at least one element"):
        rb.extend(torch.arange(0))
    assert stamps(rb).tolist() == [0] * 3 + [-1] * 5


def test_a_write_that_raises_halfway_kills_the_handles_of_its_slots_and_no_others():
    data = TensorDict({"a": torch.arange(8), "b": torch.zeros(8, 2)}, [8])
    rb = td_buffer(0)
    rb.extend(data)
    held = handles(rb)
    with failing_writes(rb.storage):
        rb.extend(data[:3])
    assert rb._table.is_live(**held).tolist() == [False] * 3 + [True] * 5
    assert not rb._in_write._is_owned()
    Thread(lambda: rb.extend(data[:4])).join()  # the lock is free, the cursor where it was
    assert rb.update_priority_if_present(**held, priority=9.0).updated_mask.tolist() == (
        [False] * 4 + [True] * 4
    )


BAD = {
    "another shape": TensorDict({"a": torch.arange(3), "b": torch.zeros(3, 5)}, [3]),
    "another dtype": TensorDict({"a": torch.zeros(3) + 0.5, "b": torch.zeros(3, 2)}, [3]),
    "no tensordict": {"a": torch.arange(3)},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_records_that_the_storage_cannot_take_change_nothing(bad):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=PrioritizedSampler(CAPACITY, **PER),
        track_generations=True,
    )
    rb.extend(TensorDict({"a": torch.arange(6), "b": torch.zeros(6, 2)}, [6]))
    held = handles(rb)
    rb.update_priority_if_present(**handles(rb, range(6)), priority=torch.arange(2.0, 8.0))
    before = str(rb[:].to_dict()), leaves(rb), rb.writer._cursor, rb.write_count, len(rb)
    for write in (
        lambda: rb.extend(bad),
        lambda: rb.writer.write_at(torch.tensor([2, 3, 4]), bad),
        lambda: rb.__setitem__(torch.tensor([2, 3, 4]), bad),
    ):
        with pytest.raises(ValueError, match=r"as the storage has it|in a tensordict"):
            write()
    after = str(rb[:].to_dict()), leaves(rb), rb.writer._cursor, rb.write_count, len(rb)
    assert after == before
    assert rb._table.is_live(**held).tolist() == [True] * 6 + [False] * 2


def test_what_a_write_that_failed_has_claimed_is_given_back():
    rb = td_buffer(3)
    with failing_writes(rb.storage):
        rb.extend(ids(range(4)))
    assert (len(rb), rb.writer._cursor, rb.write_count) == (3, 3, 3)
    assert rb.extend(ids(range(2)), return_generation=True)[1].tolist() == [1, 1]


class Unstamped(RoundRobinWriter):
    """A user's writer that writes by itself and stamps nothing."""

    def extend(self, data):
        index = torch.arange(len(data))
        self._storage.set(index, data)
        return index


def test_the_buffer_stamps_what_a_users_writer_left_unstamped():
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), writer=Unstamped(track_generations=True))
    held = rb.extend(torch.arange(3), return_generation=True)
    assert held[1].tolist() == [0, 0, 0]
    rb.extend(torch.arange(2))
    assert rb._table.is_live(*held).tolist() == [False, False, True]


def test_a_writer_that_does_not_track_advances_anothers_table_before_its_data():
    storage = LazyTensorStorage(CAPACITY)
    plain = ReplayBuffer(storage=storage)
    tracking = buffer(storage=storage)
    held = handles(tracking)
    plain.extend(torch.arange(2))
    assert tracking._table.is_live(**held).tolist() == [False] * 2 + [True] * 6
    plain.empty()
    assert not tracking._table.is_live(**held).any()


def test_write_at_stamps_its_slots_and_those_that_it_makes_sampleable():
    rb = buffer(3)
    held = handles(rb)
    with rb._replay_lock, rb._write_lock:
        rb.writer.write_at(torch.tensor([1, 5]), torch.tensor([50, 51]))
    assert len(rb) == 6
    assert stamps(rb).tolist() == [0, 1, 0, 0, 0, 0, -1, -1]
    assert rb._table.is_live(**held).tolist() == [True, False, True] + [False] * 5
    assert leaves(rb) == [1] * 6 + [0, 0]
    assert rb.writer._cursor == 3
    rb.writer.write_at(0, torch.tensor(52))
    assert stamps(rb).tolist()[:2] == [1, 1]


@pytest.mark.parametrize("track", [True, False])
def test_a_record_consumed_and_written_again_is_another_record(track):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(4), consume_after_n_samples=1, track_generations=track
    )
    rb.extend(torch.arange(4))
    _, info = rb.sample(2, return_info=True)
    rb.extend(torch.arange(10, 12))  # goes into the two consumed slots
    if track:
        assert not rb._table.is_live(info["index"], info["index_generation"]).any()
        assert int((stamps(rb) == 1).sum()) == 2
    assert sorted(rb.storage[:].tolist())[-2:] == [10, 11]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_sample_put_back_is_stored_without_its_stamps(storage):
    rb = td_buffer(storage=storage(CAPACITY), batch_size=4)
    sample = rb.sample()
    taken = sample["index_generation"].clone()
    slots = sample["index"].clone()
    rb.extend(sample)
    rb.add(rb.sample()[0])
    stored = rb.storage[0]
    assert "index_generation" not in stored.keys()  # noqa: SIM118
    # TorchRL's buffer leaves the caller's index alone, so its stamps stay as they are, too.
    assert sample["index_generation"].tolist() == taken.tolist()
    assert sample["index"].tolist() == slots.tolist()
    fresh = rb.sample()
    assert fresh["index_generation"].tolist() == stamps(rb)[fresh["index"]].tolist()


def test_where_torchrl_rewrites_the_callers_index_its_stamps_go_with_it():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        writer=TensorDictRoundRobinWriter(track_generations=True),
    )
    rb.extend(ids(range(6)))
    stale = ids(range(4), index=torch.zeros(4), index_generation=torch.full((4,), 99))
    rb.extend(stale)
    assert stale["index"].tolist() == [6, 7, 0, 1]
    assert stale["index_generation"].tolist() == [0, 0, 1, 1]
    one = ids([5], index_generation=torch.tensor([99]))[0]
    rb.add(one)
    assert (int(one["index"]), int(one["index_generation"])) == (2, 1)
    plain = ids([5])
    rb.extend(plain)
    assert set(plain.keys()) == {"id", "index"}
    large = ids(range(10), index_generation=torch.full((10,), 99))
    rb.extend(large)
    assert large["index"].tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    assert large["index_generation"].tolist() == [-1, -1, 1, 1, 2, 2, 2, 2, 2, 2]
    placed = ids([1, 2], index_generation=torch.full((2,), 99))
    rb.writer.write_at(torch.tensor([0, 3]), placed)
    assert placed["index_generation"].tolist() == [3, 3]
    assert "index_generation" not in rb.storage._storage.keys()  # noqa: SIM118


def test_records_of_a_tensorclass_are_stamped_like_any_other():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), track_generations=True, batch_size=4)
    records = Record(id=torch.arange(6), batch_size=[6])
    generation = rb.extend(records, return_generation=True)[1]
    assert isinstance(rb[:], Record)
    assert rb[:].id.tolist() == [4, 5, 2, 3]
    assert generation.tolist() == [-1, -1, 0, 0, 1, 1]
    data, info = rb.sample(return_info=True)
    assert isinstance(data, Record)
    assert info["index_generation"].tolist() == stamps(rb)[info["index"]].tolist()


def test_a_writer_registered_on_a_tracked_storage_keeps_the_table_that_is_there():
    rb = buffer()
    held = handles(rb)
    writer = RoundRobinWriter(track_generations=True)
    writer.load_state_dict(buffer(3).writer.state_dict())
    writer.register_storage(rb.storage)
    assert writer.table is rb._table
    assert rb._table.is_live(**held).all()


def records(form, rows):
    """The same records, in each form that a buffer takes."""
    plain = [ids([row], x=torch.full((1, 2), float(row)))[0] for row in rows]
    stacked = torch.stack([item.clone() for item in plain])
    return {
        "tensordict": lambda: stacked,
        "tensorclass": lambda: Record(id=stacked["id"], batch_size=[len(plain)]),
        "lazy_stack": lambda: lazy_stack(plain),
        "list": lambda: plain,
        "tensor": lambda: stacked["id"],
        "dict": lambda: {"a": stacked["id"], "b": (stacked["x"],)},
    }[form]()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(
    "form", ["tensordict", "tensorclass", "lazy_stack", "list", "tensor", "dict"]
)
def test_records_lie_as_torchrls_writer_puts_them(form, storage):
    """Its writer indexes the storage row by row, ours writes a range as a slice."""
    kind = "TensorDict" if form in ("tensordict", "lazy_stack") else ""
    ours = getattr(generations, kind + "ReplayBuffer")(
        storage=storage(CAPACITY), track_generations=True, batch_size=2
    )
    stock = getattr(torchrl.data, kind + "ReplayBuffer")(storage=storage(CAPACITY), batch_size=2)
    first = 0
    for rows in (1, 3, 4, 2, 5, 8):  # to the end of the ring, from its start, across its end
        given = [records(form, range(first, first + rows)) for _ in range(2)]
        index = [rb.extend(data).tolist() for rb, data in zip((ours, stock), given, strict=True)]
        first += rows
        assert index[0] == index[1]
        assert str(given[0]) == str(given[1])  # what it writes into the caller's records
        ours_leaves, stock_leaves = (tree_leaves(rb[:]) for rb in (ours, stock))
        if kind or form in ("tensorclass", "list"):
            ours_leaves, stock_leaves = (rb[:].to_dict() for rb in (ours, stock))
        assert str(ours_leaves) == str(stock_leaves)
        for name in ("_len", "_last_cursor_index"):
            assert getattr(ours.storage, name) == getattr(stock.storage, name)
        assert ours.storage._last_cursor.tolist() == stock.storage._last_cursor.tolist()
        assert ours.writer._cursor == stock.writer._cursor
        assert ours.write_count == stock.write_count == first


def test_last_rows_are_those_that_no_later_row_repeats():
    assert last_rows(torch.tensor([5, 1, 5, 2, 1])).tolist() == [False, False, True, True, True]
    assert last_rows(torch.arange(0)).tolist() == []


def test_a_failed_write_leaves_no_old_priority_on_the_slots_that_it_touched():
    rb = td_buffer(0)
    data = TensorDict({"a": torch.arange(8), "b": torch.zeros(8, 2)}, [8])
    rb.extend(data)
    rb.update_priority_if_present(**handles(rb), priority=torch.arange(10.0, 90.0, 10.0))
    for write in (
        lambda: rb.extend(data[:2]),
        lambda: rb.writer.write_at(torch.tensor([2, 3]), data[:2]),
        lambda: rb.__setitem__([4, 5], data[:2]),
    ):
        with failing_writes(rb.storage):
            write()
    assert leaves(rb) == [80] * 6 + [70, 80]


def test_slots_that_a_second_cursor_makes_sampleable_get_a_stamp_and_the_default_priority():
    storage = LazyTensorStorage(CAPACITY)
    first, second = td_buffer(5, storage=storage), td_buffer(0, storage=storage)
    second.extend(ids(range(100, 103)))
    assert len(storage) == 8
    assert stamps(first).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert leaves(first) == [1] * 8
    held = handles(first)
    first.empty()
    second.extend(ids(range(2)))  # into slots 3 and 4, while the length is 2
    assert len(storage) == 2
    assert not first._table.is_live(**held).any()
    assert first._table.of(range(8)).tolist()[2:] == [-1] * 6
    assert leaves(first)[:2] == [1, 1]


def test_the_index_that_a_compilable_storage_returned_stays_as_it_was():
    rb = td_buffer(0, storage=LazyTensorStorage(CAPACITY, compilable=True))
    index, generation = rb.extend(ids(range(4)), return_generation=True)
    rb.add(ids([4])[0])
    assert index.tolist() == [0, 1, 2, 3]
    assert rb._table.is_live(index, generation).all()


def test_samples_put_back_by_index_are_stored_without_stamps():
    rb = td_buffer(storage=ListStorage(CAPACITY), batch_size=2)
    for index in (slice(0, 2), [0, 1]):
        rb[index] = [record.clone() for record in rb.sample()]
        for record in rb.storage[0:2]:
            assert "index_generation" not in record.keys()  # noqa: SIM118
