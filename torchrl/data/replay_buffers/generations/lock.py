"""The lock of a generation table: one per storage, shared by every buffer on it.

Comparing stamps and writing priorities is one step only if every writer of the storage takes the
same lock. TorchRL gives each *buffer* a lock of its own, so two buffers on one storage exclude
nobody; this lock belongs to the storage instead.

It has a thread half, here, and will have a process half behind the same interface. Until then a
lock does not leave its process: sending it to a spawned process is refused when it is sent, and a
forked child is refused at its first acquisition, because its counters would be a private copy.
"""

from __future__ import annotations

import os
import threading
import weakref
from multiprocessing.context import get_spawning_popen
from types import TracebackType
from typing import Any, NoReturn
from uuid import uuid4

_LIVE: weakref.WeakSet[StorageLock] = weakref.WeakSet()


class StorageLock:
    """Reentrant lock with the interface of :class:`multiprocessing.Lock`.

    Owned by one :class:`~torchrl.data.replay_buffers.generations.SlotGenerations` table. It guards
    the stamps, the records of the storage, and the priority tree of every buffer on that storage.

    Lock order: a buffer's ``_futures_lock``, then its ``_replay_lock``, then table locks by
    ascending :attr:`order`. Never wait for a future while holding the last two: a prefetched
    sample needs them to finish.

    Attributes:
        order (int): random id of the lock. Code that needs several tables at once takes their locks
            by ascending ``order``.

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
        self._half: threading.RLock | _ForkedHalf = threading.RLock()
        # Bound methods of the C lock: a sample or an update enters several times, and an attribute
        # look-up less per entry is most of what the wrapper costs.
        self._bind()
        _LIVE.add(self)

    def _bind(self) -> None:
        self._acquire = self._half.acquire
        self._release = self._half.release

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Takes the lock; returns whether it was taken.

        Args:
            block (bool): if False, returns at once. Defaults to True.
            timeout (float, optional): seconds to wait at most; negative counts as 0. ``None`` waits
                for ever. Without effect if ``block`` is False.

        Raises:
            RuntimeError: in a forked child, whose counters are a private copy.
        """
        if not block:
            return self._acquire(False)
        if timeout is None:
            return self._acquire()
        return self._acquire(True, max(timeout, 0.0))

    def release(self) -> None:
        """Gives the lock back.

        Raises:
            RuntimeError: if the calling thread does not hold it.
        """
        self._release()

    def __enter__(self) -> bool:
        return self._acquire()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "A storage with generation tracking can't be sent to another process yet: its "
                "counters and lock live in this one. Build the buffer with "
                "track_generations=False, or write from threads."
            )
        return StorageLock, ()  # a copy of a storage is independent: it gets a lock of its own

    def __repr__(self) -> str:
        return f"{type(self).__name__}(order={self.order:#034x})"


class _ForkedHalf:
    """Stands in for the thread half in a forked child: refuses, and says why."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> NoReturn:
        raise RuntimeError(
            "A storage with generation tracking was used in a forked process "
            f"(pid {os.getpid()}): its counters would be a private copy of the parent's. Use it "
            "in the process that built it, or build the buffer with track_generations=False."
        )

    def release(self) -> None:
        """Leaving a ``with`` block that was entered before the fork is no use of the storage."""


def _refuse_in_child() -> None:
    for lock in _LIVE:
        lock._half = _ForkedHalf()
        lock._bind()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)
