"""The counters of a table, and the log of the last ring writes that advanced them.

The counters are one int64 tensor that is mutated in place and never replaced, since others hold it:
TorchRL's own writers find it on the storage, and a state dict aliases it. To advance a slot is to
add 1 to its counter, or, at its first write after a restore, to bring it to the base at least.
"""

from __future__ import annotations

import torch

from ..processes.cells import Cells

# Up to here (1 GiB of counters) there is one for every slot from the start; beyond it, and for
# lists without a maximum, they grow with the records.
EAGER_SLOTS = 2**27
SMALLEST = 1024

LOG_ENTRIES = 64
_FIELDS = 4  # start, count, and the storage's revision before and after the write
_UNFINISHED = -1
# Positions of the cells: the base, how many entries the log ever had, and the last of them.
_BASE, _END, _ENTRIES = 0, 1, 2


class Counters:
    """One int64 counter per slot, -1 where no record was ever put. The table's lock guards them.

    The log is an aid to asynchronous learners, and no authority: where it has a gap, since it is
    short or something else wrote, they compare all slots. An entry is made before the stamps and
    the data are touched, and finished after: of a writer that died in between, or failed, an
    unfinished entry tells.

    Args:
        slots (int): how many slots the storage can hold.
        records (int): how many of them hold a record, each of which begins at 0.
        device (torch.device): where the counters are.

    Attributes:
        tensor (torch.Tensor): the counters, int64 ``[slots]``, or fewer where they grow.
        grows (bool): whether they grow with the records.
        cells (Cells): the base and the log, which processes share.
    """

    def __init__(self, slots: int, records: int, device: torch.device) -> None:
        self.grows: bool = slots > EAGER_SLOTS
        size = max(SMALLEST, records) if self.grows else slots
        with torch.inference_mode(False):  # they outlive it
            self.tensor = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.tensor[:records] = 0
        self.cells = Cells([0] * (_ENTRIES + LOG_ENTRIES * _FIELDS))

    @property
    def base(self) -> int:
        """The first write of a slot after a restore or a copy lands at ``max(stamp + 1, base)``."""
        return self.cells.view[_BASE]

    @base.setter
    def base(self, base: int) -> None:
        self.cells.view[_BASE] = base

    @property
    def base_tensor(self) -> torch.Tensor:
        """The base as an int64 tensor, for compiled regions."""
        return self.cells.tensor[_BASE]

    # ------------------------------------------------------------------ advancing

    def advance(self, slots: torch.Tensor) -> None:
        """Advances ``slots`` (int64 ``[N]``, in range) once for each time that they are named."""
        self.log_unknown()
        if self.base:
            self.tensor[slots] = self.tensor[slots].clamp_(min=self.base - 1)
        self.tensor.index_add_(0, slots, torch.ones_like(slots))

    def advance_ring(self, start: int, count: int, slots: int) -> None:
        """Advances ``count`` slots from ``start`` on around a ring of ``slots``, by slices."""
        laps, rest = divmod(count, slots)
        end = start + rest
        parts = [(self.tensor, laps)] if laps else []
        parts.append((self.tensor[start:end], 1))
        if end > slots:
            parts.append((self.tensor[: end - slots], 1))
        for part, writes in parts:
            if self.base:
                part.clamp_(min=self.base - 1)
            part.add_(writes)

    def advance_written(self) -> None:
        """Advances every slot that holds or held a record."""
        self.log_unknown()
        advanced = self.tensor.clamp(min=self.base - 1).add_(1)
        torch.where(self.tensor >= 0, advanced, self.tensor, out=self.tensor)

    def stamp_rest(self) -> None:
        """Gives the slots without a stamp the base: their records came past every writer."""
        without = self.tensor < 0
        if bool(without.any()):
            self.log_unknown()
            self.tensor.masked_fill_(without, self.base)

    # ------------------------------------------------------------------ size and device

    def settle(self, slots: int, device: torch.device) -> None:
        """Takes over the number of slots and the device that a lazy storage got when written."""
        if self.tensor.device != device:
            self.tensor.data = self.tensor.to(device)
        if self.tensor.numel() > slots:
            if self.tensor.is_shared():  # other processes have the memory
                self.tensor.resize_(slots)
            else:
                self.tensor.data = self.tensor[:slots].clone()

    def reach(self, size: int, slots: int) -> torch.Tensor:
        """Returns the counters, grown where they have to hold ``size`` of ``slots`` slots."""
        had = self.tensor.numel()
        if size > had and self.grows:
            self.tensor.resize_(min(max(size, 2 * had), slots))
            self.tensor[had:] = -1
        return self.tensor

    def fitted(self, saved: torch.Tensor, slots: int) -> torch.Tensor:
        """Returns saved counters in this size and on this device; these grow where they may.

        Raises:
            ValueError: if they are no int64 ``[slots]``, or more. Nothing has changed then.
        """
        if saved.dtype is not torch.int64 or saved.ndim != 1 or saved.numel() > slots:
            raise ValueError(
                f"The checkpoint's stamps must be int64 of shape [slots], at most {slots} of them: "
                f"got {saved.dtype} of shape {tuple(saved.shape)}."
            )
        if self.grows:  # they are more than there are records
            written = (saved >= 0).nonzero()
            saved = saved[: int(written.max()) + 1 if written.numel() else 0]
        size = self.reach(saved.numel(), slots).numel()
        padding = (0, size - saved.numel())
        return torch.nn.functional.pad(saved.to(self.tensor.device), padding, value=-1)

    # ------------------------------------------------------------------ the log of ring writes

    @property
    def log_end(self) -> int:
        """How many entries there ever were: the position of a reader who has seen everything."""
        return self.cells.view[_END]

    def log_begin(self, start: int, count: int, revision: int) -> None:
        """Begins the entry of a write of ``count`` slots from ``start`` on, at this revision."""
        view = self.cells.view
        at = _ENTRIES + view[_END] % LOG_ENTRIES * _FIELDS
        view[at], view[at + 1], view[at + 2], view[at + 3] = start, count, revision, _UNFINISHED
        view[_END] += 1

    def log_finish(self, revision: int) -> None:
        """Finishes the last entry: the write is made, and this is the revision after it."""
        view = self.cells.view
        view[_ENTRIES + (view[_END] - 1) % LOG_ENTRIES * _FIELDS + 3] = revision

    def log_unknown(self) -> None:
        """Notes that any slot may have advanced: an entry that nobody will finish."""
        self.log_begin(0, 0, 0)

    def ranges_since(
        self, position: int, revision: int, now: int, slots: int
    ) -> list[tuple[int, int]] | None:
        """The ranges ``(start, count)`` written since a reader was here; None if it can't tell.

        Writes that follow each other in the ring, which has ``slots`` slots, make one range.

        Args:
            position (int): the reader's :attr:`log_end` of then.
            revision (int): the storage's revision of then.
            now (int): its revision of now. Each step between has to be that of an entry.
            slots (int): of the ring.
        """
        view = self.cells.view
        if view[_END] - position > LOG_ENTRIES:
            return None
        ranges: list[tuple[int, int]] = []
        first = total = 0
        for entry in range(position, view[_END]):
            at = _ENTRIES + entry % LOG_ENTRIES * _FIELDS
            start, count, before, after = view[at : at + _FIELDS].tolist()
            if after == _UNFINISHED or before != revision:
                return None
            if total and start == (first + total) % slots:
                total += count
                ranges[-1] = (first, total)
            else:
                first, total = start, count
                ranges.append((start, count))
            revision = after
        return ranges if revision == now else None
