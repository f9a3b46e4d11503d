"""What the tree of an asynchronous learner (``sync=False``) has seen of the records.

Its sampler is private to the learner's process, so no writer marks its tree. Before each sample and
each conditional update the learner compares stamps instead: a slot whose stamp differs from the one
that it saw holds a record that its tree knows nothing of, which gets the default priority.
"""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torchrl.data.replay_buffers import PrioritizedSampler

from .counters import LOG_ENTRIES
from .table import SlotGenerations
from .trees import write_default

_NEVER = -LOG_ENTRIES - 1  # a position in the log that is too old for any answer


class Learner:
    """The stamps that a learner's tree has seen. The lock of the storage's table guards them."""

    def __init__(self) -> None:
        self._seen: torch.Tensor | None = None
        # The end of the log and the storage's revision when it looked last.
        self._until: tuple[int, int] = (_NEVER, 0)

    def catch_up(self, table: SlotGenerations, sampler: PrioritizedSampler) -> None:
        """Gives every record that the tree has not seen the default priority."""
        now = (table.counters.log_end, table.sharing.revision)
        if now == self._until and self._seen is not None:
            return
        # What a signal handler interrupts may have made its entry in the log, and no more.
        is_whole = not table.writing.is_under_way
        with table.writing.marker:
            self._catch_up(table, sampler, now)
        if is_whole:
            self._until = now  # at the end: an exception from outside may come before

    def _catch_up(
        self, table: SlotGenerations, sampler: PrioritizedSampler, now: tuple[int, int]
    ) -> None:
        stamps, length, capacity = table.stamps, table.layout.length, table.layout.slots
        seen = self._up_to(stamps)
        ranges = table.counters.ranges_since(*self._until, now[1], capacity)
        if ranges is None or sum(count for _, count in ranges) > length // 2:
            ranges = [(0, length)]
        for start, count in ranges:
            over = start + count - capacity
            for begin, stop in ((start, min(start + count, length)), (0, over)):
                if begin < stop:
                    new = (stamps[begin:stop] != seen[begin:stop]).nonzero()[:, 0] + begin
                    if new.numel():
                        write_default(sampler, new, table.storage, are_leaves=new.is_cpu)
                        seen[begin:stop] = stamps[begin:stop]

    def _up_to(self, stamps: torch.Tensor) -> torch.Tensor:
        """The stamps seen, one for each slot of the table, which may have grown."""
        seen = self._seen
        known = 0 if seen is None else seen.numel()
        if seen is None or known < stamps.numel():
            self._until = (_NEVER, 0)
            with torch.inference_mode(False):  # they outlive it
                self._seen = torch.full_like(stamps, -1)
            if seen is not None:
                self._seen[:known] = seen
        assert self._seen is not None
        return self._seen

    def forget(self) -> None:
        """Forgets what was seen: the tree is empty."""
        self._seen = None

    def state(self) -> torch.Tensor | None:
        """Returns a copy of the stamps seen, int64 ``[slots]``; None if there are none."""
        return None if self._seen is None else self._seen.clone()

    def restore(self, seen: torch.Tensor | None) -> None:
        """Takes over what :meth:`state` gave, with the tree of then; compares all slots next."""
        self._seen = None if seen is None else seen.clone()
        self._until = (_NEVER, 0)

    def __getstate__(self) -> dict[str, Any]:
        # A process that this is sent to gets no tree: only the learner has one.
        seen = None if get_spawning_popen() is not None else self._seen
        return {"_seen": seen, "_until": (_NEVER, 0)}
