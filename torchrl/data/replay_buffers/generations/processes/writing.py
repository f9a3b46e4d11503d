"""What is under way on a storage: a write, an update, a load or a dump, and which slots it is in.

A signal handler runs in the middle of whatever its thread does, and holds the same locks. In the
middle of a write the cursor has moved and the stamps have advanced, but the data have yet to come:
it may sample then and look, but another write, an update or a checkpoint would go wrong, and is
refused.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from operator import methodcaller
from weakref import WeakSet

import torch

_all: WeakSet[Writing] = WeakSet()
_owned = methodcaller("_is_owned")  # of Python's reentrant lock


class Writing:
    """What a table knows of the step that is under way. The table's lock guards it.

    Attributes:
        marker (threading.RLock): taken by whatever changes or saves records, stamps or priorities.
            A C-level lock in a ``with`` leaves no gap in which an exception could leave it taken.
        whole (threading.RLock): taken for all of a buffer's write, in which its writer takes
            ``marker`` for its own part.
        slots (range, torch.Tensor or None): where the write under way puts records: a range that
            may go around the ring, or int64 ``[N]``.
    """

    def __init__(self) -> None:
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self.marker = threading.RLock()
        self.whole = threading.RLock()
        self.slots: range | torch.Tensor | None = None
        # The slots that advanced during the write of a user's writer, which is watched.
        self._advanced: list[torch.Tensor] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether this thread, which a signal may have interrupted, is inside of a step."""
        return _owned(self.marker) or _owned(self.whole)

    def refuse(self, name: str, *, by_writer: bool = False) -> None:
        """Refuses what can't be done in the middle of a write, an update, a load or a dump.

        Args:
            name (str): what is refused, in an error.

        Keyword Args:
            by_writer (bool, optional): whether it may be a part of a buffer's write. Defaults to
                False.

        Raises:
            RuntimeError: if something of this thread is under way. Nothing has changed then.
        """
        if _owned(self.marker) or (not by_writer and _owned(self.whole)):
            raise RuntimeError(
                f"{name} needs a storage that nobody is writing, updating or saving: a write of "
                "this thread is under way, or an update, a load or a dump. A signal handler may "
                "look and sample; let it set a flag for the rest, and look at the flag after the "
                "write."
            )
        self.slots = None  # an exception from outside may have kept a write from it

    def holds(self, slots: torch.Tensor, ring: int) -> torch.Tensor:
        """Tells which of ``slots`` the write under way puts records into.

        Their stamps have advanced already, and their data may be those of before: a handle with
        both would be live on another record when the write is made.

        Args:
            slots (torch.Tensor): int64, any shape.
            ring (int): how many slots there are.

        Returns:
            bool tensor of the shape of ``slots``.
        """
        if self.slots is None or not _owned(self.marker):
            return torch.zeros_like(slots, dtype=torch.bool)
        if isinstance(self.slots, range):
            return (slots - self.slots.start).remainder(ring) < len(self.slots)
        return torch.isin(slots, self.slots.to(slots.device))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes which slots advance meanwhile, for :meth:`unadvanced`."""
        outer, self._advanced = self._advanced, []
        try:
            yield
        finally:
            if outer is not None:
                outer.extend(self._advanced)
            self._advanced = outer

    @property
    def is_watched(self) -> bool:
        """Whether :meth:`watched` is under way."""
        return self._advanced is not None

    def note(self, slots: torch.Tensor) -> None:
        """Notes that ``slots`` (``[N]``) have advanced."""
        if self._advanced is not None:
            self._advanced.append(slots)

    def unadvanced(self, slots: torch.Tensor) -> torch.Tensor:
        """Those of ``slots`` (``[N]``) that have not advanced since :meth:`watched` began."""
        noted = [part.to(slots.device) for part in self._advanced or ()]
        return slots[~torch.isin(slots, torch.cat([slots[:0], *noted]))]


@contextlib.contextmanager
def cleaning_up_after(error: BaseException) -> Iterator[None]:
    """Raises ``error`` where the block fails too, with the error of the block as its cause."""
    try:
        yield
    except Exception as another:
        raise error from another


def _begin_in_child() -> None:
    """Leaves to the parent the writes that its other threads were in at the fork."""
    for writing in list(_all):
        writing._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
