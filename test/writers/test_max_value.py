"""TensorDictMaxValueWriter: it keeps the best records, and no handle survives its record."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random

import pytest
import torch
import torchrl.data
from common import PER, Thread, failing_writes, leaves, stamps
from tensordict import TensorDict, tensorclass
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
)
from torchrl.data.replay_buffers import generations
from torchrl.data.replay_buffers.generations import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.generations.processes.cells import Cell


@tensorclass
class Scored:
    score: torch.Tensor


STORAGES = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}


def scores(*values, **columns):
    return TensorDict({"score": torch.tensor(values, dtype=torch.float32), **columns}, len(values))


def best(capacity=4, storage=LazyTensorStorage, cls=TensorDictPrioritizedReplayBuffer, **kwargs):
    """A prioritized buffer of the ``capacity`` best records."""
    writer = TensorDictMaxValueWriter(rank_key="score", track_generations=True)
    if issubclass(cls, torchrl.data.PrioritizedReplayBuffer) or "Prioritized" in cls.__name__:
        kwargs = {**PER, **kwargs}
    return cls(storage=storage(capacity), writer=writer, track_generations=True, **kwargs)


def kept(rb):
    return [float(record["score"]) for record in rb.storage[:]]


def live(rb, index, generation):
    return rb._table.is_live(index, generation).tolist()


# ------------------------------------------------------------------ writing


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_an_evicted_records_handle_is_stale_and_a_rejected_row_has_none(storage):
    rb = best(storage=storage)
    first = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    assert (first[0].tolist(), first[1].tolist()) == ([0, 1, 2, 3], [0, 0, 0, 0])
    second = rb.extend(scores(0, 4, 2, 6), return_generation=True)
    assert second[0].tolist() == [-1, 1, -1, 2]  # 4 evicts 1, and 6 evicts 3
    assert second[1].tolist() == [-1, 1, -1, 1]
    assert kept(rb) == [5, 4, 6, 7]
    assert live(rb, *first) == [True, False, False, True]
    assert live(rb, *second) == [False, True, False, True]
    result = rb.update_priority_if_present(
        index=torch.cat([first[0], second[0]]),
        generation=torch.cat([first[1], second[1]]),
        priority=torch.arange(10.0, 90.0, 10.0),
    )
    assert result.updated_mask.tolist() == [
        *(True, False, False, True),
        *(False, True, False, True),
    ]
    assert leaves(rb) == [10, 60, 80, 40]


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_of_several_winners_of_one_slot_only_the_last_row_is_written_and_has_a_handle(storage):
    rb = best(capacity=2, storage=storage)
    index, generation = rb.extend(scores(1, 2, 3, 4, 5, 0), return_generation=True)
    assert index.tolist() == [-1, -1, -1, 1, 0, -1]
    assert generation.tolist() == [-1, -1, -1, 0, 0, -1]
    assert kept(rb) == [5, 4]
    assert stamps(rb)[:2].tolist() == [0, 0]  # once per slot that was written
    index, generation = rb.extend(scores(6, 7, 8, 9), return_generation=True)
    assert index.tolist() == [-1, -1, 1, 0]
    assert generation.tolist() == [-1, -1, 1, 1]
    assert rb.write_count == 9  # counted as TorchRL does


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_one_record_at_a_time(storage):
    rb = best(capacity=2, storage=storage)
    assert rb.add(scores(3)[0], return_generation=True) == (0, 0)
    assert rb.add(scores(5)[0]) == 1
    assert rb.add(scores(1)[0]) is None  # as TorchRL's
    assert rb.add(scores(1)[0], return_generation=True) == (-1, -1)
    held = rb.add(scores(4)[0], return_generation=True)
    assert held == (0, 1)
    assert kept(rb) == [4, 5]
    result = rb.update_priority_if_present(index=[0, 0, -1], generation=[0, 1, -1], priority=7.0)
    assert result.updated_mask.tolist() == [False, True, False]
    assert leaves(rb) == [7, 1]


def test_a_record_gets_the_default_priority_or_the_one_that_it_carries():
    rb = best()
    rb.extend(scores(5, 1, 3, 7, td_error=torch.tensor([2.0, 9.0, 4.0, 3.0])))
    assert leaves(rb) == [2, 9, 4, 3]
    rb.extend(scores(0, 4, td_error=torch.tensor([50.0, 6.0])))  # the first is rejected
    assert leaves(rb) == [2, 6, 4, 3]
    rb.extend(scores(6))
    assert leaves(rb) == [2, 6, 9, 3]  # the largest priority ever given
    rb.add(scores(8, td_error=torch.tensor([5.0]))[0])
    assert leaves(rb) == [2, 5, 9, 3]


def test_stamps_advance_before_the_data_and_under_the_lock(monkeypatch):
    rb = best()
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    seen = []
    set_records = LazyTensorStorage.set

    def spy(storage, cursor, data, **kwargs):
        other = Thread(lambda: rb._table.lock.acquire(block=False))
        seen.append((live(rb, *held), rb._table.lock.is_held(), other.join()))
        set_records(storage, cursor, data, **kwargs)

    monkeypatch.setattr(LazyTensorStorage, "set", spy)
    rb.extend(scores(4))
    rb.add(scores(6)[0])
    assert seen == [
        ([True, False, True, True], True, False),
        ([True, False, False, True], True, False),
    ]


@pytest.mark.parametrize("add", [True, False])
def test_a_write_that_fails_kills_the_handles_of_its_slots_and_leaves_the_ranks(add, monkeypatch):
    def records(*values, width=2):
        return scores(*values, obs=torch.zeros(len(values), width))

    rb = best()
    held = rb.extend(records(5, 1, 3, 7), return_generation=True)
    rb.update_priority_if_present(index=held[0], generation=held[1], priority=[9.0, 2.0, 4.0, 3.0])
    bad, later = records(0, 100, width=5), records(0, 100)
    with pytest.raises(ValueError, match="'obs' must have the shape"):  # refused beforehand
        rb.add(bad[1]) if add else rb.extend(bad)
    assert live(rb, *held) == [True] * 4
    with failing_writes(rb.storage):
        rb.add(later[1]) if add else rb.extend(later)
    assert live(rb, *held) == [True, False, True, True]
    assert leaves(rb) == [9, 9, 4, 3]  # slot 1 has the default again: the largest ever given
    assert rb.write_count == 4
    assert rb.extend(records(2, 2)).tolist() == [1, -1]  # slot 1 still ranks lowest
    Thread(lambda: rb.extend(records(8))).join()  # the lock is free


def test_a_write_that_fails_before_the_buffer_is_full_leaves_no_hole():
    rb = best()
    rb.add(scores(1, obs=torch.zeros(1, 2))[0])
    with failing_writes(rb.storage):
        rb.extend(scores(2, 3, obs=torch.zeros(2, 2)))
    assert len(rb) == 1
    assert (rb.writer._cursor, rb.writer._current_top_values) == (1, [(1, 0)])
    assert rb.extend(scores(2, 3, obs=torch.zeros(2, 2))).tolist() == [1, 2]


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_a_list_of_records_and_records_of_a_tensorclass_rank_too(storage):
    rb = ReplayBuffer(
        storage=storage(2),
        writer=TensorDictMaxValueWriter(rank_key="score", track_generations=True),
    )
    index, generation = rb.extend(list(scores(1, 3, 2)), return_generation=True)
    assert (index.tolist(), generation.tolist()) == ([-1, 1, 0], [-1, 0, 0])
    assert kept(rb) == [2, 3]
    of_class = best(cls=ReplayBuffer, storage=storage)
    held = of_class.extend(Scored(score=torch.tensor([1.0, 3.0]), batch_size=[2]))
    assert held.tolist() == [0, 1]
    assert float(of_class.storage[1].score) == 3
    for odd in (torch.arange(3), [torch.tensor(1)], [1]):
        with pytest.raises(RuntimeError, match="needs tensordicts or tensorclasses: got"):
            rb.extend(odd)


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_records_without_a_rank_are_refused_and_nothing_has_changed(storage):
    rb = best(storage=storage)
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    unranked = scores(9, 9).rename_key_("score", "other")
    with pytest.raises(KeyError, match=r"needs its rank_key 'score' in the records: got .'other'"):
        rb.extend(unranked)
    with pytest.raises(KeyError, match="rank_key"):
        rb.add(unranked[0])
    assert live(rb, *held) == [True] * 4
    assert rb.extend(scores(2)).tolist() == [1]


def test_records_that_are_trajectories_rank_by_their_reduced_score():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2),
        writer=TensorDictMaxValueWriter(rank_key="score", track_generations=True),
    )
    records = TensorDict({"score": torch.tensor([[1.0, 1], [5, 5], [2, 9]])}, [3, 2])
    index, generation = rb.extend(records, return_generation=True)
    assert index.tolist() == [-1, 1, 0]
    assert generation.tolist() == [-1, 0, 0]
    assert rb[:]["score"].tolist() == [[2, 9], [5, 5]]


def test_a_sample_put_back_is_stored_without_its_stamps():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(4),
        writer=TensorDictMaxValueWriter(rank_key="score", track_generations=True),
    )
    one = scores(3, index=torch.tensor([9]), index_generation=torch.tensor([99]))[0]
    rb.add(one)
    # TorchRL's writer rewrites the index of a record that is added, and of none of a batch.
    assert (int(one["index"]), int(one["index_generation"])) == (0, 0)
    some = scores(4, 5, index=torch.tensor([9, 9]), index_generation=torch.tensor([99, 99]))
    rb.extend(some)
    assert some["index"].tolist() == [9, 9]
    assert some["index_generation"].tolist() == [99, 99]
    assert "index_generation" not in rb.storage._storage.keys()  # noqa: SIM118
    low = scores(3, index=torch.tensor([9]), index_generation=torch.tensor([99]))[0]
    rb.add(scores(6, index=torch.tensor([0]))[0])
    assert rb.add(low) is None
    assert (int(low["index"]), int(low["index_generation"])) == (9, 99)  # it went nowhere


def test_empty_kills_every_handle_and_forgets_the_ranks():
    rb = best()
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    rb.empty()
    assert live(rb, *held) == [False] * 4
    assert stamps(rb).tolist() == [1] * 4
    assert rb.extend(scores(0, 0), return_generation=True)[1].tolist() == [2, 2]
    assert live(rb, *held) == [False] * 4
    assert kept(rb) == [0, 0]


def test_ranks_go_with_the_records_when_another_buffer_empties_the_storage():
    rb = best()
    held = rb.extend(scores(5, 3, 1, 7), return_generation=True)
    ReplayBuffer(storage=rb.storage).empty()
    assert rb.add(scores(0)[0], return_generation=True) == (0, 2)
    assert live(rb, *held) == [False] * 4
    assert rb.extend(scores(0)).tolist() == [1]


def test_a_slot_that_a_write_makes_sampleable_without_a_record_is_stamped_too():
    rb = best()
    rb.extend(scores(5, 3))
    held = rb._table.of(range(4))
    rb.writer._cursor = 3  # as a user's get_insert_index() may choose
    assert rb.extend(scores(4)).tolist() == [3]
    assert len(rb) == 3  # TorchRL counts records, whatever their slots
    assert live(rb, range(4), held) == [True, True, False, False]
    assert rb.writer.generations_of(range(4)).tolist() == [0, 0, 0, -1]
    assert leaves(rb)[:3] == [1, 1, 1]


def test_without_tracking_it_is_torchrls():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="score")
    )
    assert rb.extend(scores(3, 1, 2)).tolist() == [0, -1, 1]
    assert rb.add(scores(0)[0]) is None
    assert rb.add(scores(9)[0]) == 1
    assert not hasattr(rb.storage, "_slot_generations")
    assert rb.writer.generations_of([0]).tolist() == [-1]
    for call in (rb.state_dict, lambda: rb.writer.load_state_dict({})):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(ValueError, match=r"generations\.TensorDictMaxValueWriter\(track_gen"):
        TensorDictReplayBuffer(writer=TensorDictMaxValueWriter(), track_generations=True)


def test_without_tracking_it_advances_anothers_table():
    storage = LazyTensorStorage(2)
    plain = ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="score"))
    tracking = TensorDictReplayBuffer(storage=storage, track_generations=True)
    plain.extend(scores(1, 2))
    held = tracking._table.of([0, 1])
    plain.extend(scores(3, 0))
    assert live(tracking, [0, 1], held) == [False, True]


@pytest.mark.parametrize("seed", range(5))
def test_it_keeps_the_records_that_torchrls_keeps(seed):
    draw = random.Random(seed)
    ours = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5),
        writer=TensorDictMaxValueWriter(rank_key="score", track_generations=True),
    )
    stock = torchrl.data.TensorDictReplayBuffer(
        storage=LazyTensorStorage(5), writer=torchrl.data.TensorDictMaxValueWriter(rank_key="score")
    )
    for _ in range(30):
        records = scores(*(draw.randrange(50) for _ in range(draw.randint(1, 12))))
        if draw.random() < 0.3:
            assert ours.add(records[0].clone()) == stock.add(records[0].clone())
        else:
            assert ours.extend(records.clone()).equal(stock.extend(records.clone()))
        assert ours.storage[:]["score"].equal(stock.storage[:]["score"])
        assert ours.writer._current_top_values == stock.writer._current_top_values
        assert (ours.writer._cursor, ours.write_count) == (stock.writer._cursor, stock.write_count)


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(4, 1.0, 1.0)])
def test_a_batch_that_is_rejected_whole_changes_nothing(sampler):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(2),
        sampler=sampler(),
        writer=TensorDictMaxValueWriter(rank_key="score", track_generations=True),
    )
    held = rb.extend(scores(5, 6), return_generation=True)
    assert rb.extend(scores(1, 2)).tolist() == [-1, -1]
    assert rb.extend(scores(1)[:0]).tolist() == []
    assert live(rb, *held) == [True, True]
    assert stamps(rb).tolist() == [0, 0]


@pytest.mark.parametrize("cls", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_an_asynchronous_learner_gives_an_evicted_slot_the_default_priority(cls):
    rb = best(cls=cls, sync=False, batch_size=4)
    index, generation = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    rb.update_priority_if_present(index=index, generation=generation, priority=[2.0, 9.0, 4.0, 3.0])
    rb.extend(scores(0, 4, 6))
    rb.sample()
    assert leaves(rb) == [2, 9, 9, 3]  # slots 1 and 2: the default is the largest ever given


# ------------------------------------------------------------------ checkpoints and copies


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_restore_brings_ranks_and_handles_back_and_no_others(storage, checkpoint):
    rb = best(storage=storage)
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    load = checkpoint(rb)
    later = rb.extend(scores(4, 6), return_generation=True)
    load(rb)
    assert live(rb, *held) == [True] * 4
    assert live(rb, *later) == [False] * 2
    assert kept(rb) == [5, 1, 3, 7]
    again = rb.extend(scores(0, 4, 6), return_generation=True)
    assert again[0].tolist() == [-1, 1, 2]
    assert live(rb, *later) == [False] * 2  # the same slots, by another branch
    assert live(rb, *held) == [True, False, False, True]


@pytest.mark.parametrize("records", [2, 4])
def test_it_resumes_in_a_new_buffer(records, checkpoint):
    rb = best()
    held = rb.extend(scores(*[5, 1, 3, 7][:records]), return_generation=True)
    load = checkpoint(rb)
    fresh = best()
    load(fresh)
    assert live(fresh, *held) == [True] * records
    assert fresh.extend(scores(0, 4)).tolist() == ([2, 3] if records == 2 else [-1, 1])
    assert fresh.write_count == rb.write_count + (2 if records == 2 else 1)


def test_records_that_ran_on_since_the_state_was_taken_are_ranked_anew():
    rb = best()
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    state = rb.state_dict()  # aliases the records
    rb.extend(scores(4, 6))
    rb.load_state_dict(state)
    assert live(rb, *held) == [True, False, False, True]
    assert kept(rb) == [5, 4, 6, 7]
    assert rb.extend(scores(4, 5, 8)).tolist() == [-1, 1, 0]


def test_a_memmap_that_is_dumped_where_it_lives_is_ranked_anew(tmp_path):
    def made():
        return best(storage=lambda size: LazyMemmapStorage(size, scratch_dir=tmp_path / "storage"))

    rb = made()
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    rb.dumps(tmp_path)
    rb.extend(scores(4, 6))  # into the dump
    del rb  # that run ends
    fresh = made()
    fresh.loads(tmp_path)
    assert kept(fresh) == [5, 4, 6, 7]
    assert live(fresh, *held) == [False] * 4
    assert fresh.extend(scores(3)).tolist() == [-1]  # 4 ranks lowest now, and not 1


def test_torchrls_dump_has_ranks_and_no_stamps_and_it_reads_ours(tmp_path):
    stock = torchrl.data.TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), writer=torchrl.data.TensorDictMaxValueWriter(rank_key="score")
    )
    stock.extend(scores(5, 1, 3, 7))
    stock.dumps(tmp_path / "stock")
    rb = best(cls=TensorDictReplayBuffer)
    held = rb.extend(scores(1, 2, 3, 4), return_generation=True)
    rb.loads(tmp_path / "stock")
    assert live(rb, *held) == [False] * 4
    assert rb.extend(scores(2)).tolist() == [1]
    rb.dumps(tmp_path / "ours")
    stock.loads(tmp_path / "ours")
    assert stock.extend(scores(1, 4)).tolist() == [-1, 1]


def test_a_checkpoint_of_another_capacity_or_writer_is_refused_or_stale(tmp_path):
    rb = best()
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    other = best(capacity=2)
    other.extend(scores(5, 1))
    other.dumps(tmp_path / "dump")
    with pytest.raises(ValueError, match="for 2 slots: this buffer has 4"):
        rb.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="for 2 slots: this buffer has 4"):
        rb.loads(tmp_path / "dump")
    assert live(rb, *held) == [True] * 4


def test_a_checkpoint_of_another_writer_is_refused_and_nothing_has_changed(tmp_path):
    rb = best()
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    ring = TensorDictPrioritizedReplayBuffer(
        **PER, storage=LazyTensorStorage(4), track_generations=True
    )
    ring.extend(scores(1, 2, 3, 4))
    ring.dumps(tmp_path)
    for load in (lambda: rb.load_state_dict(ring.state_dict()), lambda: rb.loads(tmp_path)):
        with pytest.raises(ValueError, match="has no ranks: it was saved under another writer"):
            load()
    assert live(rb, *held) == [True] * 4
    assert kept(rb) == [5, 1, 3, 7]


@pytest.mark.parametrize("module", [generations, torchrl.data])
def test_a_ring_writer_takes_its_dump_for_one_without_stamps(module, tmp_path):
    rb = best()
    rb.extend(scores(5, 1, 3, 7))
    rb.dumps(tmp_path)
    writer = module.TensorDictRoundRobinWriter(track_generations=True)
    sampler = PrioritizedSampler(4, **PER)
    ring = module.TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), writer=writer, sampler=sampler
    )
    ring.loads(tmp_path)
    assert kept(ring) == [5, 1, 3, 7]
    ring.extend(scores(2))
    assert kept(ring) == [2, 1, 3, 7]


def test_on_another_storage_it_begins_without_ranks():
    rb = best()
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    storage = LazyTensorStorage(4)
    ReplayBuffer(storage=storage).extend(scores(20, 30))
    rb.set_storage(storage)
    assert rb.extend(scores(0, 0)).tolist() == [0, 1]
    assert live(rb, *held) == [False] * 4


def test_a_writer_without_a_storage_keeps_what_it_loaded():
    rb = best()
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    writer = TensorDictMaxValueWriter(track_generations=True)
    writer.load_state_dict(rb.writer.state_dict())
    assert writer.state_dict()["_generation"].equal(stamps(rb))
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=writer)
    other.storage.set(range(4), rb[:])
    assert live(other, *held) == [True] * 4
    assert other.extend(scores(2)).tolist() == [1]


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_is_independent_with_ranks_of_its_own(copy_of):
    rb = best()
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    twin = copy_of(rb)
    ours = rb.extend(scores(4), return_generation=True)
    theirs = twin.extend(scores(6, 2), return_generation=True)
    assert theirs[0].tolist() == [1, -1]
    assert (kept(rb), kept(twin)) == ([5, 4, 3, 7], [5, 6, 3, 7])
    assert live(rb, *held) == live(twin, *held) == [True, False, True, True]
    assert live(twin, *ours) == [False]
    assert live(rb, *theirs) == [False, False]
    assert (rb.write_count, twin.write_count) == (5, 5)


# ------------------------------------------------------------------ processes


def write_in_child(rb, values, results):
    torch.set_num_threads(1)
    try:
        results.put(rb.extend(scores(*values)).tolist())
    except RuntimeError as error:
        results.put(str(error))


def in_fork(rb, *values):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=write_in_child, args=(rb, values, results))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return results.get()


def test_after_a_fork_one_process_may_write_and_the_other_is_refused():
    rb = best(storage=LazyMemmapStorage, sync=False, batch_size=4)
    held = rb.extend(scores(5, 1, 3, 7), return_generation=True)
    assert in_fork(rb, 0, 4) == [-1, 1]
    assert live(rb, *held) == [True, False, True, True]
    assert kept(rb) == [5, 4, 3, 7]
    with pytest.raises(RuntimeError, match="another process wrote through its copy"):
        rb.extend(scores(9))
    assert live(rb, *held) == [True, False, True, True]
    rb.empty()
    assert rb.extend(scores(9)).tolist() == [0]  # no ranks, nothing unknown

    ours = best(storage=LazyMemmapStorage, sync=False)
    ours.extend(scores(5, 1, 3, 7))
    assert in_fork(ours) == []  # it wrote nothing
    assert ours.extend(scores(2)).tolist() == [1]


def test_share_keeps_its_lock_and_a_spawned_process_is_refused_as_by_torchrl():
    rb = best(sync=False)
    rb.extend(scores(5, 1, 3, 7))
    rb.share()
    assert rb._write_lock is rb._table.lock
    assert rb.storage._storage["score"].is_shared()
    assert stamps(rb).is_shared()
    assert isinstance(rb.writer._write_count_value, Cell)  # no semaphore to die with
    assert in_fork(rb, 4) == [1]
    process = multiprocessing.get_context("spawn").Process(target=kept, args=(rb,))
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        process.start()
