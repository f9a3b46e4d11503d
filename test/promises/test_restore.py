"""No resurrection: restores, copies and interrupted dumps bring no handle back to life."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
from pathlib import Path

import cloudpickle
import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, buffer, handles, ids, leaves, stamps, td_buffer
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    TensorStorage,
)
from torchrl.data.replay_buffers.generations import (
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.generations.core import restore

STORAGES = [LazyTensorStorage, LazyMemmapStorage]


def update(rb, held, priority):
    return rb.update_priority_if_present(**held, priority=priority)


# ------------------------------------------------------------------ the restore rule


@pytest.mark.parametrize("storage", STORAGES)
def test_handles_of_records_that_a_restore_took_back_are_stale(storage, checkpoint):
    rb = td_buffer(storage=storage(CAPACITY))
    load = checkpoint(rb)
    rb.extend(ids(range(8)))
    held = handles(rb)
    assert held["generation"].tolist() == [1] * 8
    load(rb)
    rb.extend(ids(range(8)))
    result = update(rb, held, 50.0)
    assert (result.num_updated, result.num_stale) == (0, 8)
    assert leaves(rb) == [1] * 8


@pytest.mark.parametrize("storage", STORAGES)
def test_handles_from_before_a_checkpoint_work_where_it_is_resumed(storage, checkpoint):
    rb = td_buffer(5, storage=storage(CAPACITY))
    held = handles(rb, range(5))
    load = checkpoint(rb)
    fresh = td_buffer(0, storage=storage(CAPACITY))
    load(fresh)
    assert update(fresh, held, torch.arange(1.0, 6.0)).num_updated == 5
    assert leaves(fresh) == [1, 2, 3, 4, 5, 0, 0, 0]


def resume(path, held, pipe):
    torch.set_num_threads(1)
    rb = td_buffer(0)
    rb.loads(path)
    pipe.send((update(rb, held, torch.arange(1.0, 6.0)).num_updated, leaves(rb)))


def test_handles_from_before_a_checkpoint_work_in_another_process(tmp_path):
    rb = td_buffer(5)
    rb.dumps(tmp_path / "dump")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    held = {name: tensor.tolist() for name, tensor in handles(rb, range(5)).items()}
    process = context.Process(target=resume, args=(tmp_path / "dump", held, theirs), daemon=True)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == (5, [1, 2, 3, 4, 5, 0, 0, 0])
    process.join(30)


def test_a_checkpoint_without_stamps(checkpoint):
    plain = torchrl.data.TensorDictPrioritizedReplayBuffer(
        **PER, storage=LazyTensorStorage(CAPACITY)
    )
    plain.extend(ids(range(4)))
    load = checkpoint(plain)
    fresh = td_buffer(0)
    load(fresh)
    result = update(fresh, handles(fresh, range(4)), 4.0)
    assert (result.num_updated, result.num_stale) == (4, 0)
    used = td_buffer()
    held = handles(used)
    load(used)
    result = update(used, held, 5.0)
    assert (result.num_updated, result.num_stale) == (0, 8)
    assert update(used, handles(used, range(4)), 5.0).num_updated == 4


def test_another_runs_checkpoint_with_equal_counters(checkpoint):
    ours, theirs = td_buffer(), td_buffer()
    held = handles(ours)
    checkpoint(theirs)(ours)
    assert update(ours, held, 5.0).num_stale == 8


def test_two_branches_of_one_checkpoint_never_give_the_same_stamp(checkpoint):
    root = td_buffer()
    load = checkpoint(root)
    first, second = td_buffer(0), td_buffer(0)
    load(first)
    load(second)
    first.extend(ids(range(100, 108)))
    second.extend(ids(range(200, 208)))
    held = handles(second)
    checkpoint(first)(second)
    assert second[:]["id"].tolist() == list(range(100, 108))
    assert update(second, held, 5.0).num_stale == 8
    assert update(second, handles(first), 5.0).num_updated == 8  # those records it did get


def test_every_handle_ever_taken_through_three_restores(checkpoint):
    rb = td_buffer()
    taken = [(handles(rb), rb[:]["id"].tolist())]
    load = checkpoint(rb)
    for round_ in range(3):
        rb.extend(ids(range(100 * round_ + 100, 100 * round_ + 103 + 2 * round_)))
        taken.append((handles(rb), rb[:]["id"].tolist()))
        load(rb)
        taken.append((handles(rb), rb[:]["id"].tolist()))
        for held, records in taken:
            now = rb[:]["id"].tolist()
            live = rb._table.is_live(**held).tolist()
            assert live == [record == there for record, there in zip(records, now, strict=True)]


def test_a_default_priority_that_is_no_integer_survives_an_integer_maximum(tmp_path):
    rb = td_buffer()
    update(rb, handles(rb), 5.5)
    rb.dumps(tmp_path / "dump")
    other = td_buffer()
    other.sampler._max_priority = (torch.tensor(3), torch.tensor(0))
    other.loads(tmp_path / "dump")
    assert float(other.sampler.default_priority) == 5.5


def test_a_handle_of_a_branch_that_is_gone_stays_stale_in_a_process_that_outlived_it(checkpoint):
    rb = td_buffer()
    load = checkpoint(rb)
    rb.extend(ids([100]))
    surviving = handles(rb, [0])
    assert surviving["generation"].tolist() == [1]
    restarted = td_buffer(0)
    load(restarted)
    for lap in range(3):
        restarted.extend(ids([200 + lap]))
        assert not restarted._table.is_live(**surviving).any()
        restarted.extend(ids(range(7)))


@pytest.mark.parametrize("storage", [*STORAGES, ListStorage])
def test_a_state_in_memory_whose_records_ran_on(storage):
    rb = td_buffer(storage=storage(CAPACITY))
    held = handles(rb)
    state = rb.state_dict()
    rb.extend(ids(range(100, 108)))
    later = handles(rb)
    rb.load_state_dict(state)
    assert not rb._table.is_live(**later).any()
    if storage is ListStorage:  # a list saves the records themselves
        assert rb._table.is_live(**held).all()
        assert [int(record["id"]) for record in rb.storage[:]] == list(range(8))
    else:
        assert not rb._table.is_live(**held).any()
        assert rb[:]["id"].tolist() == list(range(100, 108))


def test_an_asynchronous_learners_priorities_come_back_elsewhere(checkpoint):
    rb = td_buffer(sync=False, batch_size=8)
    update(rb, handles(rb), torch.arange(11.0, 19.0))
    fresh = td_buffer(0, sync=False, batch_size=8)
    checkpoint(rb)(fresh)
    fresh.sample()
    assert leaves(fresh) == list(range(11, 19))


def test_prefetched_batches_in_a_checkpoint_are_live_and_stale_after_a_further_lap(checkpoint):
    rb = td_buffer(prefetch=2, batch_size=4)
    rb.sample()
    load = checkpoint(rb)
    rb.shutdown()
    for lap in (False, True):
        fresh = td_buffer(0, prefetch=2, batch_size=4)
        load(fresh)
        if lap:
            fresh.extend(ids(range(8)))
        batch = fresh.sample()
        held = {"index": batch["index"], "generation": batch["index_generation"]}
        assert update(fresh, held, 5.0).num_updated == (0 if lap else 4)
        fresh.shutdown()


def test_torchrl_reads_ours_and_we_read_torchrls_stamps(tmp_path):
    ours = td_buffer()
    ours.extend(ids(range(3)))
    ours.dumps(tmp_path / "ours")

    def stock():
        return torchrl.data.TensorDictPrioritizedReplayBuffer(
            **PER, storage=LazyTensorStorage(CAPACITY)
        )

    theirs = stock()
    theirs.set_writer(torchrl.data.TensorDictRoundRobinWriter(track_generations=True))
    theirs.loads(tmp_path / "ours")
    assert theirs.writer.generations_of(torch.arange(8)).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert theirs[:]["id"].tolist() == ours[:]["id"].tolist()
    theirs.load_state_dict(ours.state_dict())
    theirs.extend(ids([9]))
    theirs.dumps(tmp_path / "theirs")
    state = copy.deepcopy(theirs.state_dict())
    for load in (
        lambda rb: rb.loads(tmp_path / "theirs"),
        lambda rb: rb.load_state_dict(state),
    ):
        fresh = td_buffer(0)
        load(fresh)
        assert fresh.writer.generations_of(range(8)).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
        used = td_buffer()
        held = handles(used)
        load(used)
        assert not used._table.is_live(**held).any()


def test_a_writer_without_a_storage_keeps_what_it_loaded_and_saves_it_again(tmp_path):
    rb = td_buffer()
    rb.extend(ids(range(3)))
    rb.writer.dumps(tmp_path / "a")
    first = TensorDictRoundRobinWriter(track_generations=True)
    first.loads(tmp_path / "a")
    first.dumps(tmp_path / "b")
    second = TensorDictRoundRobinWriter(track_generations=True)
    second.loads(tmp_path / "b")
    other = TensorDictReplayBuffer(storage=TensorStorage(rb.storage[:].clone()), writer=second)
    assert other._table.history.lineage == rb._table.history.lineage
    assert other._table.is_live(**handles(rb)).all()
    assert other.writer._cursor == 3


# ------------------------------------------------------------------ what does not fit


def unchanged(rb, load, error, match):
    held = handles(rb)
    before = (rb[:]["id"].tolist(), leaves(rb), stamps(rb).tolist(), rb.writer._cursor)
    with pytest.raises(error, match=match):
        load()
    assert (rb[:]["id"].tolist(), leaves(rb), stamps(rb).tolist(), rb.writer._cursor) == before
    assert rb._table.is_live(**held).all()


def test_another_capacity_is_refused_and_nothing_has_changed(tmp_path):
    small = td_buffer(4, storage=LazyTensorStorage(4))
    small.dumps(tmp_path / "small")
    rb = td_buffer()
    match = "has (records|stamps) for 4 slots: this buffer has 8"
    unchanged(rb, lambda: rb.load_state_dict(small.state_dict()), ValueError, match)
    unchanged(rb, lambda: rb.loads(tmp_path / "small"), ValueError, match)


@pytest.mark.parametrize("damage", ["truncated", "missing", "grown"])
@pytest.mark.parametrize("name", ["storage/id.memmap", "writer/generation.memmap"])
def test_a_damaged_file_is_refused_and_nothing_has_changed(damage, name, tmp_path):
    rb = td_buffer()
    rb.dumps(tmp_path / "dump")
    file = tmp_path / "dump" / name
    if damage == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "grown":
        os.truncate(file, file.stat().st_size * 2)
    else:
        file.unlink()
    rb.extend(ids(range(100, 108)))
    match = "is not whole: " + name.replace("/", ".")
    unchanged(rb, lambda: rb.loads(tmp_path / "dump"), RuntimeError, match)


@pytest.mark.parametrize(
    "name", ["storage/storage_metadata.json", "writer/metadata.json", "buffer_metadata.json"]
)
def test_metadata_that_is_garbled_is_refused_and_nothing_has_changed(name, tmp_path):
    rb = td_buffer()
    rb.dumps(tmp_path / "dump")
    file = tmp_path / "dump" / name
    file.write_text("?" * file.stat().st_size)
    rb.extend(ids(range(100, 108)))
    match = f"is not whole: {file.name} in .* can't be read"
    unchanged(rb, lambda: rb.loads(tmp_path / "dump"), RuntimeError, match)


def test_a_folder_without_a_dump_is_refused_and_nothing_has_changed(tmp_path):
    rb = td_buffer()
    unchanged(rb, lambda: rb.loads(tmp_path), FileNotFoundError, "no whole dump")


def test_a_checkpoint_without_stamps_revives_no_handle_where_there_is_a_base_already():
    stock = torchrl.data.TensorDictPrioritizedReplayBuffer(
        **PER, storage=LazyTensorStorage(CAPACITY)
    )
    stock.extend(ids(range(8)))
    fresh, started_again = td_buffer(0), td_buffer(0)
    restore.retire(started_again._table)  # as in a Ray actor after a crash: its learners live on
    for rb in (fresh, started_again):
        rb.load_state_dict(stock.state_dict())
    assert fresh._table.is_live(range(8), [0] * 8).all()  # nobody can hold another record's
    assert not started_again._table.is_live(range(8), [0] * 8).any()
    assert update(started_again, handles(started_again), 2.0).num_updated == 8


# ------------------------------------------------------------------ copies

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda rb: pickle.loads(pickle.dumps(rb)),
    "cloudpickle": lambda rb: cloudpickle.loads(cloudpickle.dumps(rb)),
}
BUFFERS = {
    "list": lambda: td_buffer(storage=ListStorage(CAPACITY)),
    "tensor": td_buffer,
    "memmap": lambda: td_buffer(storage=LazyMemmapStorage(CAPACITY)),
    "shared": lambda: td_buffer(sync=False, shared=True),
    "memmap shared_init": lambda: td_buffer(
        storage=LazyMemmapStorage(CAPACITY, shared_init=True), sync=False, shared=True
    ),
    "tensor shared_init": lambda: td_buffer(
        storage=LazyTensorStorage(CAPACITY, shared_init=True), sync=False
    ),
    "plain tensors": buffer,
    "plain memmap": lambda: buffer(storage=LazyMemmapStorage(CAPACITY)),
    "not written": lambda: td_buffer(0),
    "memmap not written": lambda: td_buffer(0, storage=LazyMemmapStorage(CAPACITY)),
    "prefetching": lambda: td_buffer(prefetch=2, batch_size=4),
    "uniform": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), track_generations=True
    ),
}


def content(rb):
    if not len(rb):
        return []
    records = rb.storage[:]
    if isinstance(records, torch.Tensor):
        return records.tolist()
    return [int(record["id"]) for record in records]


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_a_copy_is_an_independent_buffer_whose_handles_agree_with_its_records(make, copy_of):
    rb = make()
    held = handles(rb)
    copied = copy_of(rb)
    assert content(copied) == content(rb)
    assert torch.equal(copied._table.is_live(**held), rb._table.is_live(**held))
    assert copied._write_lock is not rb._write_lock
    new = ids(range(100, 103)) if rb._is_tensordict else torch.arange(100, 103)
    before = content(rb)
    copied.extend(new)
    assert content(rb) == before
    assert set(range(100, 103)) <= set(content(copied))
    rb.extend(new)
    theirs, ours = handles(copied), handles(rb)
    overwritten = slice(0, 3)
    assert not rb._table.is_live(
        theirs["index"][overwritten], theirs["generation"][overwritten]
    ).any()
    assert not copied._table.is_live(
        ours["index"][overwritten], ours["generation"][overwritten]
    ).any()


def test_an_untracked_buffer_copies_as_torchrls_does():
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    rb.extend(torch.arange(8))
    for copied in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        copied.extend(torch.arange(100, 103))
        assert rb[:].tolist() == list(range(8))
        assert copied[:].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]


def test_the_files_of_a_copy_go_with_it():
    rb = td_buffer(storage=LazyMemmapStorage(CAPACITY))
    copied = copy.deepcopy(rb)
    folder = Path(copied.storage.scratch_dir)
    assert (folder / "id.memmap").exists()
    del copied
    gc.collect()
    assert not folder.exists()
    assert rb[:]["id"].tolist() == list(range(8))


def test_a_checkpoint_without_priorities_is_refused_by_a_buffer_with(checkpoint):
    without = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), track_generations=True)
    without.extend(ids(range(5)))
    load = checkpoint(without)
    rb = td_buffer()
    held = handles(rb)
    with pytest.raises(ValueError, match=r"no priorities for .* has a PrioritizedSampler"):
        load(rb)
    assert rb[:]["id"].tolist() == list(range(8))
    assert rb.update_priority_if_present(**held, priority=2.0).num_updated == 8


def test_more_records_than_a_list_and_its_tree_hold_are_refused():
    of = torchrl.data.TensorDictReplayBuffer(storage=ListStorage())
    of.extend(ids(range(12)))
    rb = td_buffer(0, storage=ListStorage(10), sync=False)
    with pytest.raises(ValueError, match="has records for 12 slots: this buffer has 10"):
        rb.load_state_dict(of.state_dict())
    assert len(rb) == 0


class Enveloped(PrioritizedSampler):
    """A user's sampler that saves its state in a form of its own."""

    def state_dict(self):
        return {"envelope": super().state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["envelope"])


def test_a_users_sampler_may_save_what_it_likes():
    def with_envelope():
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY),
            sampler=Enveloped(CAPACITY, **PER),
            track_generations=True,
        )

    rb, fresh = with_envelope(), with_envelope()
    rb.extend(ids(range(5)))
    held = handles(rb, range(5))
    rb.update_priority_if_present(**held, priority=3.0)
    fresh.load_state_dict(rb.state_dict())
    assert leaves(fresh)[:5] == [3] * 5
    assert fresh.update_priority_if_present(**held, priority=2.0).num_updated == 5


@pytest.mark.parametrize("leaves_of_tree", [8, 1023, 1500])
def test_a_list_without_an_end_is_restored_under_a_tree_of_any_size(leaves_of_tree):
    def endless():
        return TensorDictReplayBuffer(
            storage=ListStorage(),
            sampler=PrioritizedSampler(leaves_of_tree, **PER),
            track_generations=True,
        )

    rb, fresh = endless(), endless()
    rb.extend(ids(range(5)))
    held = handles(rb, range(5))
    for to in (fresh, rb):
        to.load_state_dict(copy.deepcopy(rb.state_dict()))
        assert to.update_priority_if_present(**held, priority=2.0).num_updated == 5


@pytest.mark.parametrize("by", ["dumps", "state_dict"])
def test_a_learners_tree_of_another_size_is_refused_by_both_ways(by, tmp_path):
    def learner(leaves_of_tree):
        rb = td_buffer(0, sync=False)
        rb.set_sampler(PrioritizedSampler(leaves_of_tree, **PER))
        return rb

    rb, other = learner(2 * CAPACITY), learner(CAPACITY)
    rb.extend(ids(range(5)))
    rb.sample(2)
    other.extend(ids(range(3)))
    state = rb.state_dict() if by == "state_dict" else rb.dumps(tmp_path / "dump")
    with pytest.raises(ValueError, match="has priorities for 16 slots: this buffer has 8"):
        other.load_state_dict(state) if by == "state_dict" else other.loads(tmp_path / "dump")
    assert len(other) == 3


def test_a_copy_on_files_begins_anew_after_a_restore_of_no_records():
    never_written = copy.deepcopy(td_buffer(0, storage=LazyMemmapStorage(CAPACITY)).state_dict())
    copied = copy.deepcopy(td_buffer(5, storage=LazyMemmapStorage(CAPACITY)))
    copied.load_state_dict(never_written)
    assert len(copied) == 0
    index, generation = copied.extend(ids(range(20, 23)), return_generation=True)
    assert copied[:]["id"].tolist() == [20, 21, 22]
    held = {"index": index, "generation": generation}
    assert copied.update_priority_if_present(**held, priority=2.0).num_updated == 3
