"""What a conditional priority update did, row by row, and what all of a buffer's did so far."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorClass, TensorDict


class PriorityUpdateResult(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Outcome of a conditional priority update; its documentation stands below."""

    updated_mask: torch.Tensor

    @classmethod
    def of(cls, updated_mask: torch.Tensor) -> PriorityUpdateResult:
        """Makes a result of a mask, in a fifth of the time that the constructor takes."""
        made = cls.__new__(cls)
        made.__dict__["_tensordict"] = TensorDict._new_unsafe(
            {"updated_mask": updated_mask}, updated_mask.shape
        )
        made.__dict__["_non_tensordict"] = {}
        return made

    @property
    def num_updated(self) -> int:
        """Number of handles whose priority was written (reading it waits for the device)."""
        return int(self.updated_mask.sum())

    @property
    def num_stale(self) -> int:
        """Number of handles that were skipped because their record is gone."""
        return self.updated_mask.numel() - self.num_updated


# Here, since a tensorclass gets its signature in the place of the docstring that it had.
PriorityUpdateResult.__doc__ = """Outcome of :meth:`ReplayBuffer.update_priority_if_present`.

    Every record of the call is either updated or stale: ``num_updated + num_stale`` is the number
    of handles that came in (*Honest result* in the design notes).

    Attributes:
        updated_mask (torch.Tensor): bool, True exactly where the priority was written. One flag per
            handle, in the order of the call: ``[N]`` for a batch of N handles, ``[]`` for a single
            integer index. It lives on the device of the ``index`` that was passed.

    Examples:
        >>> import torch
        >>> result = PriorityUpdateResult(updated_mask=torch.tensor([True, False, True]))
        >>> result.num_updated, result.num_stale
        (2, 1)
    """


class Tally:
    """Two counts that a buffer keeps of its conditional updates.

    The lock of the storage's table guards every change. A read takes no lock, so that a monitor
    waits for nobody: both counts stand in one tuple, which is replaced as a whole.
    """

    def __init__(self) -> None:
        # Handles applied, and handles that came. The first is on the device where it was counted.
        self._counts: tuple[int | torch.Tensor, int] = (0, 0)

    def count(self, applied: int | torch.Tensor, sent: int) -> None:
        """Counts an update of ``sent`` handles, without waiting for a device."""
        before, asked = self._counts
        if isinstance(before, torch.Tensor) and isinstance(applied, torch.Tensor):
            applied = applied.to(before.device)
        self._counts = (before + applied, asked + sent)

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
