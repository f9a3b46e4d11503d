"""The lock of a generation table: one per storage, for every buffer, thread and process on it.

Comparing stamps and writing priorities is one step only if every writer of the storage takes the
same lock. TorchRL gives each *buffer* a lock of its own, so two buffers on one storage exclude
nobody; this lock belongs to the storage instead.

It has two halves behind one interface. The thread half is a reentrant thread lock. The process half
joins it when the process first forks, or first sends the lock to a process that it spawns; one that
never does pays nothing for it. Where there is ``fcntl``, the process half is a record lock on an
unlinked file: the kernel releases it when its holder dies, wherever that was.

Record locks belong to a process and die with *any* descriptor of the file that it closes. So there
is one descriptor per lock and process, and one lock object: a lock that arrives a second time is
the one that is here already. ``flock`` would not do, since a forked child shares its parent's hold,
and a semaphore dies locked.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from types import TracebackType
from typing import Any
from uuid import uuid4

import torch.multiprocessing

from .cells import Cells

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# How long a fork waits, in all, for other threads to leave critical sections.
FORK_PATIENCE = 10.0
# How long a process waits for a semaphore before it looks whether its holder still lives, and how
# long it believes in a holder that has not left its name.
HOLDER_PATIENCE = 0.5
NAMELESS_PATIENCE = 30.0
POLL = 0.001

_by_order: weakref.WeakValueDictionary[int, StorageLock] = weakref.WeakValueDictionary()


class StorageLock:
    """Reentrant lock for threads and processes; interface of :class:`multiprocessing.Lock`.

    Owned by one :class:`~torchrl.data.replay_buffers.generations.SlotGenerations` table. It guards
    the stamps, the records of the storage, and the priority tree of every buffer on that storage.

    It stands in both places where TorchRL's buffers take a lock, ``_replay_lock`` and
    ``_write_lock``; so a thread that holds it may call the buffer.

    Lock order: a buffer's ``_futures_lock``, then table locks by ascending :attr:`order`. Never
    wait for a future while holding a table's lock, as ``sample`` of a prefetching buffer does: the
    future needs it to finish.

    Attributes:
        order (int): random id of the lock, the same in every process. Code that needs several
            tables at once takes their locks by ascending ``order``.

    Examples:
        >>> lock = StorageLock()
        >>> with lock, lock:  # reentrant
        ...     pass
        >>> lock.acquire(timeout=0.1)
        True
        >>> lock.release()
    """

    def __init__(self) -> None:
        self.order: int = uuid4().int
        self._prepare: Callable[[], None] = _nothing
        self._refusal: Callable[[], str | None] = _nothing
        self._process: FileHalf | SemaphoreHalf | None = None
        self._spare: list[FileHalf] = []
        self._failure: str | None = None  # why the process half could not join at a fork
        self._reset_thread_half()
        _by_order[self.order] = self

    def guard(self, prepare: Callable[[], None], refusal: Callable[[], str | None]) -> None:
        """Tells the lock what it guards.

        Args:
            prepare (Callable[[], None]): called under the lock before the process half joins, to
                move what the lock guards into shared memory.
            refusal (Callable[[], str | None]): called in a forked child at its first use of the
                lock. A string says why the child may not use what the lock guards.
        """
        self._prepare = prepare
        self._refusal = refusal

    def _reset_thread_half(self) -> None:
        self._thread = threading.RLock()
        self._depth = 0  # holds of the thread that has it, guarded by the thread half
        self._unasked = False  # a forked child that has not asked yet whether it may
        self._inherited = 0  # holds that the forking thread had, in the child

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Takes the lock; returns whether it was taken.

        Args:
            block (bool): if False, returns at once. Defaults to True.
            timeout (float, optional): seconds to wait at most; negative counts as 0. ``None`` waits
                for ever. Without effect if ``block`` is False.

        Raises:
            RuntimeError: in a forked child that may not use what the lock guards; without
                ``fcntl``, if the process that holds it has died.
        """
        if not block:
            timeout = 0.0
        if timeout is None:
            self._thread.acquire()
            deadline = None
        else:
            timeout = max(timeout, 0.0)
            deadline = time.monotonic() + timeout
            if not self._thread.acquire(True, timeout):
                return False
        try:
            if self._unasked:
                self._ask()
            if self._process is None or self._depth or self._process.acquire(deadline):
                self._depth += 1
                return True
        except BaseException:
            self._thread.release()
            raise
        self._thread.release()
        return False

    def release(self) -> None:
        """Gives the lock back.

        Raises:
            RuntimeError: if the calling thread does not hold it.
        """
        if self._inherited:  # leaving a ``with`` block that was entered before the fork
            self._inherited -= 1
            return
        if not self.is_held():
            raise RuntimeError("release() needs a lock that this thread holds.")
        self._depth -= 1
        if not self._depth and self._process is not None:
            self._process.release()
        self._thread.release()

    @property
    def is_engaged(self) -> bool:
        """Whether the process half has joined, so that other processes may hold the lock."""
        return self._process is not None

    def is_held(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._thread._is_owned()  # type: ignore[attr-defined]

    def __enter__(self) -> bool:
        self._thread.acquire()
        # The short way in: a write enters half a dozen times, and most processes have no child.
        if self._depth or (self._process is None and not self._unasked):
            self._depth += 1
            return True
        self._thread.release()
        return self.acquire()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The short way out, where no process half is to be given back.
        short = self._depth > 1 or (self._depth == 1 and self._process is None)
        if short and not self._inherited:  # a with block: this thread holds it
            self._depth -= 1
            self._thread.release()
        else:
            self.release()

    # ------------------------------------------------------------------ the process half

    def engage(self) -> None:
        """Lets the process half join; nothing if it has.

        Raises:
            RuntimeError: if what the lock guards cannot be shared. Nothing has changed then.
        """
        with self:
            if self._process is None:
                self._prepare()
                process = FileHalf() if fcntl is not None else SemaphoreHalf()
                process.acquire(None)  # this thread holds the lock
                self._process = process

    def _ask(self) -> None:
        if self._inherited:
            raise RuntimeError(
                "A storage with generation tracking was used in a process that was forked while "
                "its lock was held. Start processes outside of the lock."
            )
        reason = self._refusal()
        if self._process is None:
            reason = reason or self._failure or "another thread held its lock for long at the fork"
        if reason is not None:
            raise RuntimeError(
                f"A storage with generation tracking can't be used in a forked process: {reason}."
            )
        self._unasked = False

    def _reduce_for_child(self) -> tuple[Any, ...]:
        """How a spawned process gets this very lock."""
        if self.is_held():
            raise RuntimeError(
                "A buffer can't be sent to another process by a thread that holds its lock. "
                "Release it first."
            )
        self.engage()
        return _arrive, (self.order, self._process)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "A buffer with generation tracking can't be sent to another process inside of a "
                "cloudpickled object, which would copy it. Pass it to the Process as an argument."
            )
        return StorageLock, ()  # a copy of a storage is independent: it gets a lock of its own

    def __repr__(self) -> str:
        return f"{type(self).__name__}(order={self.order:#034x})"


def _nothing() -> None:
    """Guards nothing, and so refuses nothing."""


def _arrive(order: int, process: FileHalf | SemaphoreHalf) -> StorageLock:
    lock = _by_order.get(order)
    if lock is None:
        lock = StorageLock()
        del _by_order[lock.order]
        lock.order = order
        lock._process = process
        _by_order[order] = lock
    elif isinstance(process, FileHalf):
        with lock._thread:  # to close a second descriptor is to drop the lock: not while it is held
            if lock._depth:
                lock._spare.append(process)
            else:
                process.close()
    return lock


def _reduce_for_child(lock: StorageLock) -> tuple[Any, ...]:
    if get_spawning_popen() is None:
        raise RuntimeError(
            "A buffer with generation tracking can't be sent through a queue, pipe or pool: the "
            "records would be shared and the counters copied. Pass it to a Process as an argument."
        )
    return lock._reduce_for_child()


ForkingPickler.register(StorageLock, _reduce_for_child)


class FileHalf:
    """A record lock on an unlinked file. The kernel releases it when the holder dies."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor, path = tempfile.mkstemp(prefix="torchrl_generations_lock_")
            os.unlink(path)
        self._fd = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)

    def acquire(self, deadline: float | None) -> bool:
        """Takes it by ``deadline`` (``time.monotonic()``); None waits for ever."""
        while True:
            try:
                # Without a deadline the kernel waits, and wakes us in turn.
                fcntl.lockf(self._fd, fcntl.LOCK_EX | (0 if deadline is None else fcntl.LOCK_NB))
                return True
            except OSError as error:
                # The kernel sees processes, not threads: two that use two tables from several
                # threads look like a deadlock to it and are none.
                if error.errno not in (errno.EDEADLK, errno.EACCES, errno.EAGAIN):
                    raise
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(POLL)

    def release(self) -> None:
        """Gives it back."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __reduce__(self) -> tuple[Any, ...]:
        return _file_half, (DupFd(self._fd),)


def _file_half(descriptor: Any) -> FileHalf:
    return FileHalf(descriptor.detach())


class SemaphoreHalf:
    """Where there is no ``fcntl``: a semaphore that knows its holder.

    A holder that dies leaves it taken. Whoever waits then gets an error that names the process
    instead of waiting for ever.
    """

    def __init__(self) -> None:
        self._semaphore = torch.multiprocessing.get_context("spawn").Lock()
        self._holder = Cells([0])
        self._holder.share()

    def acquire(self, deadline: float | None) -> bool:
        """Takes it by ``deadline`` (``time.monotonic()``); None waits for ever.

        Raises:
            RuntimeError: if the process that holds it has died.
        """
        nameless_since = time.monotonic()
        while True:
            left = HOLDER_PATIENCE if deadline is None else deadline - time.monotonic()
            if self._semaphore.acquire(True, max(0.0, min(left, HOLDER_PATIENCE))):
                self._holder.view[0] = os.getpid()
                return True
            holder = self._holder.view[0]
            if holder:
                nameless_since = time.monotonic()
            nameless = time.monotonic() - nameless_since > NAMELESS_PATIENCE
            if nameless or (holder and not _is_alive(holder)):
                raise RuntimeError(
                    f"Process {holder or 'unknown'} died while it held the lock of a storage with "
                    "generation tracking, which this platform can't release. Restart from a "
                    "checkpoint."
                )
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def release(self) -> None:
        """Gives it back."""
        self._holder.view[0] = 0
        self._semaphore.release()


def _is_alive(pid: int) -> bool:
    if os.name == "nt":
        import ctypes

        kernel = ctypes.windll.kernel32  # type: ignore[attr-defined]
        handle = kernel.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
        code = ctypes.c_ulong(0)
        kernel.GetExitCodeProcess(handle, ctypes.byref(code))
        kernel.CloseHandle(handle)
        return code.value == 259  # STILL_ACTIVE
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # a process that has ended and that nobody has waited for
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True


# ---------------------------------------------------------------------- forks

_forking = threading.RLock()
_taken_for_fork: list[StorageLock] = []  # strong: none may go before it is released


def _before_fork() -> None:
    """Lets every lock's process half join, while no other thread is inside of the lock."""
    _forking.acquire()
    deadline = time.monotonic() + FORK_PATIENCE
    for _, lock in sorted(_by_order.items()):
        if lock._process is not None:  # the kernel keeps the child out
            continue
        if not lock._thread.acquire(True, max(0.0, deadline - time.monotonic())):
            continue
        _taken_for_fork.append(lock)
        try:
            lock.engage()
        except (RuntimeError, OSError) as error:
            # What can't be shared stays as it is: the child is told so at its first use.
            lock._failure = str(error)


def _after_fork_in_parent() -> None:
    while _taken_for_fork:
        _taken_for_fork.pop()._thread.release()
    _forking.release()


def _after_fork_in_child() -> None:
    global _forking
    for lock in list(_by_order.values()):
        # Only the forking thread goes on here; what others held, the parent's threads hold.
        inherited = lock._depth if lock.is_held() else 0
        lock._reset_thread_half()
        lock._inherited = inherited
        lock._unasked = True
    _taken_for_fork.clear()
    _forking = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
