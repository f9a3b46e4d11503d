"""Records as users give them: how many there are, and whether a storage can take them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torchrl.data.replay_buffers import Storage, TensorStorage


def num_rows(data: Any) -> int:
    """Returns how many records a batch has."""
    if isinstance(data, (list, torch.Tensor)) or is_tensor_collection(data):
        return len(data)
    return len(tree_leaves(data)[0])


def rows_of(data: Any, part: slice) -> Any:
    """Returns a part of a batch of records."""
    if isinstance(data, (list, torch.Tensor)) or is_tensor_collection(data):
        return data[part]
    return tree_map(lambda leaf: leaf[part], data)


def check_records(
    storage: Storage,
    data: Any,
    lead: torch.Size,
    name: str,
    *,
    casts: bool | None = None,
    but: str | None = None,
) -> None:
    """Refuses records that a storage can't take, as far as that can be known beforehand.

    Args:
        storage (Storage): the storage; of one that is no tensor storage, or has no records yet,
            nothing is known.
        data: the records.
        lead (torch.Size): the shape that comes before that of a record: ``[N]``, or ``[]`` for one.
        name (str): the method, in an error.

    Keyword Args:
        casts (bool, optional): whether the storage casts other dtypes. Defaults to whether this is
            a single record: TorchRL writes it by an integer, and a batch by a tensor of slots.

        but (str, optional): the key of an entry that the writer writes anew.

    Raises:
        ValueError: for records of another kind, or with a shape or dtype that does not go into the
            storage.
    """
    if not isinstance(storage, TensorStorage) or not storage.initialized:
        return
    records = storage._storage
    casts = not lead if casts is None else casts
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0:
        data = data.tensordicts
    if isinstance(data, list):
        for record in data:
            _check(records, record, lead[1:], name, True, but)
    else:
        _check(records, data, lead, name, casts, but)


def _check(
    records: Any, data: Any, lead: torch.Size, name: str, casts: bool, but: str | None
) -> None:
    if is_tensor_collection(records):
        if not is_tensor_collection(data):
            raise ValueError(
                f"{name} needs records in a tensordict, as the storage has: got "
                f"{type(data).__name__}."
            )
        batch, wanted = data.batch_size, lead + records.batch_size[1:]
        fits = batch == wanted[len(wanted) - len(batch) :] if batch else wanted in ((), (1,))
        if not fits:
            raise ValueError(
                f"{name} needs records of the batch size {list(wanted)}, as the storage has it: "
                f"got {list(batch)}."
            )
        for key in records.keys(include_nested=True, leaves_only=True):
            value = data.get(key, None)
            if value is not None and key != but:
                _check_leaf(records.get(key), value, lead, f"{name}: {key!r}", casts)
        return
    mine, structure = tree_flatten(records)
    theirs, given = tree_flatten(data)
    if structure != given:
        raise ValueError(f"{name} needs records of the structure {structure}: got {given}.")
    for leaf, value in zip(mine, theirs, strict=True):
        _check_leaf(leaf, value, lead, f"{name}: the record", casts)


def _check_leaf(leaf: torch.Tensor, value: Any, lead: torch.Size, what: str, casts: bool) -> None:
    if not isinstance(leaf, torch.Tensor):
        return
    if is_tensor_collection(value):
        raise ValueError(
            f"{what} must be a tensor, as the storage has it: got {type(value).__name__}."
        )
    layout = getattr(value, "layout", leaf.layout)
    if layout is not leaf.layout:
        raise ValueError(
            f"{what} must be a tensor of the layout {leaf.layout}, as the storage has it: got "
            f"{layout}."
        )
    if not isinstance(value, torch.Tensor):
        return  # TorchRL takes numbers, and data that are no tensors
    wanted = lead + leaf.shape[1:]
    try:
        goes = torch.broadcast_shapes(value.shape, wanted) == wanted
    except RuntimeError:
        goes = False
    if not goes:
        raise ValueError(
            f"{what} must have the shape {list(wanted)}, as the storage has it: got "
            f"{list(value.shape)}."
        )
    if not casts and value.dtype is not leaf.dtype:
        raise ValueError(
            f"{what} must have the dtype {leaf.dtype}, as the storage has it: got {value.dtype}."
        )
