"""What an index names with ``ndim > 1``: slots, and the cells that a slot is a row of.

Such a storage has one stamp per dim-0 slot, and a priority for each cell. A writer replaces whole
rows; a learner samples and updates cells. The number of a cell is that of its leaf in the priority
tree: row by row, as ``flatten()`` counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import ListStorage, Storage, TensorStorage

from .flat import UPDATE, Flat, Handles
from .index import integer_tensor, native_array


class Grid:
    """The cells of a storage with ``ndim > 1``, whose shape a lazy one gets at its first write.

    The lock of the storage's table guards it.

    Args:
        storage (TensorStorage): the storage.
    """

    def __init__(self, storage: TensorStorage) -> None:
        self._storage = storage
        self.ndim: int = storage.ndim
        self._row = torch.Size([])
        self._slots: int = storage.max_size
        self.is_settled = False

    def _settle(self) -> None:
        """Takes over the shape of the records, if the storage has some."""
        if not self.is_settled and self._storage.initialized:
            shape = shape_of_records(self._storage)
            self._row, self._slots = shape[1:], shape[0]
            # A process that opens another's records is not told that the capacity was rounded up.
            self._storage.max_size = shape.numel()
            self.is_settled = True

    @property
    def row(self) -> torch.Size:
        """The shape of a slot; empty before it is known."""
        self._settle()
        return self._row

    @property
    def slots(self) -> int:
        """How many slots the storage can hold; before that is known, how many at most."""
        self._settle()
        return self._slots

    @property
    def width(self) -> int:
        """How many cells a slot has."""
        return self.row.numel()

    @property
    def length(self) -> int:
        """How many slots hold a record, from the first on."""
        return -(len(self._storage) // -self.width)

    def fit(self, data: Any, leaves: int | None, single: bool = False) -> None:
        """Finds out which shape a first write will give the storage.

        Args:
            data: what is written: N slots, or one with ``single=True``.
            leaves (int or None): how many the smallest priority tree over the storage has.
            single (bool, optional): see ``data``. Defaults to False.

        Raises:
            ValueError: if the data lack dimensions, or make more cells than a priority tree has
                leaves: the compiled tree checks no bounds. Nothing has changed then.
        """
        if self._storage.initialized:
            return
        storage = self._storage
        row = _row_of(data, self.ndim, single)
        slots = -(storage.max_size // -row.numel())
        cells = slots * row.numel()
        if leaves is not None and leaves < cells:
            raise ValueError(
                f"A first write of records of shape {tuple(row)} rounds max_size="
                f"{storage.max_size} up to {slots} slots with {cells} cells: a priority sampler "
                f"over this storage holds {leaves}. Give the storage a max_size that is a multiple "
                f"of {row.numel()}, or the sampler a larger max_capacity."
            )
        self._row, self._slots = row, slots

    def split(self, index: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the slots that ``index`` names, and which of its coordinates are in the row.

        Args:
            index: a tuple with one part per dimension or a ``[..., ndim]`` tensor: coordinates.
                Anything else: slots, of which nothing more is known (None).
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

    def slots_of(self, leaves: torch.Tensor) -> torch.Tensor:
        """Returns the slots of leaves."""
        return leaves // self.width

    def marked(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the coordinates of every cell of ``slots`` (``[N]``): ``[N * width, ndim]``."""
        grids = [torch.arange(size, device=slots.device) for size in self.row]
        return torch.cartesian_prod(slots, *grids).reshape(-1, self.ndim)

    def rows(self, index: Any) -> torch.Tensor:
        """Returns a number for each row of what a write returned; equal ones take one place."""
        cells = torch.as_tensor(index)
        return self._numbers(cells) if cells.ndim > 1 else cells.reshape(-1)

    def _numbers(self, cells: torch.Tensor) -> torch.Tensor:
        """The numbers of cells given by coordinates ``[..., ndim]``; -1 out of range."""
        if not self.row:
            return torch.full_like(cells[..., 0], -1)
        shape = (self.slots, *self.row)
        inside = ((cells >= 0) & (cells < cells.new_tensor(shape))).all(-1)
        steps = cells.new_tensor([math.prod(shape[dim + 1 :]) for dim in range(self.ndim)])
        return torch.where(inside, (cells * steps).sum(-1), -1)

    def handles(self, index: Any, generation: Any) -> Handles:
        """Validates the handles of a conditional update, which names cells by their coordinates.

        Raises:
            TypeError: for anything that is no integer.
            ValueError: for anything but coordinates, and unless there is one stamp for each cell.
        """
        cells = coordinates(index, self.ndim, f"{UPDATE}: index")
        taken = integer_tensor(generation, f"{UPDATE}: generation")
        shape = cells.shape[:-1]
        if taken.shape != shape:
            raise ValueError(
                f"{UPDATE} needs one generation per cell: got generation of shape "
                f"{tuple(taken.shape)} for {tuple(shape)} cells."
            )
        return Handles(self._numbers(cells).reshape(-1), taken.reshape(-1), shape, cells.device)

    def paired(self, priority: Any, shape: torch.Size, dim_extend: int) -> Any:
        """Returns priorities with one row for each of the handles, or one number for all.

        Args:
            priority: one number per cell, in the shape of the cells, or one for all. Further
                dimensions stay. For the flat cells that ``extend`` returned also in the shape of
                the data that was extended, ``[B, T]``: transposed as in ``update_priority``.
            shape (torch.Size): the shape of the handles.
            dim_extend (int): the buffer's.

        Raises:
            TypeError: if it is no number.
            ValueError: if the shapes do not pair.
        """
        try:
            given = torch.as_tensor(native_array(priority))
        except (TypeError, ValueError, RuntimeError) as err:
            raise TypeError(f"{UPDATE}: priority must be numbers: got {priority!r}.") from err
        if given.numel() == 1:
            return given
        cells = shape.numel()
        if given.shape[: len(shape)] == shape:
            return given.reshape(cells, *given.shape[len(shape) :])
        if len(shape) == 1 and given.numel() == cells and given.ndim > max(1, dim_extend):
            return given.transpose(dim_extend, 0).reshape(cells)
        raise ValueError(
            f"{UPDATE} needs one priority per cell, or one for all: got priority of shape "
            f"{tuple(given.shape)} for {tuple(shape)} cells."
        )

    def inside(self, index: Any, generation: Any) -> tuple[Any, Any]:
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

    def assigned(self, index: Any, value: Any, dim_extend: int) -> torch.Tensor:
        """Returns the slots that ``rb[index] = value`` touches: int64 ``[slots]``.

        Args:
            index: the index, which counts along ``dim_extend`` and, in a tuple, on from there.
            value: the records.
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


Layout = Flat | Grid


def layout_of(storage: Storage) -> Layout:
    """Returns the layout of a storage.

    Raises:
        TypeError: for a kind of storage whose slots can't be told.
        ValueError: for a storage with ``ndim > 1`` that was made of records: TorchRL takes its
            slots for cells.
    """
    if not isinstance(storage, (TensorStorage, ListStorage)):
        raise TypeError(
            "Generation tracking needs a TensorStorage, LazyTensorStorage, LazyMemmapStorage or "
            f"ListStorage: got {type(storage).__name__}."
        )
    if storage.ndim == 1:
        return Flat(storage)
    shape = shape_of_records(storage) if storage.initialized else None
    if shape is not None and shape.numel() != storage.max_size:
        raise ValueError(
            f"Generation tracking with ndim={storage.ndim} needs a max_size that counts cells: "
            f"got {type(storage).__name__} with max_size={storage.max_size} and records of shape "
            f"{tuple(shape)}. Use LazyTensorStorage({shape.numel()}, ndim={storage.ndim}) and "
            "extend it with the records."
        )
    return Grid(storage)


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
