"""The leaves of a tensor storage, written and read without TensorDict's own indexing.

TensorDict spends several times as long on each leaf as the copy takes. Here the leaves of a storage
are known by key: records of the same keys and shapes are copied slice by slice, and a batch is one
``index_select`` per leaf. Records that differ in anything go TorchRL's way.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from tensordict import MemoryMappedTensor, TensorDict
from tensordict.utils import is_tensorclass
from torchrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    Storage,
    TensorStorage,
)

# Whose get() and set() are nothing but an indexing of the records.
_PLAIN_STORAGES = (TensorStorage, LazyTensorStorage, LazyMemmapStorage)
_STOCK = {cls: (cls.get, cls.set) for cls in _PLAIN_STORAGES}
_PLAIN_LEAVES = (torch.Tensor, MemoryMappedTensor)

_known: WeakKeyDictionary[Storage, Columns] = WeakKeyDictionary()

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Columns:
    """The leaves of what a storage with ``ndim=1`` on the CPU holds, or of a tensordict in it.

    The lock of the storage's table guards the records.

    Args:
        records: a tensor, a tensordict or a tensorclass of tensors.

    Raises:
        TypeError: for anything else.
    """

    def __init__(self, records: Any) -> None:
        self._records = records
        self._children: dict[str, Columns] = {}
        self._leaf: torch.Tensor | None = None
        if type(records) in _PLAIN_LEAVES and records.is_cpu:
            # MemoryMappedTensor asks a few questions of its own at each operation.
            is_plain = type(records) is torch.Tensor
            self._leaf = records if is_plain else records.as_subclass(torch.Tensor)
            self._feature = records.shape[1:]
            return
        plain = _plain(records)
        if plain is None or plain._td_dim_names is not None:
            raise TypeError(f"got {type(records).__name__}")
        self._plain = plain
        self._batch_size, self._device = plain._batch_size, plain._device
        self._wrap = records._from_tensordict if plain is not records else None
        self._children = {key: Columns(entry) for key, entry in plain._tensordict.items()}

    def is_of(self, records: Any) -> bool:
        """Whether these are the leaves of ``records`` still: any of them may be replaced."""
        if self._records is not records:
            return False
        if self._leaf is not None:
            return True
        plain = self._plain
        entries = plain._tensordict
        if (
            plain._batch_size is not self._batch_size
            or plain._device is not self._device
            or plain._td_dim_names is not None
            or len(entries) != len(self._children)
        ):
            return False
        for key, child in self._children.items():
            entry = entries.get(key)
            if entry is not child._records or (child._leaf is None and not child.is_of(entry)):
                return False
        return True

    def pairs(self, data: Any, lead: torch.Size, **more: torch.Tensor) -> Pairs | None:
        """Pairs the leaves with those of records that are to be written.

        Args:
            data: the records.
            lead (torch.Size): the shape that comes before that of a record: ``[N]``, or ``[]``.
            more (torch.Tensor): entries that take precedence over those of ``data``.

        Returns:
            Leaves and values; None if the records have other keys, shapes, dtypes or devices.
        """
        pairs: Pairs = []
        if more and (plain := _plain(data)) is not None:
            entries = {**plain._tensordict, **more}
            return pairs if self._pair_all(entries, lead, pairs) else None
        return pairs if self._pair(data, lead, pairs) else None

    def _pair(self, data: Any, lead: torch.Size, pairs: Pairs) -> bool:
        leaf = self._leaf
        if leaf is None:
            plain = _plain(data)
            return plain is not None and self._pair_all(plain._tensordict, lead, pairs)
        if (
            type(data) not in _PLAIN_LEAVES
            or data.shape != lead + self._feature
            or data.dtype is not leaf.dtype
            or not data.is_cpu
            or data.layout is not torch.strided
            or data.requires_grad
        ):
            return False
        pairs.append((leaf, data))
        return True

    def _pair_all(self, entries: dict[str, Any], lead: torch.Size, pairs: Pairs) -> bool:
        if len(entries) != len(self._children):
            return False
        for key, child in self._children.items():
            if key not in entries or not child._pair(entries[key], lead, pairs):
                return False
        return True

    def read(self, index: torch.Tensor) -> Any:
        """Returns the records at ``index`` (int64 ``[N]``, in range) in fresh memory."""
        if self._leaf is not None:
            return self._leaf.index_select(0, index)
        entries = {key: child.read(index) for key, child in self._children.items()}
        shape = index.shape + self._batch_size[1:]
        read = TensorDict._new_unsafe(entries, shape, device=self._device)
        return read if self._wrap is None else self._wrap(read, {})


def _plain(records: Any) -> TensorDict | None:
    """The tensordict of a tensordict or tensorclass of tensors; None of anything else."""
    if is_tensorclass(records) and not records._non_tensordict:
        records = records._tensordict
    return records if type(records) is TensorDict else None


def columns_of(storage: Storage) -> Columns | None:
    """Returns the columns of what a storage holds now; None if they can't stand in for it.

    That is so for a storage that has no records yet, is of another kind, on another device, has
    ``ndim > 1``, or is a user's subclass.
    """
    cls = type(storage)
    if (
        _STOCK.get(cls) != (cls.get, cls.set)
        or {"get", "set"} & vars(storage).keys()
        or not storage.initialized
        or storage.ndim > 1
        or storage._compilable
    ):
        return None
    records = storage._storage
    columns = _known.get(storage)
    if columns is not None and columns.is_of(records):
        return columns
    try:
        columns = _known[storage] = Columns(records)
    except TypeError:
        return None
    return columns


def copy_ring(pairs: Pairs, start: int, rows: int, capacity: int) -> None:
    """Copies a batch into a ring from slot ``start`` on; where it laps, only the rows that stay."""
    stop = start + rows
    if stop <= capacity:
        for leaf, values in pairs:
            leaf[start:stop] = values
        return
    skipped = max(rows - capacity, 0)
    begin = (start + skipped) % capacity
    to_end = min(rows - skipped, capacity - begin)
    for leaf, values in pairs:
        leaf[begin : begin + to_end] = values[skipped : skipped + to_end]
        leaf[: rows - skipped - to_end] = values[skipped + to_end :]


def copy_one(pairs: Pairs, slot: int) -> None:
    """Copies one record into a slot."""
    for leaf, values in pairs:
        leaf[slot] = values
