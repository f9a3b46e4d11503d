"""What a fork does to locks that threads of the forking process share.

Before it, each lock is made one for several processes, where that is possible. In the child, where
only the forking thread goes on, each lock begins anew and asks at its first use whether the child
may use what it guards.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Protocol

# How long a fork waits, in all, for other threads to leave critical sections.
FORK_PATIENCE = 10.0


class Forkable(Protocol):
    """A lock that the hooks know."""

    order: int

    def ready_for_fork(self, deadline: float) -> None:
        """Joins the process half, waiting no longer than until then (``time.monotonic()``)."""

    def begin_in_child(self) -> None:
        """Begins anew in a forked child."""


# By the order in which they are taken. A lock enters when it is whole.
known: weakref.WeakValueDictionary[int, Forkable] = weakref.WeakValueDictionary()


def _all_known() -> list[Forkable]:
    found = [reference() for reference in known.valuerefs()]  # in one step: threads add to it
    return sorted((lock for lock in found if lock is not None), key=lambda lock: lock.order)


def _before_fork() -> None:
    deadline = time.monotonic() + FORK_PATIENCE
    for lock in _all_known():
        lock.ready_for_fork(deadline)


def _in_child() -> None:
    for lock in _all_known():
        lock.begin_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
