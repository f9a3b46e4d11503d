"""Cells: what the coordinates of a storage with ``ndim > 1`` name.

Such a storage has one stamp per dim-0 slot, and a slot is a row of cells, each with a priority of
its own. A writer replaces whole rows; a learner samples and updates cells. The number of a cell is
that of its leaf in the priority tree: row by row, as ``flatten()`` counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import TensorStorage

from .index import integer_tensor, native_array
from .priorities import samplers_on

_UPDATE = "update_priority_if_present()"


class Grid:
    """The shape of a storage with ``ndim > 1``, which a lazy one gets at its first write.

    Guarded by the lock of the storage's table.

    Args:
        storage (TensorStorage): the storage.

    Attributes:
        ndim (int): its number of dimensions.
        slots (int): how many slots it can hold; before that is known, how many at most.
        settled (bool): whether this is known from the records.
    """

    def __init__(self, storage: TensorStorage) -> None:
        self._storage = storage
        self.ndim: int = storage.ndim
        self._row = torch.Size([])
        self.slots: int = storage.max_size
        self.settled = False
        self.settle()

    @property
    def row(self) -> torch.Size:
        """The shape of a slot; empty before it is known."""
        if not self.settled:
            self.settle()
        return self._row

    @property
    def width(self) -> int:
        """How many cells a slot has."""
        return self.row.numel()

    @property
    def length(self) -> int:
        """How many slots hold a record."""
        return -(len(self._storage) // -self.width)

    def settle(self) -> None:
        """Takes over the shape of the records, if the storage has some."""
        if not self.settled and self._storage.initialized:
            shape = shape_of_records(self._storage)
            self._row, self.slots = shape[1:], shape[0]
            # A process that opens another's records is not told that the capacity was rounded up.
            self._storage.max_size = shape.numel()
            self.settled = True

    def fit(self, data: Any, single: bool = False) -> None:
        """Finds out, before a first write, which shape it will give the storage.

        Args:
            data: what is written: N slots, or one with ``single=True``.
            single (bool, optional): see there. Defaults to False.

        Raises:
            ValueError: if the data lack dimensions, or make more cells than a priority tree over
                the storage has leaves: the compiled tree checks no bounds. Nothing has changed.
        """
        storage = self._storage
        row = _row_of(data, self.ndim, single)
        slots = -(storage.max_size // -row.numel())
        cells = slots * row.numel()
        for sampler in samplers_on(storage):
            if sampler.max_size < cells:
                raise ValueError(
                    f"A first write of records of shape {tuple(row)} rounds max_size="
                    f"{storage.max_size} up to {slots} slots with {cells} cells: a priority "
                    f"sampler over this storage holds {sampler.max_size}. Give the storage a "
                    f"max_size that is a multiple of {row.numel()}, or the sampler a larger "
                    "max_capacity."
                )
        self._row, self.slots = row, slots

    def split(self, index: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the slots that ``index`` names, and of coordinates which are of the row's shape.

        Args:
            index: a tuple with one part per dimension or a ``[..., ndim]`` tensor: coordinates.
                Anything else: slots.
            name (str): what the index is called in an error.
        """
        if not isinstance(index, tuple):
            index = integer_tensor(index, name)
            if index.ndim < 2 or index.shape[-1] != self.ndim:
                return index, None
        cells = coordinates(index, self.ndim, name)
        rest = cells[..., 1:]
        inside = (rest >= 0) & (rest < rest.new_tensor(self.row)) if self.row else rest >= 0
        return cells[..., 0], inside.all(-1)

    def number(self, cells: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of cells given by coordinates ``[..., ndim]``; -1 out of range."""
        if not self.row:
            return torch.full_like(cells[..., 0], -1)
        shape = (self.slots, *self.row)
        inside = ((cells >= 0) & (cells < cells.new_tensor(shape))).all(-1)
        steps = cells.new_tensor([math.prod(shape[dim + 1 :]) for dim in range(self.ndim)])
        return torch.where(inside, (cells * steps).sum(-1), -1)

    def cells_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the coordinates of every cell of ``slots`` (``[N]``): ``[N * width, ndim]``."""
        grids = [torch.arange(size, device=slots.device) for size in self.row]
        return torch.cartesian_prod(slots, *grids).reshape(-1, self.ndim)

    def writes(self, index: Any) -> torch.Tensor:
        """Returns the slots that a write to ``index`` puts a record into, as often as it does.

        The cells of a slot are one write; a cell that is named twice was written twice.
        """
        slots, inside = self.split(index, "advance(): index")
        if inside is None:
            return slots.reshape(-1)
        cells = coordinates(index, self.ndim, "advance(): index").reshape(-1, self.ndim)
        cells, times = torch.unique(cells, dim=0, return_counts=True)
        slots, which = torch.unique(cells[:, 0], return_inverse=True)
        writes = torch.zeros_like(slots).scatter_reduce(0, which, times, "amax")
        return slots.repeat_interleave(writes)

    def without_outsiders(self, index: Any, generation: Any) -> tuple[Any, torch.Tensor]:
        """Returns a stamp of -1 for coordinates out of range, and 0 in the place of these.

        What only compares the stamp of their slot would take them for cells of the next one.
        """
        if isinstance(index, tuple):
            index = coordinates(index, self.ndim, "update_if_present(): index")
        taken = torch.as_tensor(generation)
        _, inside = self.split(index, "update_if_present(): index")
        if inside is None:
            return index, taken
        cells = torch.as_tensor(index)
        inside = inside.to(taken.device).reshape(taken.shape)
        taken = torch.where(inside, taken, -1)
        return torch.where(inside.to(cells.device).unsqueeze(-1), cells, 0), taken

    def slots_assigned(self, index: Any, dim_extend: int) -> torch.Tensor:
        """Returns the slots that ``rb[index] = value`` touches: int64 ``[slots]``.

        Args:
            index: the index, which counts along ``dim_extend`` and, in a tuple, on from there.
            dim_extend (int): the buffer's.

        Raises:
            ValueError: if the storage has no records, and so no shape.
        """
        if not self.row:
            raise ValueError(
                f"rb[index] = records needs a storage that has its shape when ndim={self.ndim}: "
                "got one that was never written. Use extend()."
            )
        # TorchRL writes a tuple through rb[:], which ends at the length.
        slots = self.length if isinstance(index, tuple) else self.slots
        touched = torch.zeros((slots, *self.row), dtype=torch.bool)
        view = touched.transpose(dim_extend, 0)
        if isinstance(index, tuple) and any(part is None or part is Ellipsis for part in index):
            view[:] = True
        else:
            view[index[: self.ndim] if isinstance(index, tuple) else native_array(index)] = True
        return touched.reshape(slots, -1).any(1).nonzero()[:, 0]


def coordinates(index: Any, ndim: int, name: str) -> torch.Tensor:
    """Returns ``index`` as coordinates: int64 ``[..., ndim]``.

    Args:
        index: a tuple with one integer tensor, array, sequence or int per dimension, all of one
            shape; or a ``[..., ndim]`` tensor, array or sequence with at least two dimensions.
        ndim (int): the number of dimensions of the storage.
        name (str): what the index is called in an error.

    Raises:
        TypeError: for anything that is no integer.
        ValueError: for anything else.
    """
    if isinstance(index, tuple):
        if len(index) != ndim:
            raise ValueError(
                f"{name} must hold one tensor per storage dimension: got a tuple of {len(index)} "
                f"for a storage with ndim={ndim}."
            )
        parts = [integer_tensor(part, name) for part in index]
        shapes = [tuple(part.shape) for part in parts]
        if len(set(shapes)) > 1:
            raise ValueError(f"{name} must hold tensors of one shape: got shapes {shapes}.")
        return torch.stack([part.to(parts[0].device) for part in parts], -1)
    cells = integer_tensor(index, name)
    if cells.ndim == 1 and not cells.numel():
        return cells.reshape(0, ndim)
    if cells.ndim < 2:
        raise ValueError(
            f"{name} of a storage with ndim={ndim} must be coordinates: got shape "
            f"{tuple(cells.shape)}, which could be rows or cells? Pass a tuple of one tensor per "
            f"dimension or a [N, {ndim}] tensor, as sample() and extend() return."
        )
    if cells.shape[-1] != ndim:
        raise ValueError(
            f"{name} of a storage with ndim={ndim} must be coordinates of shape [..., {ndim}]: got "
            f"shape {tuple(cells.shape)}."
        )
    return cells


def checked_cells(
    index: Any, generation: Any, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor, torch.Size, torch.device]:
    """Returns cell numbers and stamps, int64 ``[N]`` each, and shape and device of the mask."""
    cells = coordinates(index, grid.ndim, f"{_UPDATE}: index")
    taken = integer_tensor(generation, f"{_UPDATE}: generation")
    mask_shape = cells.shape[:-1]
    if taken.shape != mask_shape:
        raise ValueError(
            f"{_UPDATE} needs one generation per cell: got generation of shape "
            f"{tuple(taken.shape)} for {tuple(mask_shape)} cells."
        )
    return grid.number(cells).reshape(-1), taken.reshape(-1), mask_shape, cells.device


def priority_per_cell(priority: Any, mask_shape: torch.Size, dim_extend: int) -> Any:
    """Returns ``priority`` with one row per cell, or as it is if it is one number for all.

    Args:
        priority: one number per cell, in the shape of the cells, or one for all. Further
            dimensions stay. For the flat cells that ``extend`` returned also in the shape of the
            data that was extended, ``[B, T]``: transposed as in ``update_priority``.
        mask_shape (torch.Size): the shape of the cells.
        dim_extend (int): the buffer's.

    Raises:
        TypeError: if it is no number.
        ValueError: if the shapes do not pair.
    """
    try:
        given = torch.as_tensor(native_array(priority))
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(f"{_UPDATE}: priority must be numbers: got {priority!r}.") from err
    if given.numel() == 1:
        return given
    cells = mask_shape.numel()
    if given.shape[: len(mask_shape)] == mask_shape:
        return given.reshape(cells, *given.shape[len(mask_shape) :])
    if len(mask_shape) == 1 and given.numel() == cells and given.ndim > max(1, dim_extend):
        return given.transpose(dim_extend, 0).reshape(cells)
    raise ValueError(
        f"{_UPDATE} needs one priority per cell, or one for all: got priority of shape "
        f"{tuple(given.shape)} for {tuple(mask_shape)} cells."
    )


def shape_of_records(storage: TensorStorage) -> torch.Size:
    """Returns slots and row of a storage that has its records; TorchRL's way alters its length."""
    return _shape(storage._storage)[: storage.ndim]


def _row_of(data: Any, ndim: int, single: bool) -> torch.Size:
    """The shape of a slot that ``data`` would make."""
    if isinstance(data, list) and data:
        data, single = data[0], True
    shape = _shape(data)
    row = shape[: ndim - 1] if single else shape[1:ndim]
    if len(row) != ndim - 1 or not row.numel():
        raise ValueError(
            f"A storage with ndim={ndim} needs records of {ndim - 1} or more dimensions: got "
            f"{'a record' if single else 'records'} of shape {tuple(shape)}."
        )
    return row


def _shape(data: Any) -> torch.Size:
    if not isinstance(data, torch.Tensor) and not is_tensor_collection(data):
        data = tree_leaves(data)[0]
    return data.shape
