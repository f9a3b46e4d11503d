"""What the writers of this package have in common: the table, its stamps, and their checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import Storage

from ..core import restore
from ..core.table import TABLE_ATTRIBUTE, SlotGenerations
from ..core.update import last_rows
from ..layout.index import slot_index

STATE_KEYS = ("_generation", "_lineage", "_live_generation")

# The key under which a sample carries the stamps of its records.
GENERATION_KEY = "index_generation"


class StampingWriter:
    """What the writers of this package have in common; it stands before a TorchRL writer."""

    _storage: Storage
    tracks_generations: bool
    # What a load found while the writer has no storage, until it gets one.
    _pending: dict[str, Any] | None = None

    @property
    def table(self) -> SlotGenerations | None:
        """The table of the storage, whoever put it there; None if the storage has none."""
        return getattr(self._storage, TABLE_ATTRIBUTE, None)

    def register_storage(self, storage: Storage) -> None:
        """Binds the writer to a storage and, if it tracks, makes the storage's table.

        What was loaded before there was a storage goes into the table now, unless another buffer's
        table is there already: that one speaks of the records that are in the slots.
        """
        shared = hasattr(storage, TABLE_ATTRIBUTE)
        if self.tracks_generations:
            table = SlotGenerations.attach(storage)
            if self._pending is not None and not shared:
                table.stamps.fill_(-1)  # a new table: nobody holds its stamps yet
                restore.restore(table, self._pending)
        self._storage = storage
        self._pending = None
        if self.table is not None:
            self.table.sharing.install_writer_cells(self)

    def generations_of(self, index: Any) -> torch.Tensor:
        """Returns the stamps of the records at ``index``.

        Args:
            index: dim-0 slots, any shape. With ``ndim > 1``, a tuple of one tensor per dimension
                or a ``[..., ndim]`` tensor is read as coordinates.

        Returns:
            int64 tensor of the shape and on the device of ``index`` (of coordinates: ``[...]``);
            -1 where there is no usable stamp: never written, emptied, out of range, or the writer
            does not track.
        """
        table = self.table
        if table is None or not self.tracks_generations:
            if isinstance(index, tuple) and self._storage is not None and self._storage.ndim > 1:
                index = index[0]
            return torch.full_like(slot_index(index, "generations_of(): index"), -1)
        return table.of(index)

    def _stamp_late(self, index: Any) -> Any:
        """For a write without a table, in the middle of which another thread made one."""
        table = self.table
        if table is not None:
            table.advance(index)
        return index

    def _fill_gap(self, table: SlotGenerations, length: int, written: torch.Tensor) -> None:
        """Stamps slots that a write brought below the length without a record of their own.

        From now on they can be sampled: they get the default priority, too.
        """
        gap = torch.arange(length, table.layout.length)
        gap = gap[~torch.isin(gap, written.cpu())]
        if gap.numel():
            table.advance(gap)
            give_default_priority(table, gap)

    def _saved_stamps(self) -> dict[str, Any]:
        """Stamps and lineage for a checkpoint; those that wait for a storage if there is none."""
        table = self.table
        if not self.tracks_generations or table is None:
            return dict(self._pending or {})
        return restore.saved_stamps(table)

    def _take_over(self, state: dict[str, Any]) -> None:
        """Takes over the stamps of a checkpoint, whose records are there already."""
        stamps = {key: state[key] for key in STATE_KEYS if state.get(key) is not None}
        table = self.table
        if table is not None:
            restore.restore(table, stamps)
        elif self._storage is None and self.tracks_generations:
            self._pending = stamps


def give_default_priority(
    table: SlotGenerations, slots: torch.Tensor, entities: list[Any] | None = None
) -> None:
    """Gives the records at ``slots`` the default priority in every buffer on a storage.

    Args:
        table (SlotGenerations): the table of the storage.
        slots (torch.Tensor): int64 ``[slots]``; those past the length have no record and no leaf.
        entities (list, optional): the buffers to do it in. Defaults to all that are attached.
    """
    slots = slots[slots < table.layout.length]
    if slots.numel():
        marked = table.layout.marked(slots)
        for entity in table.storage._attached_entities if entities is None else entities:
            entity.mark_update(marked)


def row_generations(table: SlotGenerations, index: Any) -> torch.Tensor:
    """Returns the stamp of each row of a write just made, under the lock that it was made in.

    Args:
        table (SlotGenerations): the table of the storage.
        index: what the write returned: an int, ``[N]`` slots, or ``[N, ndim]`` coordinates.

    Returns:
        int64, shaped like ``index`` (``[N]`` for coordinates ``[N, ndim]``): -1 for a row whose
        slot a later row of the call took.
    """
    stamps = table.of(index)
    if stamps.numel() > table.stamps.numel():
        stamps[~last_rows(table.layout.rows(index))] = -1
    return stamps


def without_stamps(data: Any) -> Any:
    """Returns ``data`` less the stamps that it carries if it is a sample: no part of a record."""
    if isinstance(data, TensorDictBase):
        return data.exclude(GENERATION_KEY) if GENERATION_KEY in data.keys() else data  # noqa: SIM118
    if isinstance(data, list) and data and isinstance(data[0], TensorDictBase):
        return [without_stamps(item) for item in data]
    return data
