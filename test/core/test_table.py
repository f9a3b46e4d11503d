from __future__ import annotations

import numpy as np
import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, STORAGES, Thread, buffer, handles, ids, stamps, td_buffer
from torchrl.data import LazyTensorStorage, ListStorage, PrioritizedSampler, TensorStorage
from torchrl.data.replay_buffers.generations import (
    ReplayBuffer,
    SlotGenerations,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.generations.core import counters as counters_module
from torchrl.data.replay_buffers.generations.core import restore
from torchrl.data.replay_buffers.generations.core import table as table_module


def tracked(storage):
    return ReplayBuffer(storage=storage, track_generations=True)


@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
def test_a_storage_has_one_table_whose_stamps_stand_on_it(make):
    storage = make(CAPACITY)
    table = SlotGenerations.attach(storage)
    assert SlotGenerations.attach(storage) is table
    assert storage._slot_generations is table.stamps
    assert table.stamps.dtype is torch.int64
    assert table.stamps.shape == (CAPACITY,)
    before = table.stamps
    tracked(storage).extend(torch.arange(20))
    assert table.stamps is before


def test_two_threads_that_attach_at_once_get_one_table():
    storage = LazyTensorStorage(CAPACITY)
    with table_module._attaching:  # both are past their first look, or will be
        threads = [Thread(lambda: SlotGenerations.attach(storage)) for _ in range(4)]
    first, *others = [thread.join() for thread in threads]
    assert all(table is first for table in others)


def test_each_write_of_a_slot_adds_one_and_minus_one_is_no_stamp():
    rb = buffer(5)
    assert stamps(rb).tolist() == [0] * 5 + [-1] * 3
    rb.extend(torch.arange(5))
    assert stamps(rb).tolist() == [1, 1] + [0] * 6
    rb.add(torch.tensor(9))
    assert stamps(rb).tolist() == [1, 1, 1] + [0] * 5


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16, 18, 27])
def test_a_ring_range_advances_like_its_slots_one_by_one(start, rows):
    ring, single = (SlotGenerations.attach(LazyTensorStorage(CAPACITY)) for _ in range(2))
    for base in (0, 1000):
        ring.counters.base = single.counters.base = base
        ring.advance_ring(start, rows)
        for row in range(rows):
            single.advance((start + row) % CAPACITY)
        assert ring.stamps.tolist() == single.stamps.tolist()


def test_a_slot_named_twice_was_written_twice_with_and_without_a_base():
    table = SlotGenerations.attach(LazyTensorStorage(4))
    table.advance([0, 1, 0])
    assert table.stamps.tolist() == [1, 0, -1, -1]
    table.counters.base = 100
    table.advance(torch.tensor([0, 2, 2, 2], dtype=torch.int32))
    assert table.stamps.tolist() == [100, 0, 102, -1]
    table.advance([0, 1])
    assert table.stamps.tolist() == [101, 100, 102, -1]


def test_of_takes_every_form_of_index_and_gives_its_shape_back():
    table = buffer(5)._table
    table.advance(1)
    assert table.of(1).tolist() == 1
    assert table.of([0, 1]).tolist() == [0, 1]
    assert table.of(np.array([1, 0])[::-1]).tolist() == [0, 1]
    assert table.of(range(2)).tolist() == [0, 1]
    assert table.of((torch.tensor([1]),)).tolist() == [1]
    assert table.of(torch.tensor([[0, 1], [1, 7]])).tolist() == [[0, 1], [1, -1]]
    assert table.of([]).tolist() == []
    assert table.of([-1, 8, 10**6, -(10**9)]).tolist() == [-1] * 4


def test_of_gives_no_stamp_past_the_length_of_the_storage():
    rb = buffer()
    rb.empty()
    assert stamps(rb).tolist() == [1] * 8
    assert rb._table.of(range(8)).tolist() == [-1] * 8
    rb.extend(torch.arange(2))
    assert rb._table.of(range(8)).tolist() == [2, 2] + [-1] * 6
    assert rb._table.is_live(range(8), stamps(rb)).tolist() == [True] * 2 + [False] * 6


def test_is_live_compares_stamps_and_never_takes_minus_one_for_one():
    table = buffer(3)._table
    assert table.is_live([0, 1, 5, -1], [0, 1, -1, -1]).tolist() == [True, False, False, False]
    with pytest.raises(ValueError, match=r"one generation per index.*\(1,\).*\(2,\)"):
        table.is_live([0, 1], [0])


@pytest.mark.parametrize("bad", [8, -1, [0, 99], [-3, 2]])
def test_advance_refuses_a_slot_out_of_range_and_advances_nothing(bad):
    table = buffer()._table
    with pytest.raises(IndexError, match="slots from 0 to 7: got"):
        table.advance(bad)
    assert table.stamps.tolist() == [0] * 8


@pytest.mark.parametrize(
    "bad", [True, 1.0, [0, True], [0.5], np.array([1.0]), torch.tensor([True]), "0", None, 1j]
)
@pytest.mark.parametrize("method", ["of", "advance"])
def test_an_index_that_is_no_integer_is_a_type_error_that_names_it(method, bad):
    table = buffer()._table
    with pytest.raises(TypeError, match="index must be integer"):
        getattr(table, method)(bad)
    assert table.stamps.tolist() == [0] * 8


def test_an_index_beyond_int64_is_a_value_error():
    with pytest.raises(ValueError, match="must fit into an int64"):
        buffer()._table.of([10**30])


def test_what_cannot_be_tracked_is_refused_and_nothing_is_left_on_it():
    two_dimensional = TensorStorage(torch.zeros(4, 3), ndim=2)
    with pytest.raises(ValueError, match=r"Use LazyTensorStorage\(12, ndim=2\)"):
        SlotGenerations.attach(two_dimensional)
    with pytest.raises(ValueError, match="ndim=2"):
        tracked(two_dimensional)
    assert not hasattr(two_dimensional, "_slot_generations")
    assert two_dimensional._attached_entities == []
    assert len(two_dimensional) == 4  # as before
    ensemble = torchrl.data.StorageEnsemble(LazyTensorStorage(2))
    with pytest.raises(TypeError, match="StorageEnsemble"):
        SlotGenerations.attach(ensemble)


def test_records_that_were_there_before_the_table_get_handles_that_work():
    storage = TensorStorage(torch.arange(4))
    rb = buffer(0, storage=storage)
    result = rb.update_priority_if_present(index=range(4), generation=[0] * 4, priority=2.0)
    assert result.updated_mask.tolist() == [True] * 4


def test_counters_of_a_torchrl_writer_become_the_tables():
    storage = LazyTensorStorage(CAPACITY)
    stock = torchrl.data.ReplayBuffer(
        storage=storage, writer=torchrl.data.RoundRobinWriter(track_generations=True)
    )
    stock.extend(torch.arange(10))
    table = SlotGenerations.attach(storage)
    assert table.stamps.tolist() == [1, 1] + [0] * 6
    stock.extend(torch.arange(1))  # it goes on to advance them
    assert table.stamps.tolist() == [1, 1, 1] + [0] * 5
    assert storage._slot_generations is table.stamps


def test_counters_that_a_torchrl_writer_replaced_are_noticed_and_every_handle_turns_stale():
    storage = LazyTensorStorage(CAPACITY)
    rb = buffer(storage=storage)
    stock = torchrl.data.ReplayBuffer(
        storage=storage, writer=torchrl.data.RoundRobinWriter(track_generations=True)
    )
    state = stock.writer.state_dict()
    held = handles(rb)
    rb.extend(torch.arange(8))
    newer = handles(rb)
    stock.writer.load_state_dict(state)  # puts back a tensor of zeros
    assert rb._table.is_live(**held).tolist() == [False] * 8
    assert rb._table.is_live(**newer).tolist() == [False] * 8
    assert storage._slot_generations is stamps(rb)
    assert rb._table.is_live(**handles(rb)).tolist() == [True] * 8


def test_a_list_without_maximum_has_a_table_that_grows_in_place():
    storage = ListStorage()
    rb = tracked(storage)
    table = SlotGenerations.attach(storage)
    counters = table.stamps
    assert counters.numel() == counters_module.SMALLEST
    index, generation = rb.extend(list(range(3000)), return_generation=True)
    assert table.stamps is counters
    assert counters.numel() == 3000
    assert generation.tolist() == [0] * 3000
    rb.add(0)
    assert counters.numel() == 6000
    assert counters[3000:].tolist() == [0] + [-1] * 2999
    assert table.is_live(index, generation).all()


def test_a_large_storage_has_its_full_table_from_the_start(monkeypatch):
    monkeypatch.setattr(counters_module, "EAGER_SLOTS", 2**10)
    small = SlotGenerations.attach(LazyTensorStorage(2**10))
    large = SlotGenerations.attach(LazyTensorStorage(2**10 + 1))
    assert small.stamps.numel() == 2**10
    large.advance_ring(2**10, 3)  # wraps at the capacity, not at the size of the table
    assert large.stamps.numel() == 2**10 + 1
    assert large.stamps.nonzero().numel() == 2**10 + 1 - 3
    assert SlotGenerations.attach(LazyTensorStorage(2**21)).stamps.numel() == 1024


def test_adopt_gives_a_torchrl_buffer_the_lock_and_refuses_a_stranger():
    storage = LazyTensorStorage(CAPACITY)
    table = SlotGenerations.attach(storage)
    stock = torchrl.data.ReplayBuffer(storage=storage)
    table.adopt(stock)
    assert stock._write_lock is table.lock
    with pytest.raises(ValueError, match="on the table's own storage"):
        table.adopt(torchrl.data.ReplayBuffer(storage=LazyTensorStorage(CAPACITY)))


def test_the_counters_of_a_table_can_be_used_up_and_say_so():
    table = buffer()._table
    table.stamps.fill_(2**62)
    with pytest.raises(OverflowError, match="used up"):
        restore.retire(table)


@pytest.mark.parametrize("slots", [4, 5])
def test_a_stamp_of_minus_one_is_stale_whatever_came_behind_the_buffers_back(slots):
    rb = buffer(0, storage=LazyTensorStorage(slots))
    rb.extend(torch.arange(3.0))
    rb.storage.set(torch.tensor([3]), torch.tensor([9.0]))  # fills a ring of 4
    held = {"index": torch.tensor([3]), "generation": torch.tensor([-1])}
    assert rb._table.is_live(**held).tolist() == [False]
    assert rb.update_priority_if_present(**held, priority=7.0).num_updated == 0
    assert rb._table.of(3) == (0 if slots == 4 else -1)


def test_a_table_that_comes_in_the_middle_of_an_untracked_write_is_told_of_it(monkeypatch):
    storage = LazyTensorStorage(CAPACITY)
    plain = TensorDictReplayBuffer(storage=storage)
    plain.extend(ids(range(8)))
    held = {}
    inner = storage.set

    def held_up(*args, **kwargs):
        if not held:
            held.update(handles(Thread(lambda: td_buffer(0, storage=storage)).join()))
        return inner(*args, **kwargs)

    monkeypatch.setattr(storage, "set", held_up)
    plain.extend(ids(range(100, 103)))
    table = SlotGenerations.attach(storage)
    assert table.is_live(**held).tolist() == [False] * 3 + [True] * 5


def test_records_behind_the_table_of_an_unbounded_list_have_no_stamp():
    rb = ReplayBuffer(storage=ListStorage(), track_generations=True, batch_size=64)
    rb.extend(list(torch.arange(1000)))
    rb.storage.set(range(1000, 1100), list(torch.arange(100)))
    assert rb._table.of([999, 1023, 1024, 1099]).tolist()[2:] == [-1, -1]
    rb.sample()


def test_counters_that_a_torchrl_writer_grew_past_the_tree_are_folded_in_as_far_as_it_goes():
    rb = ReplayBuffer(
        storage=ListStorage(), sampler=PrioritizedSampler(5000, **PER), track_generations=True
    )
    held = rb.extend(list(range(10)), return_generation=True)
    rb.storage._slot_generations = torch.full((8192,), 3)
    assert not rb._table.is_live(*held).any()
    assert rb._table.is_live(range(10), rb._table.of(range(10))).all()
    rb.extend(list(range(2000)))
    assert rb._table.of([2009]).item() >= 0
