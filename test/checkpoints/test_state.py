"""What a checkpoint and a copy bring back, and what they leave stale, part by part."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, Thread, buffer, handles, ids, leaves, td_buffer
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    TensorStorage,
)
from torchrl.data import replay_buffers as stock
from torchrl.data.replay_buffers.generations import (
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.generations.checkpoints import saving
from torchrl.data.replay_buffers.generations.core import restore


def extended(rb, rows):
    index, generation = rb.extend(ids(range(rows)), return_generation=True)
    return {"index": index, "generation": generation}


def update(rb, held, priority):
    return rb.update_priority_if_present(**held, priority=priority)


# ------------------------------------------------------------------ the table's stamps


def test_a_deep_copy_never_gives_a_stamp_that_the_original_gives_to_another_record():
    rb = buffer()
    held = handles(rb)
    other = copy.deepcopy(rb)
    assert other._table is not rb._table
    assert other._table.lock is not rb._table.lock
    assert other._table.history.lineage == rb._table.history.lineage
    assert other._table.is_live(**held).all()  # its records are copies of the same ones
    rb.extend(torch.arange(8))
    other.extend(torch.arange(8))
    assert not other._table.is_live(**handles(rb)).any()
    assert not rb._table.is_live(**handles(other)).any()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_handle_from_before_a_checkpoint_works_in_the_buffer_that_resumes_from_it(
    storage, tmp_path
):
    rb = td_buffer(5, storage=storage(CAPACITY))
    held = handles(rb, range(5))
    loads = [lambda fresh: fresh.load_state_dict(rb.state_dict())]
    if storage is not ListStorage:  # TorchRL dumps no lists
        rb.dumps(tmp_path / "dump")
        loads.append(lambda fresh: fresh.loads(tmp_path / "dump"))
    for load in loads:
        fresh = td_buffer(0, storage=storage(CAPACITY))
        load(fresh)
        assert fresh._table.history.lineage == rb._table.history.lineage
        result = fresh.update_priority_if_present(**held, priority=torch.arange(1.0, 6))
        assert result.num_updated == 5


def test_a_handle_taken_after_a_checkpoint_stays_stale_when_it_is_restored(tmp_path):
    rb = buffer()
    before = handles(rb)
    rb.dumps(tmp_path / "dump")
    rb.extend(torch.arange(8))
    after = handles(rb)
    rb.loads(tmp_path / "dump")
    assert rb._table.is_live(**before).all()  # these records came back
    assert not rb._table.is_live(**after).any()
    rb.extend(torch.arange(8))
    assert not rb._table.is_live(**before).any()
    assert not rb._table.is_live(**after).any()


def test_records_that_ran_on_under_a_state_in_memory_are_not_taken_for_the_old_ones():
    rb = buffer()
    before = handles(rb)
    state = rb.state_dict()  # the records in it are an alias
    rb.extend(torch.arange(100, 103))
    rb.load_state_dict(state)
    assert rb[:].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]
    assert rb._table.is_live(**before).tolist() == [False] * 3 + [True] * 5


def test_a_checkpoint_without_stamps_makes_everything_stale_but_fills_a_new_table():
    plain = torchrl.data.ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    plain.extend(torch.arange(4))
    state = plain.state_dict()
    fresh = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), track_generations=True)
    fresh.load_state_dict(state)
    assert fresh._table.of(range(8)).tolist() == [0] * 4 + [-1] * 4
    used = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), track_generations=True)
    used.extend(torch.arange(8))
    held = handles(used)
    used.load_state_dict(state)
    assert not used._table.is_live(**held).any()
    assert (used._table.of(range(4)) > 0).all()


def test_another_runs_checkpoint_makes_this_runs_handles_stale():
    ours, theirs = buffer(), buffer()
    held = handles(ours)
    ours.load_state_dict(theirs.state_dict())
    assert not ours._table.is_live(**held).any()


def test_stamps_that_do_not_fit_are_refused_and_change_nothing():
    table = buffer()._table
    state = {**restore.saved_stamps(table), "_generation": torch.zeros(9, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"at most 8 of them.*\(9,\)"):
        restore.restore(table, state)
    assert table.stamps.tolist() == [0] * 8
    assert table.counters.base == 0


def test_a_writer_without_a_storage_keeps_what_it_loaded_until_it_gets_one():
    rb = buffer(5)
    held = handles(rb, range(5))
    writer = RoundRobinWriter(track_generations=True)
    writer.load_state_dict(rb.writer.state_dict())
    assert writer.state_dict()["_lineage"] == rb._table.history.lineage
    storage = LazyTensorStorage(CAPACITY)
    storage.load_state_dict(rb.storage.state_dict())
    other = ReplayBuffer(storage=storage, writer=writer)
    assert other._table.is_live(**held).all()
    assert other.writer._cursor == 5


def test_a_stamp_of_minus_one_stays_stale_after_a_restore():
    rb = buffer(5)
    state = copy.deepcopy(rb.state_dict())
    rb.extend(torch.arange(3))
    rb.sample(2)  # the ring is full, and every record has a stamp
    rb.load_state_dict(state)
    rb.storage.set(torch.arange(CAPACITY), torch.arange(CAPACITY))  # full again
    table = rb._table
    assert not table.is_live(torch.arange(CAPACITY), torch.full([CAPACITY], -1)).any()
    slots = torch.arange(CAPACITY)
    assert (table.of(slots.view(2, 4)) == table.of(slots).view(2, 4)).all()


# ------------------------------------------------------------------ whole buffers


def test_a_restore_that_fails_halfway_leaves_no_handle_alive_and_no_old_priority(monkeypatch):
    rb, other = td_buffer(), td_buffer()
    update(rb, handles(rb), torch.arange(1.0, 9.0))
    held = handles(rb)
    monkeypatch.setattr(rb.sampler, "load_state_dict", {}.__getitem__)
    with pytest.raises(TypeError, match="unhashable"):
        rb.load_state_dict(other.state_dict())
    assert not rb._table.is_live(**held).any()
    assert leaves(rb) == [8] * 8
    assert update(rb, handles(rb), 3.0).num_updated == 8


def test_a_load_that_is_interrupted_as_it_begins_does_not_spare_the_next_one(monkeypatch):
    rb, state, inner = td_buffer(), td_buffer().state_dict(), restore.begin_restore

    def interrupted(*arguments):
        inner(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(restore, "begin_restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rb.load_state_dict(state)
    begun = []
    monkeypatch.setattr(restore, "begin_restore", lambda *args: begun.append(inner(*args)))
    rb.load_state_dict(state)
    assert begun == [None]


@pytest.mark.parametrize("check", ["check_state", "check_dump"])
def test_a_part_that_is_replaced_after_the_check_waits_for_the_load(check, monkeypatch, tmp_path):
    rb, inner, replacing = td_buffer(), getattr(saving, check), []
    update(rb, handles(rb), torch.arange(1.0, 9.0))
    state = copy.deepcopy(rb.state_dict())
    rb.dumps(tmp_path / "dump")
    update(rb, handles(rb), 50.0)

    def checked(*arguments):
        found = inner(*arguments)
        other = PrioritizedSampler(CAPACITY, **PER)
        replacing.append(Thread(lambda: rb.set_sampler(other)))
        replacing[0].join_briefly(0.2)
        return found

    monkeypatch.setattr(saving, check, checked)
    rb.load_state_dict(state) if check == "check_state" else rb.loads(tmp_path / "dump")
    former = replacing[0].join()
    assert former._sum_tree[torch.arange(CAPACITY)].tolist() == list(range(1, 9))


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


# ------------------------------------------------------------------ TorchRL's checkpointers


@pytest.mark.parametrize("records", [5, 12])
@pytest.mark.parametrize(
    "checkpointer",
    [
        stock.TensorStorageCheckpointer,
        stock.FlatStorageCheckpointer,
        stock.NestedStorageCheckpointer,
    ],
)
def test_every_checkpointer_brings_records_and_handles_back_into_their_slots(
    checkpointer, records, tmp_path
):
    def built():
        return TensorDictReplayBuffer(
            storage=LazyMemmapStorage(8),
            sampler=PrioritizedSampler(8, alpha=1.0, beta=1.0, eps=0.0),
            batch_size=4,
            track_generations=True,
            checkpointer=checkpointer(),
        )

    rb = built()
    for first in range(0, records, 4):
        rb.extend(episode(first, min(4, records - first)))
    slots = torch.arange(min(records, 8))
    handles = {"index": slots, "generation": rb.writer.generations_of(slots)}
    rb.dumps(tmp_path)
    resumed = built()
    resumed.loads(tmp_path)

    assert resumed[:]["obs"].tolist() == rb[:]["obs"].tolist()
    assert resumed.update_priority_if_present(**handles, priority=3.0).updated_mask.all()


def episode(first, count):
    at = torch.arange(first, first + count).unsqueeze(-1)
    done = at == first + count - 1
    return TensorDict(
        {
            "obs": at.float(),
            "collector": {"traj_ids": at[:, 0] // 4},
            "next": {
                "obs": at + 1.0,
                "reward": torch.zeros(count, 1),
                "done": done,
                "terminated": done,
                "truncated": torch.zeros_like(done),
            },
        },
        [count],
    )
