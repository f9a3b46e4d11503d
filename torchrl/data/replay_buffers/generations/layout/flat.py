"""What an index names in a storage of one dimension: slots, each with one record.

A table has one layout: a :class:`Flat` or, with ``ndim > 1``, a :class:`~.grid.Grid` of the same
interface. What differs between the two stands there, and nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torchrl.data.replay_buffers import Storage, TensorStorage

from .index import integer_tensor, slot_index

UPDATE = "update_priority_if_present()"


class Handles(NamedTuple):
    """The handles of a call, validated: N of them, in the order of the call."""

    leaves: torch.Tensor
    """int64 ``[N]``: the leaf of each in a priority tree; -1 for a cell that is out of range."""
    stamps: torch.Tensor
    """int64 ``[N]``."""
    shape: torch.Size
    """The shape of the result's mask."""
    device: torch.device
    """The device of the result's mask."""


class Flat:
    """The slots of a storage of one dimension.

    Args:
        storage (Storage): the storage.
    """

    ndim = 1
    width = 1
    """How many cells a slot has."""
    is_settled = True
    """Whether the number of slots is known."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.slots: int = storage.max_size
        """How many slots the storage can hold."""

    @property
    def length(self) -> int:
        """How many slots hold a record, from the first on."""
        return len(self._storage)

    def fit(self, data: Any, leaves: int | None, single: bool = False) -> None:
        """Finds out which shape a first write will give the storage: here, none."""

    def split(self, index: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the slots that ``index`` names, and which of its coordinates are in the row.

        Args:
            index: see :func:`~.index.slot_index`.
            name (str): what the index is called in an error.
        """
        return slot_index(index, name), None

    def writes(self, index: Any) -> torch.Tensor:
        """Returns the slots that a write to ``index`` puts a record into, as often as it does."""
        return slot_index(index, "advance(): index").reshape(-1)

    def slots_of(self, leaves: torch.Tensor) -> torch.Tensor:
        """Returns the slots of leaves."""
        return leaves

    def marked(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns what ``mark_update`` takes for all that is in ``slots`` (``[N]``)."""
        return slots

    def rows(self, index: Any) -> torch.Tensor:
        """Returns a number for each row of what a write returned; equal ones take one place."""
        return torch.as_tensor(index).reshape(-1)

    def handles(self, index: Any, generation: Any) -> Handles:
        """Validates the handles of a conditional update.

        Raises:
            TypeError: for anything that is no integer.
            ValueError: unless there is one generation for each record.
        """
        if (
            isinstance(index, torch.Tensor)
            and isinstance(generation, torch.Tensor)
            and index.ndim == 1
            and index.shape == generation.shape
            and index.dtype is generation.dtype is torch.int64
            and index.layout is generation.layout is torch.strided
        ):  # as samples give them
            return Handles(index, generation, index.shape, index.device)
        index = slot_index(index, f"{UPDATE}: index")
        slots = _first_of_row(index, "index")
        taken = _first_of_row(integer_tensor(generation, f"{UPDATE}: generation"), "generation")
        if taken.numel() != slots.numel():
            raise ValueError(
                f"{UPDATE} needs one generation per record: got {taken.numel()} generations for "
                f"{slots.numel()} records."
            )
        return Handles(slots, taken, index.shape[:1], index.device)

    def paired(self, priority: Any, shape: torch.Size, dim_extend: int) -> Any:
        """Returns priorities with one row for each of the handles, or one number for all."""
        return priority

    def inside(self, index: Any, generation: Any) -> tuple[Any, Any]:
        """Returns handles whose coordinates are all in range; see :meth:`Grid.inside`."""
        return index, generation

    def assigned(self, index: Any, value: Any, dim_extend: int) -> torch.Tensor:
        """Returns the slots that ``rb[index] = value`` puts records into: int64 ``[slots]``.

        A tuple addresses parts of the records in the slots that its first item names.
        """
        storage, capacity = self._storage, self._storage.max_size
        is_tensor = isinstance(storage, TensorStorage)
        extent = capacity if is_tensor else len(storage)
        if isinstance(index, tuple):
            index = index[0]
        if is_tensor and (index is None or index is True or index is Ellipsis):
            index = slice(None)
        if isinstance(index, slice):
            slots = torch.from_numpy(np.arange(*index.indices(extent)))
            return slots if is_tensor else _list_slots(index, len(value), slots, extent)
        if is_tensor and isinstance(index, (torch.Tensor, np.ndarray, list)):
            mask = torch.as_tensor(index)
            if mask.dtype is torch.bool:
                return mask.nonzero()[:, 0]
        slots = integer_tensor(index, "rb[index]: index").reshape(-1)
        slots = torch.where(slots < 0, slots + extent, slots)
        if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= capacity):
            raise IndexError(f"rb[index] needs slots below {capacity}: got {index!r}.")
        return slots


def _first_of_row(values: torch.Tensor, name: str) -> torch.Tensor:
    """Drops trailing dimensions, along which a row must repeat one value: int64 ``[N]``."""
    if values.ndim == 1:
        return values
    if not values.ndim:
        return values.reshape(1)
    rows = values.reshape(values.shape[0], values[0].numel() if values.shape[0] else 1)
    if not rows.shape[1] or not bool((rows == rows[:, :1]).all()):
        raise ValueError(
            f"{UPDATE} needs one {name} per record: got shape {tuple(values.shape)} whose "
            "trailing dimensions differ within a row. For a one-dimensional storage dim 0 "
            "enumerates the records."
        )
    return rows[:, 0]


def _list_slots(index: slice, rows: int, slots: torch.Tensor, length: int) -> torch.Tensor:
    """The slots that a slice of a list takes: it may grow at its end, not in the middle."""
    start, stop, step = index.indices(length)
    if step == 1 and max(start, stop) == length:
        return torch.arange(start, start + rows)
    if rows != slots.numel():
        raise ValueError(
            f"rb[{index}] needs one record per slot, {slots.numel()} of them: got {rows}. A list "
            "would shift the records behind them into other slots."
        )
    return slots
