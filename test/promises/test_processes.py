"""One storage, many processes: shared counters, one lock, crashed writers."""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
import torchrl.data
from common import CAPACITY, PER, Thread, audited, buffer, ids, leaves, stamps, td_buffer
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorStorage
from torchrl.data.replay_buffers.generations import (
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.utils import CloudpickleWrapper

SLOTS = 64
LATE = 4  # batches between a sample and its update
PATIENCE = 30
METHODS = ["forkserver", "fork"]


def learner(storage, batch_size=16):
    return TensorDictPrioritizedReplayBuffer(
        **PER, storage=storage, sync=False, batch_size=batch_size, track_generations=True
    )


@contextlib.contextmanager
def child(method, target, *args):
    """A process that is gone at the end, whatever happens."""
    process = multiprocessing.get_context(method).Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
        process.join(60)
        assert process.exitcode == 0, f"exit code {process.exitcode}"
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def rewrite_three(rb):
    torch.set_num_threads(1)
    rb.extend(ids(range(100, 103)))


def write_first(rb, go):
    torch.set_num_threads(1)
    rb.extend(ids(range(8)))
    go.wait(60)
    rb.extend(ids(range(100, 103)))


PRIORITY = [500.0, 500.0, 500.0, 20.0, 21.0, 22.0, 23.0, 24.0]


def assert_only_the_first_three_are_stale(rb, generation):
    result = rb.update_priority_if_present(
        index=torch.arange(8), generation=generation, priority=PRIORITY
    )
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
    rb.sample()
    assert leaves(rb)[3:] == [20, 21, 22, 23, 24]
    assert max(leaves(rb)) == 24


# Spawned processes get their arguments as those of a forkserver do, and take 5 seconds to start.
SPAWN_TOO = [*METHODS, pytest.param("spawn", marks=pytest.mark.stress)]


@pytest.mark.parametrize("method", SPAWN_TOO)
@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_a_childs_writes_make_the_learners_handles_stale(method, storage):
    rb = learner(storage(CAPACITY), 8)
    rb.share()
    rb.extend(ids(range(8)))
    rb.sample()
    generation = rb.writer.generations_of(torch.arange(8))
    with child(method, rewrite_three, rb):
        pass
    assert_only_the_first_three_are_stale(rb, generation)
    assert rb[:]["id"].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]
    assert rb.write_count == 11
    assert rb.writer._cursor == 3


PREPARED = {
    "shared": lambda: TensorStorage(ids(range(CAPACITY)).share_memory_()),
    "memmap": lambda: TensorStorage(ids(range(CAPACITY)).memmap_()),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prepared", PREPARED)
def test_a_storage_of_shared_tensors_needs_no_share(method, prepared):
    rb = learner(PREPARED[prepared](), 8)
    held = rb.writer.generations_of(torch.arange(8))
    with child(method, rewrite_three, rb):
        pass
    assert rb._table.is_live(torch.arange(8), held).tolist() == [False] * 3 + [True] * 5
    assert rb[:]["id"].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]


def test_more_than_two_to_the_20_slots_are_shared_too():
    slots = 2**20 + 100
    rb = learner(LazyMemmapStorage(slots), 8)
    rb.extend(ids(range(8)))
    rb.writer._cursor = slots - 2
    with child("fork", rewrite_three, rb):
        pass
    assert stamps(rb)[[slots - 2, slots - 1, 0, 1]].tolist() == [0, 0, 1, 0]
    assert rb.writer._cursor == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_learner_may_restore_while_a_worker_writes(method):
    rb = learner(LazyMemmapStorage(SLOTS))
    rb.extend(ids(range(SLOTS)))
    stop = multiprocessing.get_context(method).Event()
    counts = {"applied": 0, "stale": 0, "misapplied": 0, "falsely_stale": 0}
    saved: list = []
    with child(method, write_until, rb, 10**9, stop):
        try:
            deadline = time.monotonic() + 60
            while rb.write_count < SLOTS * 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            for round_ in range(8):
                saved.append(copy.deepcopy(rb.state_dict()))
                for name, count in learn(rb, 0.1).items():
                    counts[name] += count
                rb.load_state_dict(saved[round_ // 2])
        finally:
            stop.set()
    assert counts["applied"] > 0
    assert counts["stale"] > 0
    assert counts["misapplied"] == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_the_same_when_the_child_makes_the_storages_first_write(method, storage):
    rb = learner(storage(CAPACITY, shared_init=True), 8)
    go = multiprocessing.get_context(method).Event()
    with child(method, write_first, rb, go):
        deadline = time.monotonic() + 60
        while len(rb) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        rb.sample()
        generation = rb.writer.generations_of(torch.arange(8))
        assert generation.tolist() == [0] * 8
        go.set()
    assert_only_the_first_three_are_stale(rb, generation)


# ------------------------------------------------------------------ all at once


def write_until(rb, first_id, stop):
    torch.set_num_threads(1)
    rows, next_id = 0, first_id
    while not stop.is_set():
        rows = rows % 23 + 1
        rb.extend(ids(range(next_id, next_id + rows)))
        next_id += rows


def own_priority(record_ids):
    return (record_ids * 7919 % 4093 + 1).to(torch.float32)


def learn(rb, seconds, conditional=True):
    """Updates four batches late; compares the ids in the slots with those sampled, under the lock.

    Returns rows applied, applied to another record, stale, and stale though the record was there.
    """
    counts = {"applied": 0, "misapplied": 0, "stale": 0, "falsely_stale": 0}
    batches: deque = deque()
    deadline = time.monotonic() + seconds
    at_last = deadline + PATIENCE
    # On a busy machine a second may be too short for the writers to come around.
    seen = ("applied", "stale") if conditional else ("misapplied",)
    while time.monotonic() < deadline or (
        time.monotonic() < at_last and not all(counts[name] for name in seen)
    ):
        batches.append(rb.sample())
        if len(batches) <= LATE:
            continue
        late = batches.popleft()
        applied, there = audited(rb, late, own_priority(late["id"]), conditional)
        counts["applied"] += int(applied.sum())
        counts["misapplied"] += int((applied & ~there).sum())
        counts["stale"] += int((~applied).sum())
        counts["falsely_stale"] += int((~applied & there).sum())
    return counts


def run_writers(method, make, populated, shares, seconds, conditional=True):
    rb = learner(make(SLOTS) if populated else make(SLOTS, shared_init=True))
    if populated:
        rb.extend(ids(range(SLOTS)))
    for _ in range(shares):
        rb.share()
    stop = multiprocessing.get_context(method).Event()
    with (
        child(method, write_until, rb, 10**9, stop),
        child(method, write_until, rb, 2 * 10**9, stop),
    ):
        try:
            deadline = time.monotonic() + 60
            while rb.write_count < SLOTS * 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            return learn(rb, seconds, conditional)
        finally:
            stop.set()


@pytest.mark.parametrize("shares", [0, 1, 2])
@pytest.mark.parametrize("populated", [True, False], ids=["populated", "shared_init"])
@pytest.mark.parametrize("make", [LazyMemmapStorage, LazyTensorStorage])
class TestEveryWayToShare:
    def check(self, method, make, populated, shares, seconds):
        if (method, make, populated, shares) == ("fork", LazyTensorStorage, True, 0):
            pytest.skip("refused: see test_records_in_private_memory_are_refused_after_a_fork")
        counts = run_writers(method, make, populated, shares, seconds)
        assert counts["applied"] > 0
        assert counts["stale"] > 0
        assert counts["misapplied"] == 0
        assert counts["falsely_stale"] == 0

    @pytest.mark.parametrize("method", METHODS)
    def test_two_writer_processes(self, method, make, populated, shares):
        self.check(method, make, populated, shares, seconds=0.3)

    @pytest.mark.stress
    @pytest.mark.parametrize("method", ["spawn", "fork"])
    def test_two_writer_processes_for_long(self, method, make, populated, shares):
        self.check(method, make, populated, shares, seconds=10)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_processes_put_priorities_on_other_records_with_update_priority(method):
    counts = run_writers(method, LazyMemmapStorage, True, 1, seconds=1, conditional=False)
    assert counts["misapplied"] > 0


class TestTorchRLsCollectors:
    def check(self, method, storage, seconds):
        script = Path(__file__).with_name("collect_and_learn.py")
        command = [sys.executable, "-W", "ignore", script, method, *storage.split(), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100 + seconds)
        assert done.returncode == 0, done.stderr
        counts = json.loads(done.stdout.splitlines()[-1])
        assert counts["applied"] > 0
        assert counts["stale"] > 0
        assert counts["misapplied"] == 0
        assert counts["falsely_stale"] == 0

    def test_two_collector_processes(self):
        self.check("fork", "tensor shared_init", seconds=1)

    @pytest.mark.stress
    @pytest.mark.parametrize("storage", ["memmap populated", "tensor shared_init"])
    @pytest.mark.parametrize("method", ["spawn", "fork"])
    def test_two_collector_processes_for_long(self, method, storage):
        self.check(method, storage, seconds=10)


# ------------------------------------------------------------------ a dead process stops nobody


def stop_at(owner, name, pipe):
    """Makes the process report and then stand still for ever where it calls ``owner.name``."""

    def stand_still(*args, **kwargs):
        pipe.send("here")
        time.sleep(600)

    setattr(owner, name, stand_still)


def die_between_stamps_and_data(rb, pipe):
    torch.set_num_threads(1)
    stop_at(rb.storage, "set", pipe)
    rb.extend(ids(range(100, 103)))


def die_in_the_first_write(rb, pipe):
    torch.set_num_threads(1)
    stop_at(rb.storage, "_init_coordinator", pipe)
    rb.extend(ids(range(100, 103)))


@contextlib.contextmanager
def killed_at(method, target, rb):
    """A process that was killed where ``target`` stops it."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(rb, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(60)
        assert ours.recv() == "here"
        assert rb._table.lock.acquire(timeout=0.1) is False  # it holds the lock
    finally:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    yield


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_a_writer_killed_between_stamps_and_data_leaves_the_lock_free_and_no_handle_alive(
    method, storage
):
    rb = learner(storage(CAPACITY), 8)
    rb.share()
    rb.extend(ids(range(8)))
    rb.sample()
    generation = rb.writer.generations_of(torch.arange(8))
    with killed_at(method, die_between_stamps_and_data, rb):
        assert rb._table.lock.acquire(timeout=1)
        rb._table.lock.release()
        result = rb.update_priority_if_present(
            index=torch.arange(8), generation=generation, priority=PRIORITY
        )
        assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
        rb.sample()
        with child(method, rewrite_three, rb):  # a fresh writer goes on where the dead one was
            pass
    assert rb[:]["id"].tolist()[3:] == [100, 101, 102, 6, 7] or rb[:]["id"].tolist()[:3] == [
        100,
        101,
        102,
    ]
    rb.sample()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_a_process_killed_in_the_storages_first_write_keeps_nobody_waiting(method, storage):
    rb = learner(storage(CAPACITY, shared_init=True), 8)
    with killed_at(method, die_in_the_first_write, rb):
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="first write, in another process, has not ended"):
            rb.sample()
        assert time.monotonic() - begun < 1
        with child(method, rewrite_three, rb):
            pass
    assert len(rb) == 3
    assert rb[:]["id"].tolist() == [100, 101, 102]
    assert rb.sample()["id"].min() >= 100
    assert leaves(rb) == [1, 1, 1, 0, 0, 0, 0, 0]
    rb.extend(ids(range(8)))
    assert len(rb) == 8


def kill_writers(kills):
    """Kills forked writers at random moments of extend() while the learner goes on."""
    generator = torch.Generator().manual_seed(0)
    rb = learner(LazyMemmapStorage(SLOTS))
    rb.extend(ids(range(SLOTS)))
    context = multiprocessing.get_context("fork")
    misapplied = applied = 0
    longest_wait = 0.0
    batches: deque = deque()
    for kill in range(kills):
        stop = context.Event()
        writer = context.Process(
            target=write_until, args=(rb, (kill + 1) * 10**6, stop), daemon=True
        )
        before = rb.write_count
        writer.start()
        deadline = time.monotonic() + 30
        while rb.write_count == before and time.monotonic() < deadline:
            pass  # until it writes
        time.sleep(float(torch.rand((), generator=generator)) * 0.004)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        begun = time.monotonic()
        batches.append(rb.sample())
        longest_wait = max(longest_wait, time.monotonic() - begun)
        if len(batches) > LATE:
            late = batches.popleft()
            with rb._table.lock:
                there = rb.storage[:]["id"][late["index"]] == late["id"]
                mask = rb.update_priority_if_present(
                    index=late["index"],
                    generation=late["index_generation"],
                    priority=own_priority(late["id"]),
                ).updated_mask
            misapplied += int((mask & ~there).sum())
            applied += int(mask.sum())
    with child("fork", rewrite_three, rb):
        pass
    assert misapplied == 0
    assert longest_wait < 1
    assert set(range(100, 103)) <= set(rb[:]["id"].tolist())


@pytest.mark.timeout(300)
def test_fifty_writers_killed_at_random_moments_stop_nobody():
    kill_writers(50)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_a_thousand_writers_killed_at_random_moments_stop_nobody():
    kill_writers(1000)


def first_records(rb):
    torch.set_num_threads(1)
    rb.extend(ids(range(8)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_a_checkpoint_has_the_records_that_only_another_process_has_touched(method, storage):
    rb = learner(storage(CAPACITY, shared_init=True), 8)
    with child(method, first_records, rb):
        pass
    held = rb.writer.generations_of(torch.arange(8))
    assert not rb.storage.initialized
    state = copy.deepcopy(rb.state_dict())
    with child(method, rewrite_three, rb):
        pass
    rb.load_state_dict(state)
    assert rb[:]["id"].tolist() == list(range(8))
    assert rb._table.is_live(torch.arange(8), held).all()


def test_another_buffers_write_begins_a_first_write_that_failed_anew():
    rb = learner(LazyMemmapStorage(CAPACITY, shared_init=True), 8)
    other = learner(rb.storage, 8)
    with killed_at("fork", die_in_the_first_write, rb):
        pass
    other.extend(ids([100]))
    rb.extend(ids([101]))
    assert len(rb) == 1 + 1  # rb's cursor began anew, too: slot 0 was overwritten, slot 1 is a gap
    assert rb.writer._cursor == 1
    assert rb[:]["id"].tolist()[0] == 101


def test_a_first_write_that_raises_claims_nothing(monkeypatch):
    rb = learner(LazyMemmapStorage(CAPACITY, shared_init=True), 8)

    def fail(data):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(rb.storage, "_init_coordinator", fail)
        with pytest.raises(OSError, match="disk full"):
            rb.extend(ids(range(3)))
    assert len(rb) == 0
    rb.extend(ids(range(2)))
    assert rb[:]["id"].tolist() == [0, 1]


@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_child_forked_while_threads_are_inside_of_the_buffer_writes_all_the_same(prefetch):
    rb = TensorDictPrioritizedReplayBuffer(
        **PER,
        storage=LazyMemmapStorage(CAPACITY),
        sync=False,
        batch_size=4,
        track_generations=True,
        prefetch=prefetch,
    )
    rb.extend(ids(range(8)))
    done = threading.Event()

    def sample():
        while not done.is_set():
            rb.sample()

    def hold_the_futures_lock():
        with rb._futures_lock:
            done.wait(60)

    threads = [Thread(sample)] if prefetch is None else [Thread(hold_the_futures_lock)]
    try:
        for _ in range(5):
            with child("fork", rewrite_three, rb):
                pass
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert rb.write_count == 8 + 15
    rb.shutdown()


# ------------------------------------------------------------------ what is refused


def report_refusal(use, pipe):
    try:
        use()
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send("not refused")


def refusal_in_fork(rb):
    """What a forked child is told when it uses the buffer."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with child("fork", report_refusal, lambda: rb.extend(ids(range(2))), theirs):
        return ours.recv() if ours.poll(30) else "no answer"


def test_records_in_private_memory_are_refused_after_a_fork():
    rb = learner(LazyTensorStorage(CAPACITY))
    rb.extend(ids(range(8)))
    assert "its records are in private memory (call share()" in refusal_in_fork(rb)
    rb.share()
    assert refusal_in_fork(rb) == "not refused"
    assert len(rb) == 8
    rb.extend(ids(range(3)))


def test_a_storage_without_records_is_refused_after_a_fork_unless_its_first_write_is_shared():
    rb = learner(LazyTensorStorage(CAPACITY))
    assert "it had no records yet at the fork" in refusal_in_fork(rb)
    shared = learner(LazyTensorStorage(CAPACITY, shared_init=True))
    assert refusal_in_fork(shared) == "not refused"
    assert len(shared) == 2


def test_a_synchronous_tree_is_refused_after_a_fork_and_when_it_is_sent():
    rb = td_buffer(storage=LazyMemmapStorage(CAPACITY))
    assert "a copy of the priorities (build the buffer with sync=False)" in refusal_in_fork(rb)
    with pytest.raises(RuntimeError, match="sync=False"):
        multiprocessing.get_context("spawn").Process(target=print, args=(rb,)).start()
    rb.extend(ids(range(2)))


def test_a_list_storage_is_refused_by_share_after_a_fork_and_when_it_is_sent():
    rb = td_buffer(storage=ListStorage(CAPACITY), sync=False)
    with pytest.raises(RuntimeError, match="a ListStorage can't be shared"):
        rb.share()
    assert "the counters of its ListStorage are in private memory" in refusal_in_fork(rb)
    with pytest.raises(RuntimeError, match="ListStorage"):
        multiprocessing.get_context("spawn").Process(target=print, args=(rb,)).start()
    rb.extend(ids(range(2)))


def test_a_buffer_whose_lock_the_sender_holds_is_refused():
    rb = learner(LazyMemmapStorage(CAPACITY))
    rb.extend(ids(range(8)))
    with rb._table.lock:
        with pytest.raises(RuntimeError, match="by a thread that holds its lock"):
            multiprocessing.get_context("spawn").Process(target=print, args=(rb,)).start()
        assert "forked while its lock was held" in refusal_in_fork(rb)
    assert refusal_in_fork(rb) == "not refused"


def test_a_queue_a_pipe_and_a_pool_are_refused_and_a_closed_pool_says_so():
    rb = learner(LazyMemmapStorage(CAPACITY))
    rb.extend(ids(range(8)))
    context = multiprocessing.get_context("fork")
    with pytest.raises(RuntimeError, match="through a queue, pipe or pool"):
        context.Pipe()[0].send(rb)
    with context.Pool(1) as pool:
        with pytest.raises(RuntimeError, match="through a queue, pipe or pool"):
            pool.apply(print, (rb,))
        pool.close()
        with pytest.raises(ValueError, match="Pool not running"):
            pool.apply(print, (rb,))
        pool.join()
    rb.extend(ids(range(2)))
    assert rb.sample()["index_generation"].max() <= 1


def test_a_mount_that_is_too_small_is_refused_and_nothing_is_half_made(monkeypatch):
    rb = learner(LazyTensorStorage(CAPACITY))
    rb.extend(ids(range(8)))
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 5, 5, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(
        RuntimeError, match="needs 64 bytes in /dev/shm for the counters: 0 are free"
    ):
        rb.share()
    assert not stamps(rb).is_shared()
    assert not rb.storage._storage.is_shared()
    assert rb.shared is False
    with pytest.raises(RuntimeError, match="for the counters"):
        multiprocessing.get_context("spawn").Process(target=print, args=(rb,)).start()
    assert "the counters of its LazyTensorStorage are in private" in refusal_in_fork(rb)
    monkeypatch.undo()
    rb.share()
    assert refusal_in_fork(rb) == "not refused"


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5])
def test_a_fork_that_fails_to_share_changes_nothing_tells_the_child_and_is_tried_again(
    monkeypatch, failing
):
    """The moves are: the storage's cells, the table's, its log's, the writer's; then the stamps."""
    rb = learner(LazyMemmapStorage(CAPACITY), 8)
    rb.extend(ids(range(8)))
    share_memory_ = torch.Tensor.share_memory_
    calls = []

    def fail(tensor):
        calls.append(tensor)
        if len(calls) == failing:
            raise RuntimeError("unable to open shared memory: too many open files")
        return share_memory_(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "share_memory_", fail)
        assert "too many open files" in refusal_in_fork(rb)
    assert len(calls) == failing
    assert not stamps(rb).is_shared()
    assert not rb._table.lock.is_engaged
    rb.sample()
    generation = rb.writer.generations_of(torch.arange(8))
    with child("fork", rewrite_three, rb):
        pass
    assert_only_the_first_three_are_stale(rb, generation)
    assert rb.write_count == 11


def test_a_share_without_room_for_the_records_moves_no_counters_and_later_writes_go_on(monkeypatch):
    rb = learner(LazyTensorStorage(CAPACITY))
    rb.extend(ids(range(8)))
    room = os.statvfs_result((1, 1, 100, 0, 100, 10, 5, 5, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    with pytest.raises(RuntimeError, match=r"needs \d+ bytes in /dev/shm for the records: 36 are"):
        rb.share()
    assert not stamps(rb).is_shared()
    assert not rb.storage._storage.is_shared()
    rb.extend(ids(range(3)))
    assert stamps(rb).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_plain_tensor_records_can_be_forked_and_say_why_they_cannot_be_sent():
    rb = buffer(storage=LazyMemmapStorage(CAPACITY), sync=False)
    with pytest.raises(RuntimeError, match="no storage of plain tensors"):
        multiprocessing.get_context("spawn").Process(target=print, args=(rb,)).start()
    held = rb.writer.generations_of(torch.arange(8))
    with child("fork", lambda: rb.extend(torch.arange(3))):
        pass
    assert rb._table.is_live(torch.arange(8), held).tolist() == [False] * 3 + [True] * 5


def test_a_synchronous_buffer_on_a_storage_that_other_processes_use_is_refused():
    rb = learner(LazyMemmapStorage(CAPACITY))
    rb.extend(ids(range(8)))
    assert refusal_in_fork(rb) == "not refused"
    with pytest.raises(RuntimeError, match="Build the buffer with sync=False"):
        td_buffer(0, storage=rb.storage)
    assert rb.storage._attached_entities == [rb]
    learner(rb.storage)


def test_a_forked_childs_update_and_sample_are_refused_as_the_priorities_are_the_learners():
    rb = learner(LazyMemmapStorage(CAPACITY), 4)
    rb.extend(ids(range(8)))
    context = multiprocessing.get_context("fork")
    for use in (
        lambda: rb.update_priority_if_present(index=[0], generation=[0], priority=9.0),
        rb.sample,
    ):
        ours, theirs = context.Pipe()
        with child("fork", report_refusal, use, theirs):
            assert ours.poll(30)
            message = ours.recv()
        assert "private to the learner" in message or "worker process" in message
    assert leaves(rb) == [0] * 8  # the learner has not looked yet
    rb.sample()
    assert leaves(rb) == [1] * 8


def test_a_writer_that_stamps_after_the_data_is_refused():
    """Killed between the two it would leave an old handle live on the new record."""
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(CAPACITY), track_generations=True)
    rb.extend(ids(range(8)))
    beside = torchrl.data.TensorDictReplayBuffer(
        storage=rb.storage,
        writer=torchrl.data.TensorDictRoundRobinWriter(track_generations=True),
    )
    assert beside.storage is rb.storage
    match = "TorchRL's TensorDictRoundRobinWriter stamps after the data"
    with pytest.raises(RuntimeError, match=match):
        rb.share()
    with pytest.raises(RuntimeError, match=match):
        multiprocessing.get_context("spawn").Process(target=print, args=(rb,)).start()
    assert match in refusal_in_fork(rb)
    index, generation = rb.extend(ids(range(2)), return_generation=True)
    assert rb._table.is_live(index, generation).all()  # here it goes on


def test_a_buffer_inside_of_a_cloudpickled_object_is_refused():
    rb = learner(LazyTensorStorage(CAPACITY))
    rb.extend(ids(range(8)))
    job = CloudpickleWrapper(lambda: rb.extend(ids([1])))
    with pytest.raises(RuntimeError, match="inside of a cloudpickled object"):
        multiprocessing.get_context("spawn").Process(target=print, args=(job,)).start()
    rb.extend(ids(range(2)))


def test_a_prefetching_buffer_is_refused_when_it_is_sent():
    rb = td_buffer(storage=LazyMemmapStorage(CAPACITY), sync=False, prefetch=2, batch_size=4)
    with pytest.raises(RuntimeError, match="Build it with prefetch=None"):
        multiprocessing.get_context("spawn").Process(target=print, args=(rb,)).start()
    rb.sample()
    rb.shutdown()


def test_another_sharing_strategy_than_before_is_refused_and_moves_no_memory():
    rb = learner(LazyTensorStorage(CAPACITY), 8)
    rb.extend(ids(range(8)))
    rb.share()
    usual = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        with pytest.raises(RuntimeError, match="under the sharing strategy"):
            multiprocessing.get_context("spawn").Process(target=print, args=(rb,)).start()
    finally:
        torch.multiprocessing.set_sharing_strategy(usual)
    assert len(rb) == 8
    with child("spawn", rewrite_three, rb):
        pass
    assert rb[:]["id"].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]


def test_a_restore_in_another_process_makes_what_this_one_remembers_of_its_own_void():
    rb = td_buffer()
    state = copy.deepcopy(rb.state_dict())
    rb.load_state_dict(state)
    held = rb._table.of(range(8))
    rb._table.counters.base += 10**6  # another process restored, and its base is shared
    rb._table.stamps.add_(1)  # to stamps of its own branch
    assert rb._table.of(range(8)).tolist() == (held + 1).tolist()
