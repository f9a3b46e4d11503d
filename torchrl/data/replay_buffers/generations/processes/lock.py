"""The lock of a generation table: one per storage, for every buffer, thread and process on it.

Comparing stamps and writing priorities is one step only if every writer of the storage takes the
same lock. TorchRL gives each *buffer* a lock of its own, so two buffers on one storage exclude
nobody; this lock belongs to the storage instead.

It has two halves behind one interface. The thread half is a reentrant thread lock. The process half
joins it when the process first forks, or first sends the lock to a process that it spawns.

Ctrl-C, a signal handler that raises and ``PyThreadState_SetAsyncExc`` raise exceptions anywhere,
and none may leave the lock taken. Python delivers them when a Python function is entered, after a
call, and where a loop jumps back. So ``with`` is safe where it runs C functions only, which it does
until the process half joins. From then on each hold is a generator that stands inside of the lock:
to drop it is to leave the lock, and no exception from outside finds a place in that.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter, methodcaller
from threading import get_ident
from typing import Any
from uuid import uuid4

from . import forks
from .file_half import POLL, FileHalf

_HELD_FOR_LONG = "another thread held its lock for long at the fork"


class _ThreadHalf(type(threading.RLock())):  # type: ignore[misc]
    """A reentrant lock that tells its owner's thread so without a call."""

    owned = property(methodcaller("_is_owned"))


class _Found(property):
    """What ``with`` finds on an instance of the lock.

    Found on the class, as :class:`contextlib.ExitStack` does, it calls a method instead.
    """

    def __init__(self, find: Callable[[Any], Any], method: str) -> None:
        super().__init__(find)
        self._method = methodcaller(method)

    def __call__(self, lock: StorageLock, *exception: Any) -> Any:
        return self._method(lock)


class StorageLock:
    """Reentrant lock for threads and processes; interface of :class:`multiprocessing.Lock`.

    Owned by one :class:`~torchrl.data.replay_buffers.generations.SlotGenerations` table. It guards
    the stamps, the records of the storage, and the priority tree of every buffer on that storage.

    It stands in both places where TorchRL's buffers take a lock, ``_replay_lock`` and
    ``_write_lock``; so a thread that holds it may call the buffer.

    Lock order: a buffer's ``_futures_lock``, then table locks by ascending :attr:`order`. Never
    wait for a future while holding a table's lock, as ``sample`` of a prefetching buffer does: the
    future needs it to finish.

    An exception that arrives at any moment leaves no hold behind a ``with lock`` or a
    ``with lock.within(seconds)``. Between :meth:`acquire` and :meth:`release` it is up to the
    caller, as it is with Python's own locks.

    Attributes:
        order (int): random id of the lock, the same in every process. Code that needs several
            tables at once takes their locks by ascending ``order``.

    Examples:
        >>> lock = StorageLock()
        >>> with lock, lock:  # reentrant
        ...     pass
        >>> with lock.within(0.1) as taken:
        ...     taken
        True
    """

    # C functions of the thread half, found by C functions.
    __enter__: Any = _Found(attrgetter("_bare_enter"), "acquire")
    __exit__: Any = _Found(attrgetter("_bare_exit"), "release")

    def __init__(self) -> None:
        self._build(uuid4().int, None)

    def _build(self, order: int, process: FileHalf | None) -> None:
        self.order: int = order
        self._process = process
        self._spare: list[FileHalf] = []
        self._prepare: Callable[[], None] | None = None
        self._refusal: Callable[[], str | None] | None = None
        self._failure: str | None = None  # why the process half could not join at a fork
        self._unasked = False  # a forked child that has not asked yet whether it may
        self._inherited = False  # the forking thread held the lock, in the child
        self._abandoned: list[dict[int, list[Iterator[bool]]]] = []
        self._begin({})
        if process is not None:
            self.__class__ = _JoinedLock
        forks.known[order] = self

    def _begin(self, holds: dict[int, list[Iterator[bool]]]) -> None:
        self._thread = _ThreadHalf()
        # One object each for all ``with`` blocks, so that their references count those under way.
        self._bare_enter = self._thread.__enter__
        self._bare_exit = self._thread.__exit__
        # By thread, its holds that are generators, the innermost last. Each thread has its list.
        self._holds = holds
        # Whether a generator is inside, and whether this process has the process half. Guarded by
        # the thread half.
        self._is_inside = self._has_kernel = False

    def guard(self, prepare: Callable[[], None], refusal: Callable[[], str | None]) -> None:
        """Tells the lock what it guards.

        Args:
            prepare (Callable[[], None]): called under the lock before the process half joins, to
                move what the lock guards into shared memory. Called again, at the next fork, if it
                raised.
            refusal (Callable[[], str | None]): called in a forked child at its first use of the
                lock. A string says why the child may not use what the lock guards.
        """
        self._refusal = refusal
        self._prepare = prepare  # last: a fork may come in between

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Takes the lock; returns whether it was taken.

        Args:
            block (bool): if False, returns at once. Defaults to True.
            timeout (float, optional): seconds to wait at most; negative counts as 0. ``None`` waits
                for ever. Without effect if ``block`` is False.

        Raises:
            RuntimeError: in a forked child that may not use what the lock guards.
        """
        if not block:
            timeout = 0.0
        seconds = -1.0 if timeout is None else max(timeout, 0.0)
        deadline = None if timeout is None else time.monotonic() + seconds
        thread = self._thread
        timed = timeout is not None and not thread.owned
        mine = self._holds.setdefault(get_ident(), [])
        depth = len(mine)
        # An exception may come after any call, also of what undoes. So nothing is called before
        # that, and each step finds in the state itself, not in a variable, what there is to undo.
        try:
            try:
                # `with` knows no timeout, so a hold more waits, until the generator has its own.
                if timed and not thread.acquire(True, seconds):
                    return False
                mine.append(self._hold(thread, deadline))
                if not next(mine[-1]):
                    del mine[depth:]
                return len(mine) > depth
            finally:
                if timed and thread.owned:
                    thread.release()
        except BaseException:
            del mine[depth:]
            raise

    def _hold(self, thread: _ThreadHalf, deadline: float | None) -> Iterator[bool]:
        """Stands inside of the lock until it is dropped; gives whether it got in."""
        with thread:
            # A signal handler may take the lock at any call, and take the process half first. It
            # leaves it to the block that it interrupts, which needs it still, if that is in here.
            outermost = not self._is_inside
            try:
                self._is_inside = True
                if self._unasked:
                    self._ask()
                yield self._process is None or self._has_kernel or self._take_kernel(deadline)
            finally:
                if outermost:
                    self._is_inside = self._has_kernel = False
                    if self._process is not None:
                        del self._process.held

    def _take_kernel(self, deadline: float | None) -> bool:
        assert self._process is not None
        self._has_kernel = self._process.acquire(deadline)
        return self._has_kernel

    def release(self) -> None:
        """Gives the lock back.

        Raises:
            RuntimeError: if the calling thread does not hold it.
        """
        mine = self._holds.get(get_ident())
        if mine:
            del mine[-1]
        elif self._thread.owned:  # a ``with`` block of before the process half joined
            self._thread.release()
        else:
            raise RuntimeError("release() needs a lock that this thread holds.")

    def _release_after(self, *exception: Any) -> None:
        self.release()

    def within(self, timeout: float | None) -> _Within:
        """Takes the lock for a ``with`` block, which is given whether it was taken.

        Args:
            timeout (float or None): see :meth:`acquire`.

        Raises:
            RuntimeError: see :meth:`acquire`.
        """
        return _Within(partial(self.acquire, True, timeout), self._leaving(_nothing))

    def _leaving(self, called: Callable[..., Any]) -> _Exit:
        """What gives back, when dropped, all that this thread takes from now on."""
        mine = self._holds.setdefault(get_ident(), [])
        leave = _Exit()
        leave.__call__ = called
        # A C function: an exception inside of a finalizer would be lost.
        leave.__del__ = partial(mine.__delitem__, slice(len(mine), None)) if mine else mine.clear
        return leave

    @property
    def is_engaged(self) -> bool:
        """Whether the process half has joined, so that other processes may hold the lock."""
        return self._process is not None

    def is_held(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._thread.owned

    # ------------------------------------------------------------------ the process half

    def engage(self) -> None:
        """Lets the process half join; nothing if it has.

        Raises:
            RuntimeError: if what the lock guards cannot be shared, if the calling thread holds the
                lock, or on a platform without ``fcntl``. Nothing has changed then.
            OSError: if there is no room for a lock file. Nothing has changed then.
        """
        self._engage(None)

    def _engage(self, deadline: float | None) -> None:
        if self._process is not None:
            return
        if self.is_held():
            raise RuntimeError("engage() needs a lock that this thread does not hold.")
        # Who comes from now on looks, inside, whether the process half has joined. Who came before
        # does not, and may be waiting still.
        self.__class__ = _JoinedLock
        while not self._is_bare():
            if deadline is not None and time.monotonic() >= deadline:
                raise RuntimeError(_HELD_FOR_LONG)
            time.sleep(POLL)
        left = None if deadline is None else deadline - time.monotonic()
        with self.within(left) as taken:
            if not taken:
                raise RuntimeError(_HELD_FOR_LONG)
            if self._process is None:
                process = FileHalf()
                if self._prepare is not None:
                    self._prepare()
                self._process = process

    def _is_bare(self) -> bool:
        """Whether no ``with`` block is under way that does not look for the process half."""
        return (
            sys.getrefcount(self._bare_enter) == _UNUSED
            and sys.getrefcount(self._bare_exit) == _UNUSED
        )

    def ready_for_fork(self, deadline: float) -> None:
        """Lets the process half join, by ``deadline``; what prevents it is told to the child."""
        if self._prepare is None:  # a table that another thread is making
            return
        try:
            self._engage(deadline)
        except Exception as error:  # of whatever kind: the fork goes on, and other locks need it
            self._failure = str(error) or type(error).__name__

    def begin_in_child(self) -> None:
        """Begins anew in a forked child, where only the forking thread goes on."""
        self._inherited = self._inherited or self.is_held()
        # What other threads held must not be given back here: the parent's threads hold it.
        self._abandoned.append(self._holds)
        self._begin({get_ident(): self._holds.get(get_ident(), [])})
        self._unasked = True
        self.__class__ = _JoinedLock

    def _ask(self) -> None:
        if self._inherited:
            raise RuntimeError(
                "A storage with generation tracking was used in a process that was forked while "
                "its lock was held. Start processes outside of the lock."
            )
        reason = None if self._refusal is None else self._refusal()
        if self._process is None:
            failure = self._failure or "its lock was being made at the fork"
            reason = failure if reason is None else f"{reason}; {failure}"
        if reason is not None:
            raise RuntimeError(
                f"A storage with generation tracking can't be used in a forked process: {reason}."
            )
        self._unasked = False

    def reduce_for_child(self) -> tuple[Any, ...]:
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
        return f"{StorageLock.__name__}(order={self.order:#034x})"


class _Exit:
    """What ``with`` calls at the end, and drops in any case, also where the call never began."""

    __slots__ = ("__call__", "__del__")

    __call__: Callable[..., Any]
    __del__: Callable[[], Any]


class _Within:
    """A context manager of an enter and an exit."""

    __slots__ = ("__enter__", "__exit__")

    def __init__(self, enter: Callable[[], bool], leave: _Exit) -> None:
        self.__enter__: Any = enter
        self.__exit__: Any = leave


class _JoinedLock(StorageLock):
    """The same where the process half has joined, or is about to: each hold is a generator."""

    __enter__: Any = _Found(attrgetter("acquire"), "acquire")
    __exit__: Any = _Found(lambda lock: lock._leaving(lock._release_after), "release")


def _nothing(*exception: Any) -> None:
    """For an exit that does all there is to do when it is dropped."""


def _arrive(order: int, process: FileHalf) -> StorageLock:
    known = forks.known.get(order)
    if known is None:
        lock = StorageLock.__new__(StorageLock)
        lock._build(order, process)
        return lock
    assert isinstance(known, StorageLock)
    # To close a second descriptor of the file is to drop the lock: not while it is held.
    if known.is_held():
        known._spare.append(process)
    else:
        with known._thread:
            process.close()
    return known


def _reduce_for_child(lock: StorageLock) -> tuple[Any, ...]:
    if get_spawning_popen() is None:
        raise RuntimeError(
            "A buffer with generation tracking can't be sent through a queue, pipe or pool: the "
            "records would be shared and the counters copied. Pass it to a Process as an argument."
        )
    return lock.reduce_for_child()


_unused = StorageLock()
# The references to `_bare_exit` and its like while no ``with`` block uses it.
_UNUSED = sys.getrefcount(_unused._bare_exit)
ForkingPickler.register(StorageLock, _reduce_for_child)
ForkingPickler.register(_JoinedLock, _reduce_for_child)
