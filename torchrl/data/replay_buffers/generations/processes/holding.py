"""Who takes locks, takes them here: of one buffer, or of all members of an ensemble.

Lock order: buffers' ``_futures_lock``, then table locks by ascending ``order``. Never wait for a
future while holding a table's lock: the future needs it to finish. An exception may arrive between
any two calls, so a lock that is taken by a call is given back by a ``finally`` that begins before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from .lock import StorageLock

# How long a holder waits for one lock, in seconds, before it gives the others back to try anew.
SETTLING = 0.05

T = TypeVar("T")


class Table(Protocol):
    """What is needed of a generation table."""

    lock: StorageLock


TableT = TypeVar("TableT", bound=Table)


class Buffer(Protocol):
    """What is needed of a buffer that has one."""

    _table: Any
    _futures_lock: Any

    def _synchronize_futures_locked(self) -> None: ...


def locked(rb: Buffer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Makes one step of a tracked buffer under the lock of its table, which the step gets first.

    It is the table of the storage that the buffer has when the lock is free: ``set_storage`` may
    come in between.
    """
    while True:
        table = rb._table
        with table.lock:
            if rb._table is table:
                return step(table, *args, **kwargs)


@contextlib.contextmanager
def settled(buffers: Sequence[Buffer], tables: Callable[[], Sequence[Table]]) -> Iterator[None]:
    """Holds every lock with no prefetched sample or background update still running.

    They need the tables' locks to finish, so they are waited for before those are taken, and the
    ``_futures_lock`` of each buffer keeps new ones from starting. All is given back while one lock
    is not to be had: who holds a table's may be about to sample, which takes ``_futures_lock``.

    Args:
        buffers (sequence): the buffers, whose futures are waited for.
        tables (Callable[[], sequence]): returns the tables, which must be the same ones before and
            after their locks were taken.
    """
    while True:
        for taken in _futures(buffers, tables, wait=None):
            if taken:
                yield
                return


def _futures(
    buffers: Sequence[Buffer],
    tables: Callable[[], Sequence[Table]],
    wait: float | None,
) -> Iterator[bool]:
    """Yields inside of all locks whether each was to be had."""
    if not buffers:
        mine = in_order(tables())
        for taken in _locks(mine):
            yield taken and mine == in_order(tables())
        return
    first, *others = buffers
    with within(first._futures_lock, wait) as taken:
        if not taken:
            yield False
            return
        first._synchronize_futures_locked()
        yield from _futures(others, tables, SETTLING)


def _locks(tables: Sequence[Table]) -> Iterator[bool]:
    if not tables:
        yield True
        return
    first, *others = tables
    with first.lock.within(SETTLING) as taken:
        if taken:
            yield from _locks(others)
        else:
            yield False


@contextlib.contextmanager
def within(lock: Any, timeout: float | None) -> Iterator[bool]:
    """Takes a lock of Python's own for a ``with`` block, if it is to be had in time."""
    if timeout is None:
        with lock:
            yield True
    elif not lock.acquire(timeout=timeout):
        yield False
    else:
        try:
            yield True
        finally:
            lock.release()


def in_order(tables: Sequence[TableT]) -> list[TableT]:
    """Returns the different ones of some tables, in the order in which their locks are taken."""
    return [table for _, table in sorted({table.lock.order: table for table in tables}.items())]


class HoldOfAll:
    """The locks of several tables as one, for a ``with`` statement.

    TorchRL's methods enter both of a buffer's locks, ``_replay_lock`` first: the hold of that one
    calls ``follow``, and the other finds everything taken.

    Args:
        tables (Callable[[], sequence]): returns the tables, which may be others at any time.
        follow (Callable[[], None], optional): called with all locks held.
    """

    def __init__(
        self, tables: Callable[[], Sequence[Table]], follow: Callable[[], None] | None
    ) -> None:
        self._tables, self._follow = tables, follow
        # Stands inside of the locks: to drop it is to leave them.
        self._hold: Iterator[bool] | None = None

    def __enter__(self) -> None:
        while True:
            tables = in_order(self._tables())
            are_held = [table.lock.is_held() for table in tables]
            if any(are_held):
                if not all(are_held):  # the others would be out of order
                    raise RuntimeError(
                        "An ensemble takes the locks of all its members at once, lest two threads "
                        "wait for each other: a thread that holds some of them can't use it."
                    )
                if self._follow is None:
                    return
            self._hold = _locks(tables)
            if next(self._hold) and tables == in_order(self._tables()):
                if self._follow is not None:
                    self._follow()
                return
            self._hold = None  # one was not to be had, or set_storage() came in between

    def __exit__(self, *exception: Any) -> None:
        self._hold = None
