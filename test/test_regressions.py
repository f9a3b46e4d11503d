"""Faults that a reviewer found; each stands for a kind."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, Thread, buffer, handles, ids, leaves, stamps, td_buffer
from tensordict import TensorDict
from torchrl.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from torchrl.data.replay_buffers.generations import (
    ConditionalPriorityUpdates,
    ReplayBuffer,
    SlotGenerations,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

# How long a thread that must wait is given to come to its lock.
GRACE = 0.2


def extended(rb, rows):
    index, generation = rb.extend(ids(range(rows)), return_generation=True)
    return {"index": index, "generation": generation}


def update(rb, held, priority):
    return rb.update_priority_if_present(**held, priority=priority)


# ------------------------------------------------------------------ parts replaced under a call


def during(rb, change, call):
    """Lets ``call`` wait at the buffer's first lock in a thread while the change is made."""
    with rb._table.lock:
        waiting = Thread(call)
        waiting.join_briefly(GRACE)  # it stands at the lock now
        change()
    return waiting.join()


def test_an_update_that_waited_for_set_storage_finds_its_handles_stale():
    rb = td_buffer()
    held = handles(rb)
    new = TensorStorage(ids(range(100, 108)))
    result = during(rb, lambda: rb.set_storage(new), lambda: update(rb, held, 50.0))
    assert result.num_stale == 8
    assert leaves(rb) == [1] * 8


def test_an_update_that_waited_for_set_sampler_writes_the_tree_that_is_there_now():
    rb = td_buffer()
    held = handles(rb)
    sampler = PrioritizedSampler(CAPACITY, **PER)
    result = during(rb, lambda: rb.set_sampler(sampler), lambda: update(rb, held, 50.0))
    assert result.num_updated == 8
    assert leaves(rb) == [50] * 8


def test_a_write_that_waited_for_set_storage_stamps_the_storage_that_it_writes():
    rb = td_buffer()
    former = rb.storage
    held = handles(rb)
    new = TensorStorage(ids(range(100, 108)))
    extend = lambda: rb.extend(ids(range(3)), return_generation=True)  # noqa: E731
    index, generation = during(rb, lambda: rb.set_storage(new), extend)
    assert rb._table.is_live(index, generation).all()
    assert SlotGenerations.attach(former).is_live(**held).all()


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


# ------------------------------------------------------------------ restores and copies


def test_a_restore_that_fails_halfway_leaves_no_handle_alive_and_no_old_priority():
    rb, other = td_buffer(), td_buffer()
    update(rb, handles(rb), torch.arange(1.0, 9.0))
    held = handles(rb)
    state = other.state_dict()
    del state["_sampler"]["_alpha"]
    with pytest.raises(KeyError):
        rb.load_state_dict(state)
    assert not rb._table.is_live(**held).any()
    assert leaves(rb) == [8] * 8
    assert update(rb, handles(rb), 3.0).num_updated == 8


def test_a_tree_of_another_size_is_refused_before_anything_changed():
    small = buffer(0, storage=ListStorage(4))
    small.extend(list(torch.arange(4)))
    rb = buffer(0, storage=ListStorage(8))
    rb.extend(list(torch.arange(8)))
    held = handles(rb)
    with pytest.raises(ValueError, match="has stamps for 4 slots: this buffer has 8"):
        rb.load_state_dict(small.state_dict())
    assert rb._table.is_live(**held).all()
    assert len(rb) == 8


def test_a_torchrl_writer_on_a_restored_table_revives_no_handle():
    rb = td_buffer(4)
    state = copy.deepcopy(rb.state_dict())
    lost = extended(rb, 4)
    lost2 = extended(rb, 4)
    rb.load_state_dict(state)
    stock = torchrl.data.TensorDictReplayBuffer(storage=rb.storage)
    stock.writer._cursor = 4
    stock.extend(ids(range(100, 108)))  # adds 1 to -1 and to 0, as the lost writes did
    assert not rb._table.is_live(**lost).any()
    assert not rb._table.is_live(**lost2).any()
    assert rb._table.is_live(**handles(rb)).all()


def test_records_that_ran_on_have_the_default_priority_after_a_restore():
    rb = td_buffer()
    update(rb, handles(rb), torch.arange(10.0, 90.0, 10.0))
    state = rb.state_dict()
    rb.extend(ids(range(100, 103)))
    rb.load_state_dict(state)
    assert rb[:]["id"].tolist()[:3] == [100, 101, 102]
    assert leaves(rb) == [80, 80, 80, 40, 50, 60, 70, 80]
    fresh = td_buffer(0)
    fresh.load_state_dict(state)
    assert leaves(fresh)[3:] == [40, 50, 60, 70, 80]
    assert leaves(fresh)[:3] == [80] * 3


def test_another_buffers_tree_drops_the_priorities_of_records_that_a_restore_replaced():
    storage = LazyTensorStorage(CAPACITY)
    first, second = td_buffer(storage=storage), td_buffer(0, storage=storage)
    state = copy.deepcopy(first.state_dict())
    first.extend(ids(range(8, 16)))
    update(second, handles(second), torch.arange(1.0, 9.0))
    first.load_state_dict(state)
    assert leaves(second) == [8] * 8


def test_a_storage_dumped_where_it_lives_brings_no_handle_back(tmp_path):
    rb = td_buffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "storage"))
    held = handles(rb)
    update(rb, held, torch.arange(1.0, 9.0))
    rb.dumps(tmp_path)
    rb.extend(ids(range(100, 104)))
    for other in (td_buffer(0, storage=LazyMemmapStorage(CAPACITY)), rb):
        other.loads(tmp_path)
        assert other[:]["id"].tolist()[:4] == [100, 101, 102, 103]
        assert not other._table.is_live(**held).any()
        assert leaves(other) == [8] * 8


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_is_made_at_one_point_in_time_and_stands_alone(copy_of):
    rb = td_buffer()
    other_buffer = td_buffer(0, storage=rb.storage)

    class WritesWhenCopied:
        def __deepcopy__(self, memo):
            self.writer = Thread(lambda: rb.extend(ids(range(100, 108))))
            threading.Event().wait(0.1)
            return None

    trap = WritesWhenCopied()
    # Before the stamps in the order of copying, after the records.
    rb.storage.__dict__["_a_trap"] = trap
    counters = rb.storage.__dict__.pop("_slot_generations")
    rb.storage.__dict__["_slot_generations"] = counters
    held = handles(rb)
    copied = copy_of(rb)
    trap.writer.join()
    assert copied[:]["id"].tolist() == list(range(8))
    assert copied._table.is_live(**held).all()
    assert copied.storage._attached_entities == [copied]
    assert other_buffer.storage is rb.storage
    copied.extend(ids(range(2)))
    assert not rb._table.is_live(**held).any()


def test_a_learner_that_emptied_and_restored_samples_its_records_again():
    rb = td_buffer(4, sync=False, batch_size=4)
    rb.sample()
    state = copy.deepcopy(rb.state_dict())
    rb.empty()
    rb.load_state_dict(state)
    rb.sample()
    assert leaves(rb) == [1] * 4 + [0] * 4


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_a_learners_checkpoint_carries_its_priorities(way, tmp_path):
    rb = td_buffer(sync=False, batch_size=8)
    update(rb, handles(rb), torch.arange(11.0, 19.0))
    fresh = td_buffer(0, sync=False, batch_size=8)
    if way == "dumps":
        rb.dumps(tmp_path / "dump")
        fresh.loads(tmp_path / "dump")
    else:
        fresh.load_state_dict(rb.state_dict())
    fresh.sample()
    assert leaves(fresh) == list(range(11, 19))
    fresh.extend(ids(range(2)))
    fresh.sample()
    assert leaves(fresh) == [18, 18, *range(13, 19)]


def test_a_writer_that_loaded_before_it_had_a_storage_brings_its_stamps_into_a_buffer():
    rb = td_buffer()
    held = extended(rb, 3)
    writer = TensorDictRoundRobinWriter(track_generations=True)
    writer.load_state_dict(copy.deepcopy(rb.writer.state_dict()))
    other = TensorDictReplayBuffer(storage=TensorStorage(rb.storage[:].clone()), writer=writer)
    assert other._table.is_live(**held).all()


def test_a_sampler_that_was_set_aside_comes_back_without_the_priorities_of_gone_records():
    rb = td_buffer()
    update(rb, handles(rb), torch.arange(1.0, 9.0))
    aside = rb.set_sampler(RandomSampler())
    rb.extend(ids(range(8)))
    rb.set_sampler(aside)
    assert leaves(rb) == [1] * 8


# ------------------------------------------------------------------ writes


def test_a_failed_write_leaves_no_old_priority_on_the_slots_that_it_touched():
    rb = td_buffer(0)
    data = TensorDict({"a": torch.arange(8), "b": torch.zeros(8, 2)}, [8])
    rb.extend(data)
    update(rb, handles(rb), torch.arange(10.0, 90.0, 10.0))
    bad = TensorDict({"a": torch.arange(2), "b": torch.zeros(2, 5)}, [2])
    for write in (
        lambda: rb.extend(bad),
        lambda: rb.writer.write_at(torch.tensor([2, 3]), bad),
        lambda: rb.__setitem__([4, 5], bad),
    ):
        with pytest.raises(RuntimeError):
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


def test_a_boolean_list_for_a_list_storage_is_refused_and_nothing_is_written():
    rb = ReplayBuffer(storage=ListStorage(4), track_generations=True)
    held = rb.extend(list("wxyz"), return_generation=True)
    with pytest.raises(TypeError, match="index must be integer"):
        rb[[True, False, True, False]] = list("abcd")
    assert rb.storage[:] == list("wxyz")
    assert rb._table.is_live(*held).all()


def test_a_list_may_grow_by_a_slice_at_its_end():
    rb = buffer(0, storage=ListStorage(CAPACITY))
    rb.write_all(list(range(4)))
    assert rb.storage[:] == list(range(4))
    held = handles(rb, range(4))
    rb[2:8] = list(range(10, 14))
    assert rb.storage[:] == [0, 1, 10, 11, 12, 13]
    assert rb._table.is_live(**held).tolist() == [True, True, False, False]
    assert leaves(rb) == [1] * 6 + [0, 0]
    with pytest.raises(IndexError, match="slots from 0 to 7: got 9"):
        rb[2:] = list(range(8))
    assert len(rb) == 6


def test_samples_put_back_by_index_or_through_a_torchrl_writer_are_stored_without_stamps():
    rb = td_buffer(storage=ListStorage(CAPACITY), batch_size=2)
    for index in (slice(0, 2), [0, 1]):
        rb[index] = [record.clone() for record in rb.sample()]
        for record in rb.storage[0:2]:
            assert "index_generation" not in record.keys()  # noqa: SIM118
    stock = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        writer=torchrl.data.TensorDictRoundRobinWriter(track_generations=True),
        batch_size=2,
    )
    stock.extend(ids(range(8)))
    stock.extend(stock.sample())
    assert "index_generation" not in stock.storage._storage.keys()  # noqa: SIM118


def test_a_writer_that_rejects_or_refuses_records_leaves_others_alone():
    storage = LazyTensorStorage(4)
    tracking = TensorDictReplayBuffer(storage=storage, track_generations=True)
    best = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="id"))
    for value in (1.0, 2.0, 3.0, 4.0, 0.0):
        index = best.add(TensorDict({"id": torch.tensor(value)}))
    assert index is None
    held = tracking._table.of(range(4))
    assert held.tolist() == [0] * 4
    immutable = TensorDictReplayBuffer(storage=storage, writer=ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        immutable.extend(ids(range(2)))
    assert tracking._table.is_live(range(4), held).all()


def test_a_carried_priority_in_double_precision_is_cast():
    rb = td_buffer(0)
    rb.extend(ids(range(4), td_error=torch.arange(1.0, 5.0, dtype=torch.float64)))
    assert leaves(rb) == [1, 2, 3, 4, 0, 0, 0, 0]
    rb.extend(ids(range(2)))
    assert leaves(rb)[4:6] == [4, 4]


def test_a_users_class_may_write_a_priority_by_integer_inside_of_add():
    class Some(torchrl.data.PrioritizedReplayBuffer):
        def add(self, data):
            index = super().add(data)
            self.update_priority(index, 5.0)
            return index

    class Mine(ConditionalPriorityUpdates, Some):
        pass

    rb = Mine(**PER, storage=LazyTensorStorage(4), track_generations=True)
    rb.add(torch.tensor(1.0))
    assert leaves(rb) == [5, 0, 0, 0]


# ------------------------------------------------------------------ off is off, and the rest


def test_an_untracked_buffer_takes_no_lock_that_torchrl_does_not_take():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), shared=True)
    rb.extend(torch.arange(4))

    def all_of_it():
        rb.load_state_dict(rb.state_dict())
        rb.set_sampler(RandomSampler())
        rb.set_writer(torchrl.data.RoundRobinWriter())

    with rb._write_lock:  # not reentrant: TorchRL's own
        Thread(all_of_it).join()


def test_a_construction_that_fails_leaves_nothing_on_the_storage():
    for kwargs in (
        {"sampler": PrioritizedSampler(4, **PER)},
        {"sampler": torchrl.data.SamplerWithoutReplacement(drop_last=True)},
        {"storage": ListStorage(CAPACITY), "shared": True},
    ):
        storage = kwargs.pop("storage", LazyTensorStorage(CAPACITY))
        with pytest.raises((ValueError, RuntimeError)):
            ReplayBuffer(storage=storage, track_generations=True, **kwargs)
        assert not hasattr(storage, "_slot_generations")
        assert not hasattr(storage, "_generation_table")
        assert storage._attached_entities == []


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


def test_nested_field_names_patch_as_in_torchrl_and_none_writes_every_record():
    rb = td_buffer(0)
    rb.extend(TensorDict({"id": torch.arange(8), "n": {"y": torch.zeros(8)}}, [8]))
    held = handles(rb)
    rb["n", ("y",)] = torch.ones(8)
    assert rb._table.is_live(**held).all()
    assert rb[:]["n", "y"].tolist() == [1] * 8
    rb[None] = rb.storage[:].clone()[None]
    assert not rb._table.is_live(**held).any()


@pytest.mark.parametrize(
    "index",
    [torch.tensor([1], dtype=torch.uint32), torch.tensor([1]).numpy().astype(">i8")],
    ids=["uint32", "big-endian"],
)
def test_odd_integer_dtypes_are_integers(index):
    rb = buffer()
    priority = torch.tensor([5.0]).numpy().astype(">f4")
    result = rb.update_priority_if_present(index=index, generation=[0], priority=priority)
    assert result.num_updated == 1
    assert leaves(rb)[1] == 5


def test_odd_inputs_get_errors_that_name_the_argument():
    rb = td_buffer()
    with pytest.raises(ValueError, match="one index per record"):
        rb.update_priority_if_present(index=torch.zeros(2, 0, dtype=int), generation=[], priority=1)
    with pytest.raises(TypeError, match="index must be a dense tensor"):
        rb.update_priority_if_present(
            index=torch.tensor([1]).to_sparse(), generation=[0], priority=1.0
        )
    with pytest.raises(TypeError, match="needs a tensordict: got NoneType"):
        rb.update_tensordict_priority_if_present(None)
