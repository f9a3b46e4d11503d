"""The last few ring writes of a storage, so that a learner need not compare every slot.

An asynchronous learner finds the records that its tree has not seen by comparing stamps. This log
tells it which ranges to compare. It is an aid and no authority: where an entry is missing, since
the log is short or something else wrote, the learner compares all slots.
"""

from __future__ import annotations

from ..processes.cells import Cells

ENTRIES = 64
_FIELDS = 4  # start, count, and the storage's revision before and after the write


class RingLog:
    """A short log in cells, shared by all processes; the lock of the table guards it."""

    def __init__(self) -> None:
        self.cells = Cells([0] * (1 + ENTRIES * _FIELDS))

    @property
    def end(self) -> int:
        """How many entries there ever were: the position of a reader who has seen everything."""
        return self.cells.view[0]

    def append(self, start: int, count: int, before: int, after: int) -> None:
        """Notes a write of ``count`` slots from ``start`` on, at this step of the revision."""
        view = self.cells.view
        at = 1 + view[0] % ENTRIES * _FIELDS
        view[at], view[at + 1], view[at + 2], view[at + 3] = start, count, before, after
        view[0] += 1

    def append_unknown(self) -> None:
        """Notes that any slot may have advanced."""
        self.append(-1, 0, -1, -1)

    def ranges_since(
        self, position: int, revision: int, now: int, capacity: int
    ) -> list[tuple[int, int]] | None:
        """The ranges ``(start, count)`` written since a reader was here; None if it can't tell.

        Writes that follow each other in the ring, which has ``capacity`` slots, make one range.

        Args:
            position (int): the reader's :attr:`end` of then.
            revision (int): the storage's revision of then.
            now (int): its revision of now. Each step between has to be that of an entry.
            capacity (int): of the ring.
        """
        view = self.cells.view
        if view[0] - position > ENTRIES:
            return None
        ranges: list[tuple[int, int]] = []
        first = total = 0
        for entry in range(position, view[0]):
            at = 1 + entry % ENTRIES * _FIELDS
            start, count, before, after = view[at : at + _FIELDS].tolist()
            if start < 0 or before != revision:
                return None
            if total and start == (first + total) % capacity:
                total += count
                ranges[-1] = (first, total)
            else:
                first, total = start, count
                ranges.append((start, count))
            revision = after
        return ranges if revision == now else None
