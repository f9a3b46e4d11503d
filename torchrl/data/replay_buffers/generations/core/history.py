"""Where a table's stamps come from: its lineage, its base, and what the last restore left.

Within one lineage a stamp of a slot names one record. A restore, and a copy, begin a branch of that
history: later writes on both branches must not give the same stamp to different records. So each
draws a random base above every stamp in use, and a slot's first write after it lands there.
"""

from __future__ import annotations

import secrets
from uuid import uuid4

import torch
from torchrl.data.replay_buffers import Storage

from ..processes.cells import Cells
from .counters import Counters

# Bits of randomness in the distance between the stamps in use and a new base. Two branches of one
# history would have to write a slot about 2**48 times to meet; 2**14 draws fit into an int64.
BASE_BITS = 48
# Above this no base is drawn. A restore draws two, and one more if it fails.
_HIGHEST_BASE = 2**62
_DRAWS_OF_A_RESTORE = 4

# TorchRL's own attribute name: an unmodified TorchRL writer on the storage finds the counters
# there and advances them too.
STAMPS_ATTRIBUTE = "_slot_generations"


class History:
    """Lineage of a table, in memory that its processes share, and what its last restore left.

    The lock of the table guards all of it.

    Args:
        counters (Counters): those of the table, which have the base.

    Attributes:
        cells (Cells): the lineage.
        ran_on (torch.Tensor or None): of the last restore, the slots whose records had run on since
            the state was taken, bool ``[slots]``; None if nothing tells.
        restored (torch.Tensor or None): the stamps as the last restore or copy in this process left
            them, which tell a TorchRL writer's advances from ours.
        is_restoring (bool): whether a restore is under way, which has told already what ran on.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.cells = Cells([0, 0])
        self.lineage = uuid4().hex
        self.ran_on: torch.Tensor | None = None
        self.restored: torch.Tensor | None = None
        self._restored_at: int = 0  # the base of then: another process may have restored since
        self.is_restoring = False

    @property
    def lineage(self) -> str:
        """Random id of this history of writes, 32 hex digits, kept through restores and copies."""
        return "".join(f"{part & (2**64 - 1):016x}" for part in self.cells.view)

    @lineage.setter
    def lineage(self, lineage: str) -> None:
        for position in range(2):
            part = int(lineage[16 * position :][:16], 16)
            self.cells.view[position] = part - 2**64 if part >= 2**63 else part

    def draw_base(self, *in_use: torch.Tensor) -> None:
        """Draws a new base above every stamp in use and every earlier base.

        Raises:
            OverflowError: if the int64 of the counters is used up. Nothing has changed then.
        """
        self._counters.base = self._room_above(1, *in_use) + 1 + secrets.randbits(BASE_BITS)

    def check_room(self, saved: torch.Tensor | None) -> None:
        """Makes sure that a restore of these stamps can draw all its bases; see :meth:`draw_base`.

        Args:
            saved (torch.Tensor or None): int64 ``[slots]``.
        """
        in_use = [self._counters.tensor] if saved is None else [self._counters.tensor, saved]
        self._room_above(_DRAWS_OF_A_RESTORE, *in_use)

    def _room_above(self, draws: int, *in_use: torch.Tensor) -> int:
        """The highest number in use, above which there is room for so many bases."""
        highest = (int(stamps.max()) for stamps in in_use if stamps.numel())
        top = max(self._counters.base, *highest)
        if top + draws * 2**BASE_BITS >= _HIGHEST_BASE:
            raise OverflowError(
                "The generation counters of this storage are used up after some 16,000 restores. "
                "Build a new storage."
            )
        return top

    def branch(self) -> None:
        """Keeps the later stamps of a copy apart from those of its original."""
        self.draw_base(self._counters.tensor)
        self._remember()

    def _remember(self) -> None:
        self.restored, self._restored_at = self._counters.tensor.clone(), self._counters.base

    def corrected(self, slots: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Returns the stamps ``found`` at ``slots``, of which TorchRL's writer may have set some.

        It adds 1 and knows no base. Below the base only the restored stamps themselves are ours:
        others are brought to the base.
        """
        stamps, base = self._counters.tensor, self._counters.base
        if self.restored is None or self._restored_at != base:
            return found
        grown = stamps.numel() - self.restored.numel()
        if grown:
            self.restored = torch.nn.functional.pad(self.restored, (0, grown), value=-1)
        late = (found < base) & (found != self.restored.take(slots)) & (found >= 0)
        if bool(late.any()):
            stamps[slots[late]] = base
            found = stamps.take(slots)
        return found

    def retire(self) -> None:
        """Lets every written slot, and each other one at its first write, jump to a new base."""
        stamps = self._counters.tensor
        self.draw_base(stamps)
        self._counters.log_unknown()
        stamps.masked_fill_(stamps >= 0, self._counters.base)
        self._remember()

    def put_back(self, saved: torch.Tensor | None, lineage: str | None, records: int) -> None:
        """Puts the stamps of a checkpoint into the counters; see :func:`~.restore.restore`.

        Args:
            saved (torch.Tensor or None): the stamps, one for each of the counters.
            lineage (str or None): of the checkpoint.
            records (int): how many slots hold a record now.
        """
        stamps = self._counters.tensor
        never_written = not bool((stamps >= 0).any())
        # Where there is a base already, handles of before may be about, such as those of a buffer
        # whose process was started again.
        is_fresh = never_written and not self._counters.base
        if saved is not None and (never_written or lineage == self.lineage):
            self.draw_base(stamps, saved)
            self._counters.log_unknown()
            self.lineage = lineage or self.lineage
            if self.ran_on is not None:
                # It may have got its shape meanwhile.
                saved = saved.masked_fill(self.ran_on[: stamps.numel()], self._counters.base)
            stamps.copy_(saved)  # at once: no stamp of a record that ran on is here for a moment
        else:
            self.retire()
        held = stamps[:records]
        held.masked_fill_(held < 0, 0 if is_fresh else self._counters.base)
        self._remember()


def fold_in(storage: Storage, counters: Counters, history: History, slots: int) -> None:
    """Takes notice of counters that a TorchRL writer put in place of ours; under the lock.

    Its ``load_state_dict`` does so, and its growth beyond 2**20 slots. Nothing tells which records
    those counters speak of, so every handle of now turns stale.
    """
    foreign = getattr(storage, STAMPS_ATTRIBUTE)
    ours = counters.reach(foreign.numel(), slots)
    if foreign is not ours:  # else another thread has done it
        size = min(ours.numel(), foreign.numel())
        torch.maximum(ours[:size], foreign[:size], out=ours[:size])
        setattr(storage, STAMPS_ATTRIBUTE, ours)
        history.retire()
