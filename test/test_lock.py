from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import gc
import multiprocessing
import os
import pickle
import signal
import threading

import pytest
import torch
from common import Thread, buffer
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.generations import ReplayBuffer, SlotGenerations
from torchrl.data.replay_buffers.generations.processes import lock as lock_module
from torchrl.data.replay_buffers.generations.processes.cells import Cells
from torchrl.data.replay_buffers.generations.processes.lock import StorageLock


def test_it_is_reentrant_and_excludes_other_threads():
    lock = StorageLock()
    with lock, lock:
        assert Thread(lambda: lock.acquire(block=False)).join() is False
        assert Thread(lambda: lock.acquire(timeout=0.01)).join() is False
        assert Thread(lambda: lock.acquire(timeout=-1)).join() is False
    assert Thread(lambda: (lock.acquire(timeout=0.01), lock.release())[0]).join() is True


def test_a_waiter_gets_it_when_the_last_hold_is_released():
    lock = StorageLock()
    lock.acquire()
    lock.acquire()
    waiting = Thread(lambda: (lock.acquire(), lock.release())[0])
    lock.release()
    assert waiting.is_alive()
    lock.release()
    assert waiting.join() is True


def test_releasing_a_lock_that_is_not_held_is_an_error():
    with pytest.raises(RuntimeError):
        StorageLock().release()


def test_a_copy_has_a_lock_of_its_own():
    lock = StorageLock()
    for other in (copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
        assert other.order != lock.order
        with lock:
            assert Thread(lambda other=other: other.acquire(block=False)).join() is True


@pytest.mark.parametrize("shares", [0, 1, 2])
def test_every_buffer_on_a_storage_has_its_one_lock_however_often_it_is_shared(shares):
    storage = LazyTensorStorage(8)
    tracking = buffer(storage=storage)
    plain = ReplayBuffer(storage=storage)
    for _ in range(shares):
        tracking.share()
        plain.share()
    lock = SlotGenerations.attach(storage).lock
    assert tracking._write_lock is lock
    assert plain._write_lock is lock
    tracking.share(False)
    assert tracking._write_lock is lock


def test_a_buffer_made_before_the_table_takes_its_lock_too():
    storage = LazyTensorStorage(8)
    plain = ReplayBuffer(storage=storage)
    assert plain._table is None
    tracking = buffer(storage=storage)
    assert plain._write_lock is tracking._write_lock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_refused_at_its_first_use():
    rb = buffer()

    def child(pipe):
        for use in (lambda: rb.add(torch.tensor(1)), lambda: rb.sample(2), rb.empty):
            try:
                use()
            except RuntimeError as error:
                pipe.send(str(error))
            else:
                pipe.send("not refused")

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    try:
        messages = [ours.recv() if ours.poll(20) else "no answer" for _ in range(3)]
    finally:
        process.join(20)
    assert process.exitcode == 0
    assert all("forked process" in message for message in messages), messages
    rb.add(torch.tensor(1))  # the parent's lock is as it was


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_the_lock_is_held_ends_normally(monkeypatch):
    monkeypatch.setattr(lock_module, "FORK_PATIENCE", 0.2)
    lock = StorageLock()
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(20)

    holder = Thread(hold)
    held.wait(20)
    process = multiprocessing.get_context("fork").Process(target=_must_be_refused, args=(lock,))
    process.start()
    process.join(20)
    done.set()
    holder.join()
    assert process.exitcode == 0


def _must_be_refused(lock):
    with pytest.raises(RuntimeError, match="forked process"):
        lock.acquire(timeout=5)


# ------------------------------------------------------------------ the process half

HALVES = ["file", "semaphore"]


@pytest.fixture(params=HALVES)
def engaged(request, monkeypatch):
    """A lock whose process half has joined; ``semaphore`` is that of a platform without fcntl."""
    if request.param == "semaphore":
        monkeypatch.setattr(lock_module, "fcntl", None)
        monkeypatch.setattr(lock_module, "HOLDER_PATIENCE", 0.05)
    lock = StorageLock()
    lock.engage()
    return lock


@contextlib.contextmanager
def forked(target, *args):
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(20)


def hold_until_told(lock, pipe):
    with lock, lock:
        pipe.send("held")
        pipe.recv()
    pipe.send("released")
    pipe.recv()


def test_a_process_that_holds_it_keeps_the_others_out(engaged):
    ours, theirs = multiprocessing.Pipe()
    with forked(hold_until_told, engaged, theirs):
        assert ours.poll(20)
        assert ours.recv() == "held"
        assert engaged.acquire(block=False) is False
        assert engaged.acquire(timeout=0.05) is False
        waiting = Thread(lambda: (engaged.acquire(), engaged.release())[0])
        ours.send("release it")
        assert ours.recv() == "released"
        assert waiting.join() is True
        with engaged, engaged:
            pass


def test_it_counts_right_with_two_processes_and_two_threads_each(engaged):
    total = torch.zeros(1, dtype=torch.int64).share_memory_()

    def count():
        for _ in range(500):
            with engaged:
                before = int(total[0])
                with engaged:
                    total[0] = before + 1

    def two_threads():
        for thread in [threading.Thread(target=count) for _ in range(2)]:
            thread.start()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()

    with forked(two_threads) as process:
        threads = [Thread(count), Thread(count)]
        for thread in threads:
            thread.join(60)
        process.join(60)
        assert process.exitcode == 0
    assert int(total[0]) == 2000


def test_a_holder_that_is_killed_lets_go_or_is_named(engaged):
    ours, theirs = multiprocessing.Pipe()
    with forked(hold_until_told, engaged, theirs) as process:
        assert ours.recv() == "held"
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
    if isinstance(engaged._process, lock_module.FileHalf):
        assert engaged.acquire(timeout=1)
        engaged.release()
    else:
        with pytest.raises(
            RuntimeError, match=f"Process {process.pid} died while it held the lock"
        ):
            engaged.acquire()
        assert engaged._depth == 0
        free = Thread(lambda: (engaged._thread.acquire(False), engaged._thread.release())[0])
        assert free.join() is True  # no hold is left


def test_a_deadlock_that_only_the_kernel_sees_is_tried_again(monkeypatch):
    lock = StorageLock()
    lock.engage()
    real, seen = fcntl.lockf, []

    def suspicious(fd, operation, *args):
        if operation & fcntl.LOCK_EX and len(seen) < 3:
            seen.append(operation)
            raise OSError(errno.EDEADLK, "Resource deadlock avoided")
        return real(fd, operation, *args)

    monkeypatch.setattr(fcntl, "lockf", suspicious)
    assert lock.acquire()
    lock.release()
    assert len(seen) == 3


def test_another_failure_of_the_kernel_is_no_hold(monkeypatch):
    lock = StorageLock()
    lock.engage()

    def broken(fd, operation, *args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", broken)
    with pytest.raises(OSError, match="No locks"):
        lock.acquire()
    monkeypatch.undo()
    assert Thread(lambda: (lock.acquire(timeout=1), lock.release())[0]).join() is True


def try_when_told(lock, pipe):
    pipe.recv()
    pipe.send(lock.acquire(timeout=0.1))


@pytest.mark.parametrize("held", [False, True])
def test_a_lock_that_arrives_again_is_the_one_that_is_here(held):
    lock = StorageLock()
    lock.engage()
    ours, theirs = multiprocessing.Pipe()
    with forked(try_when_told, lock, theirs):
        second = lock_module.FileHalf(os.dup(lock._process._fd))
        if held:
            lock.acquire()
        assert lock_module._arrive(lock.order, second) is lock
        assert second.close.alive is held  # closing it would drop a lock that is held
        ours.send("try")
        assert ours.poll(20)
        assert ours.recv() is not held


def test_no_descriptor_stays_open_when_locks_go():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(50):
        StorageLock().engage()
    gc.collect()
    assert descriptors() <= before


def test_a_lock_that_goes_during_a_fork_leaves_the_others_free():
    going, staying = StorageLock(), StorageLock()
    lock_module._before_fork()
    assert Thread(lambda: staying.acquire(timeout=0.01)).join() is False
    del going
    gc.collect()
    lock_module._after_fork_in_parent()
    assert lock_module._taken_for_fork == []
    assert Thread(lambda: (staying.acquire(timeout=1), staying.release())[0]).join() is True
    forking = lock_module._forking
    assert Thread(lambda: (forking.acquire(timeout=1), forking.release())[0]).join() is True


def test_a_fork_that_finds_no_room_for_a_lock_file_tells_the_child_so(monkeypatch):
    lock = StorageLock()

    def full(**kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock_module.tempfile, "mkstemp", full)
    ours, theirs = multiprocessing.Pipe()

    def child():
        try:
            lock.acquire()
        except RuntimeError as error:
            theirs.send(str(error))

    with forked(child):
        assert ours.poll(20)
        assert "No space left on device" in ours.recv()
    with lock:
        pass


def test_a_semaphore_whose_holder_ended_and_was_not_waited_for_is_not_believed(monkeypatch):
    monkeypatch.setattr(lock_module, "fcntl", None)
    monkeypatch.setattr(lock_module, "HOLDER_PATIENCE", 0.05)
    lock = StorageLock()
    lock.engage()
    ours, theirs = multiprocessing.Pipe()
    with forked(hold_until_told, lock, theirs) as process:
        assert ours.recv() == "held"
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"Process {process.pid} died"):
            lock.acquire()


def test_a_semaphore_whose_holder_left_no_name_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(lock_module, "fcntl", None)
    monkeypatch.setattr(lock_module, "HOLDER_PATIENCE", 0.05)
    monkeypatch.setattr(lock_module, "NAMELESS_PATIENCE", 0.2)
    lock = StorageLock()
    lock.engage()
    lock._process._semaphore.acquire()  # and dies before it can say so
    with pytest.raises(RuntimeError, match="Process unknown died"):
        lock.acquire()


def test_a_view_of_cells_that_move_into_shared_memory_stays_readable():
    cells = Cells([5, 7])
    before = cells.view
    cells.share()
    cells.view[0] = 6
    assert list(before) == [5, 7]
    assert list(cells.view) == [6, 7]


def test_its_private_names_are_there():
    """A new Python that drops one must fail here first."""
    lock = threading.RLock()
    assert lock._is_owned() is False
    with lock:
        assert lock._is_owned() is True
