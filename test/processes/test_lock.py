from __future__ import annotations

import contextlib
import copy
import ctypes
import dis
import errno
import fcntl
import gc
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading

import pytest
import torch
from common import Thread, buffer
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.generations import ReplayBuffer, SlotGenerations
from torchrl.data.replay_buffers.generations.processes import file_half, forks
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
            assert free_for_a_thread(other)


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
    monkeypatch.setattr(forks, "FORK_PATIENCE", 0.2)
    lock = guarding()
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


def guarding(prepare=lambda: None, refusal=lambda: None):
    """A lock that guards something, as a fork lets no other join the process half."""
    lock = StorageLock()
    lock.guard(prepare, refusal)
    return lock


@pytest.fixture
def engaged():
    """A lock whose process half has joined."""
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


def test_a_holder_that_is_killed_lets_go(engaged):
    ours, theirs = multiprocessing.Pipe()
    with forked(hold_until_told, engaged, theirs) as process:
        assert ours.recv() == "held"
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
    assert engaged.acquire(timeout=1)
    engaged.release()


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
        second = file_half.FileHalf(os.dup(lock._process._fd))
        if held:
            lock.acquire()
        assert lock_module._arrive(lock.order, second) is lock
        assert second.close.alive is held  # closing it would drop a lock that is held
        ours.send("try")
        assert ours.poll(20)
        assert ours.recv() is not held
    if held:
        lock.release()


def test_no_descriptor_stays_open_when_locks_go():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(50):
        StorageLock().engage()
    gc.collect()
    assert descriptors() <= before


def test_a_fork_that_finds_no_room_for_a_lock_file_tells_the_child_so(monkeypatch):
    lock = guarding()

    def full(**kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_half.tempfile, "mkstemp", full)
    ours, theirs = multiprocessing.Pipe()

    def child():
        try:
            lock.acquire()
        except RuntimeError as error:
            theirs.send(str(error))

    with forked(child):
        assert ours.poll(20)
        assert "No space left on device" in ours.recv()
    monkeypatch.undo()
    with forked(hold_until_told, lock, theirs):  # the next fork tries it again
        assert ours.poll(20)
        assert ours.recv() == "held"
        assert lock.acquire(block=False) is False


def test_a_view_of_cells_that_move_into_shared_memory_stays_readable():
    cells = Cells([5, 7])
    before = cells.view
    cells.share()
    cells.view[0] = 6
    assert list(before) == [5, 7]
    assert list(cells.view) == [6, 7]


@pytest.mark.parametrize("joined", [False, True])
def test_a_child_forked_inside_of_a_block_leaves_it_in_peace_and_is_refused_after_it(joined):
    lock = guarding()
    if joined:
        lock.engage()
    ours, theirs = multiprocessing.Pipe()
    pid = None
    try:
        with lock:
            pid = os.fork()
        if pid == 0:
            lock.acquire()
    except RuntimeError as error:
        theirs.send(str(error))
    finally:
        if pid == 0:
            os._exit(0)
    assert ours.poll(20)
    assert "forked while its lock was held" in ours.recv()
    os.waitpid(pid, 0)
    assert free_for_a_thread(lock)


def test_a_platform_without_fcntl_is_refused_by_engage(monkeypatch):
    monkeypatch.setattr(file_half, "fcntl", None)
    lock = StorageLock()
    with pytest.raises(RuntimeError, match="has the fcntl module: this platform has none"):
        lock.engage()
    assert not lock.is_engaged
    with lock:
        pass


def test_a_fork_readies_the_other_locks_when_one_cannot_be(engaged):
    def half_built():
        raise AttributeError("no counters yet")

    broken, whole = guarding(half_built), guarding()
    forks._before_fork()
    assert not broken.is_engaged
    assert "no counters yet" in broken._failure
    assert whole.is_engaged


def test_a_lock_that_guards_nothing_yet_waits_for_a_later_fork():
    prepared = []
    lock = StorageLock()
    forks._before_fork()
    assert not lock.is_engaged
    lock.guard(lambda: prepared.append(1), lambda: None)
    forks._before_fork()
    assert lock.is_engaged
    assert prepared == [1]


def test_the_process_half_waits_for_a_block_that_began_without_it():
    lock = guarding()
    inside, go = threading.Event(), threading.Event()

    def hold():
        with lock:
            inside.set()
            assert go.wait(20)
            with lock:
                return lock.is_engaged

    holder = Thread(hold)
    assert inside.wait(20)
    entered, leave = threading.Event(), threading.Event()

    def wait():
        with lock:
            entered.set()
            assert leave.wait(20)

    waiter = Thread(wait)
    while sys.getrefcount(lock._bare_enter) == lock_module._UNUSED:
        pass  # until it waits for the thread half
    engager = Thread(lock.engage)
    while type(lock) is StorageLock:
        pass
    assert not lock.is_engaged
    go.set()
    assert holder.join() is False
    assert entered.wait(20)
    engager.join_briefly(0.1)
    assert not lock.is_engaged  # the waiter is inside, and has not asked the kernel
    leave.set()
    waiter.join()
    engager.join()
    assert lock.is_engaged


def test_engage_is_refused_to_a_thread_that_holds_the_lock():
    lock = StorageLock()
    with lock, pytest.raises(RuntimeError, match="does not hold"):
        lock.engage()
    lock.engage()


@pytest.mark.parametrize("joined", [False, True])
def test_exit_stacks_and_timed_blocks_hold_it_once(joined):
    lock = StorageLock()
    if joined:
        lock.engage()
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock)
        with lock.within(0) as taken:
            assert taken
        assert Thread(lambda: lock.acquire(False)).join() is False

        def within():
            with lock.within(0.01) as taken:
                return taken

        assert Thread(within).join() is False
        assert lock.is_held()
    assert not lock.is_held()
    assert free_for_a_thread(lock)


# ------------------------------------------------------------------ exceptions from outside


class FromOutside(BaseException):
    pass


def free_for_a_thread(lock):
    def take():
        with lock.within(5) as taken:
            return taken

    return Thread(take).join()


def at_moment(moment, action, run):
    """Calls ``action`` at one of the moments when Python may deliver an exception to the lock.

    These are the entry of its functions, and the instruction after each call. Returns whether
    ``run`` had so many of them.
    """
    left = [moment]
    last = {}

    def step():
        left[0] -= 1
        if left[0] == -1:
            action()

    def trace(frame, event, arg):
        if os.path.basename(frame.f_code.co_filename) not in ("lock.py", "file_half.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            step()
        if event == "opcode":  # by id: to keep a frame is to keep what it refers to
            if last.pop(id(frame), "").startswith("CALL"):
                step()
            last[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if event == "return":
            last.pop(id(frame), None)
        return trace

    sys.settrace(trace)
    try:
        run()
    except FromOutside:
        pass
    finally:
        sys.settrace(None)
    return left[0] < 0


def raise_from_outside():
    raise FromOutside


def in_a_block(lock):
    with lock:
        pass


def in_nested_blocks(lock):
    with lock, lock:
        pass


def in_a_timed_block(lock):
    with lock.within(5) as taken:
        assert taken


def take_when_asked(lock, pipe):
    while pipe.recv():
        with lock.within(2) as taken:
            pipe.send(taken)


@contextlib.contextmanager
def another_process(lock):
    """Gives a function that tells whether another process can take the lock."""
    ours, theirs = multiprocessing.Pipe()

    def can_take():
        ours.send(True)
        assert ours.poll(20)
        return ours.recv()

    with forked(take_when_asked, lock, theirs) as process:
        yield can_take
        ours.send(False)
        process.join(20)


@pytest.mark.parametrize("handler_takes_it", [False, True])
@pytest.mark.parametrize("use", [in_a_block, in_nested_blocks, in_a_timed_block])
def test_an_exception_at_any_moment_leaves_no_hold_behind(use, handler_takes_it, engaged):
    def handler():
        if handler_takes_it:
            with engaged:
                pass
        raise FromOutside

    moment = 0
    with another_process(engaged) as can_take:
        while at_moment(moment, handler, lambda: use(engaged)):
            assert not engaged.is_held(), moment
            assert can_take(), moment
            assert free_for_a_thread(engaged), moment
            moment += 1
    assert moment > 20


def test_a_block_of_a_lock_without_its_process_half_has_no_such_moment():
    lock = StorageLock()
    assert not at_moment(0, raise_from_outside, lambda: in_nested_blocks(lock))


def test_a_handler_that_takes_the_lock_at_any_moment_leaves_the_outer_hold_whole(engaged):
    ours, theirs = multiprocessing.Pipe()
    moment = 0

    def handler():
        with engaged:
            seen.append(not kernel_gives_it(ours))

    def outer():
        with engaged:
            seen.append(not kernel_gives_it(ours))

    with forked(try_the_kernel_when_asked, engaged, theirs):
        while True:
            seen = []
            more = at_moment(moment, handler, outer)
            assert seen == [True] * (2 if more else 1), moment
            assert kernel_gives_it(ours), moment
            if not more:
                break
            moment += 1
    assert moment > 10


def try_the_kernel_when_asked(lock, pipe):
    while pipe.recv():
        taken = lock.acquire(block=False)
        if taken:
            lock.release()
        pipe.send(taken)


def kernel_gives_it(pipe):
    pipe.send(True)
    assert pipe.poll(20)
    return pipe.recv()


# ------------------------------------------------------------------ a storm of them


class PythonLock:
    """The control: the same lock with an enter and an exit in Python."""

    def __init__(self):
        self._lock = threading.RLock()
        self.is_held = self._lock._is_owned
        self.release = self._lock.release

    def __enter__(self):
        self._lock.acquire()
        return True

    def __exit__(self, *exception):
        self._lock.release()


def by_signal(thread):
    signal.pthread_kill(thread, signal.SIGUSR1)


def by_async_exception(thread):
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(FromOutside)
    )


@contextlib.contextmanager
def quick_switches():
    def handler(number, frame):
        raise FromOutside

    interval, former = sys.getswitchinterval(), signal.signal(signal.SIGUSR1, handler)
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGUSR1, former)


def leaks_of(lock, send, interrupts):
    """How many of so many exceptions, sent to this thread in its blocks, leave a hold behind."""
    victim = threading.get_ident()
    ready, done = threading.Event(), threading.Event()
    random_ = random.Random(0)

    def storm():
        while not done.is_set():
            if ready.wait(1) and not done.is_set():
                for _ in range(random_.randrange(30)):
                    pass
                ready.clear()
                send(victim)

    sender = Thread(storm)
    leaks = 0
    for _ in range(interrupts):
        try:
            ready.set()
            while True:
                with lock:
                    pass
                with lock, lock:
                    pass
        except FromOutside:
            pass
        if lock.is_held():
            leaks += 1
            while lock.is_held():
                lock.release()
    done.set()
    ready.set()
    sender.join()
    return leaks


def storm(lock, kind, interrupts):
    with quick_switches():
        if kind == "signal":
            return leaks_of(lock, by_signal, interrupts)
        return Thread(lambda: leaks_of(lock, by_async_exception, interrupts)).join(600)


KINDS = ["signal", "async_exception"]


@pytest.mark.stress
@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("joined", [False, True])
def test_ten_thousand_interrupts_leave_no_hold_behind(kind, joined):
    lock = StorageLock()
    if joined:
        lock.engage()
    with contextlib.ExitStack() as stack:
        can_take = stack.enter_context(another_process(lock)) if joined else (lambda: True)
        assert storm(lock, kind, 10_000) == 0
        assert free_for_a_thread(lock)
        assert can_take()


@pytest.mark.stress
@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_storm_makes_a_lock_in_python_leak(kind):
    assert storm(PythonLock(), kind, 10_000) > 0


def test_its_private_names_are_there():
    """A new Python that drops one must fail here first."""
    lock = threading.RLock()
    assert lock._is_owned() is False
    with lock:
        assert lock._is_owned() is True
