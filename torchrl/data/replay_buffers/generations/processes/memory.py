"""Storages over the same memory, which would have two tables and two locks for one record.

Within a process they are found when the second table is made. What another program does to the
same files can't be seen.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

import torch
from tensordict import MemoryMappedTensor, is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import Storage, TensorStorage

_tracked: WeakSet[Storage] = WeakSet()


def claim(storage: Storage) -> None:
    """Notes that a storage gets a table.

    Args:
        storage (Storage): the storage.

    Raises:
        ValueError: if another storage of this process that has a table holds its records in the
            same files, folder or tensors.
    """
    if _rivals(storage):
        gc.collect()  # buffers refer to themselves: one that nobody has any more may still be here
    for rival, where in _rivals(storage):
        raise ValueError(
            "Generation tracking needs a storage with memory of its own: got a "
            f"{type(storage).__name__} over {where}, as another {type(rival).__name__} with "
            "tracking is. Give both buffers the same storage object."
        )
    _tracked.add(storage)


def _rivals(storage: Storage) -> list[tuple[Storage, str]]:
    mine = list(_places(storage))
    return [
        (other, str(place))
        for other in list(_tracked)
        if other is not storage
        for place in _places(other)
        if any(_meet(place, own) for own in mine)
    ]


class _Place:
    """Where some records are: a file or a folder, or a range of addresses on a device.

    Args:
        name (str): what it is called in an error.
        of (tuple): the file, the folder or the device.
        begin (int, optional): the first address, of a range.
        end (int, optional): the one behind the last.
    """

    def __init__(self, name: str, of: tuple[object, ...], begin: int = 0, end: int = 1) -> None:
        self.name, self.of, self.begin, self.end = name, of, begin, end

    def __str__(self) -> str:
        return self.name


def _meet(one: _Place, other: _Place) -> bool:
    return one.of == other.of and one.begin < other.end and other.begin < one.end


def _places(storage: Storage) -> Iterator[_Place]:
    folder = getattr(storage, "scratch_dir", None)
    if folder is not None:
        path = Path(folder).resolve()
        yield _Place(f"the folder {path}", ("folder", path))
    if not isinstance(storage, TensorStorage) or not storage.initialized:
        return
    records = storage._storage
    if is_tensor_collection(records):
        leaves = records.values(include_nested=True, leaves_only=True)
    else:
        leaves = tree_leaves(records)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            continue
        file = leaf._filename if isinstance(leaf, MemoryMappedTensor) else None
        if file is not None and os.path.exists(file):
            found = os.stat(file)
            yield _Place(f"the file {file}", ("file", found.st_dev, found.st_ino))
        begin = leaf.data_ptr()
        strides = zip(leaf.shape, leaf.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in strides)
        end = begin + (last + 1) * leaf.element_size()
        yield _Place("the same tensors", ("tensor", leaf.device), begin, end)
