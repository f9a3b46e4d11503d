"""How many priorities the conditional updates of one buffer applied, and how many came stale."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Tally:
    """Two counts that a buffer keeps of its conditional updates.

    The lock of the storage's table guards every change. A read takes no lock, so that a monitor
    waits for nobody: both counts stand in one tuple, which is replaced as a whole.
    """

    def __init__(self) -> None:
        # Handles applied, and handles that came. The first is on the device where it was counted.
        self._counts: tuple[int | torch.Tensor, int] = (0, 0)

    def count(self, applied: int, sent: int) -> None:
        """Counts an update of ``sent`` handles."""
        before, asked = self._counts
        self._counts = (before + applied, asked + sent)

    def count_mask(self, updated: torch.Tensor) -> None:
        """Counts an update by its mask, without waiting for the mask's device."""
        before, asked = self._counts
        more = updated.sum()
        if isinstance(before, torch.Tensor):
            more = more.to(before.device)
        self._counts = (before + more, asked + updated.numel())

    def reset(self) -> None:
        """Counts from zero again."""
        self._counts = (0, 0)

    def totals(self) -> tuple[int, int]:
        """Returns how many handles were applied and how many were stale; waits for the device."""
        applied, sent = self._counts
        return int(applied), sent - int(applied)


def stats_of(tallies: Iterable[Tally]) -> dict[str, int | float | bool]:
    """Returns the entries of a buffer's ``stats()``, of all these tallies together."""
    totals = [tally.totals() for tally in tallies]
    applied, stale = (sum(counts) for counts in zip(*totals, strict=True))
    share = stale / (applied + stale) if stale else 0.0
    return {"updates_applied": applied, "updates_stale": stale, "stale_share": share}
