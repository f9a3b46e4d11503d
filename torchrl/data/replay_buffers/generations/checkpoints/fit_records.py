"""Whether the records of a checkpoint fit a storage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, is_non_tensor, is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import (
    CompressedListStorage,
    H5StorageCheckpointer,
    ListStorage,
    ListStorageCheckpointer,
    Storage,
    TensorStorage,
)

from ..core.trees import Trees
from ..layout.grid import shape_of_records
from .files import check_memmap, check_tensordict, inside, not_whole, read_json
from .rules import attempted, check_capacity, check_same, integer, is_known, mapping, must, part

# The shape and the dtype of each tensor: by its name in a tensordict, by its position in a tree of
# plain tensors, and None for a single one.
_Described = dict[str | int | None, tuple[torch.Size, torch.dtype]]
_SINGLE = "_-single-tensor-_"


class Room(NamedTuple):
    """What a storage will have after a load: slots, and how many of them hold a record.

    Without ``is_exact``, there are at most as many slots: the records will tell.
    """

    slots: int
    length: int
    is_exact: bool = True


def check_records(storage: Storage, saved: Any) -> Room:
    """Makes sure that a state, or the folder of a dump, fits a storage; returns its room then.

    A :class:`Room` is for records that need no check: there are none.

    Raises:
        NotImplementedError: if TorchRL has no dumps of such a storage.
    """
    if isinstance(saved, Room):
        return saved
    if isinstance(saved, Path):
        return _check_dumped(storage, saved)
    is_ours = is_known(storage, saved, "_storage")
    if not is_ours or not isinstance(storage, (ListStorage, TensorStorage)):
        return Room(storage.max_size, storage.max_size, is_exact=False)
    records = part(saved, "_storage", "_storage")
    if isinstance(storage, ListStorage):
        return _check_list(storage, records, saved)
    are_tensors = isinstance(records, (torch.Tensor, Mapping))
    must(are_tensors, "records", "a tensor or a dict of tensors", type(records), TypeError)
    initialized = part(saved, "initialized", "_storage")
    must(isinstance(initialized, bool), "'initialized'", "a bool", initialized, TypeError)
    found = _described(records) if initialized else {}
    return _check_tensors(storage, found, saved.get("_len"), may_add=True)


def _check_dumped(storage: Storage, folder: Path) -> Room:
    checkpointer = storage.checkpointer
    if isinstance(checkpointer, ListStorageCheckpointer):
        checkpointer.loads(storage, folder)  # which says that there is none
    if isinstance(storage, CompressedListStorage):
        return _check_dumped_list(storage, folder)
    if not isinstance(storage, TensorStorage) or not is_known(checkpointer, folder, "storage"):
        return Room(storage.max_size, storage.max_size, is_exact=False)
    if isinstance(checkpointer, H5StorageCheckpointer):
        if not (folder / checkpointer.checkpoint_file).is_file():
            raise not_whole(f"{checkpointer.checkpoint_file} in {folder} is gone.")
        is_grid = storage.ndim > 1 and storage.initialized
        slots = shape_of_records(storage)[0] if is_grid else storage.max_size
        return Room(slots, storage.max_size, is_exact=is_grid or storage.ndim == 1)
    name = "storage_metadata.json"
    metadata = mapping(read_json(folder / name), name)
    length = part(metadata, "len", name)
    if part(metadata, "is_pytree", name):
        tensors = mapping(part(metadata, "metadata", name), name)
        return _check_tensors(storage, _described_tree(storage, folder, tensors), length)
    check_tensordict(folder)
    dumped = attempted(lambda: TensorDict.load_memmap(folder), "storage")
    if checkpointer._load_hooks:  # they make other records of it
        return _check_reshaped(storage, dumped, folder, length)
    return _check_tensors(storage, _described_records(dumped), length)


# ------------------------------------------------------------------ lists


def _check_list(storage: ListStorage, records: Any, state: Mapping[str, Any]) -> Room:
    if not isinstance(records, list):
        raise ValueError(
            f"The checkpoint has records in a {type(records).__name__}: a "
            f"{type(storage).__name__} loads a list of them."
        )
    if isinstance(storage, CompressedListStorage):
        metadata = part(state, "_metadata", "_storage")
        fits = isinstance(metadata, list) and len(metadata) == len(records)
        must(fits, "_metadata", f"a list of one for each of {len(records)} records", metadata)
    elif "_metadata" in state:
        raise ValueError(
            f"The checkpoint has compressed records: this buffer has a {type(storage).__name__}."
        )
    else:
        for record in records:
            is_record = isinstance(record, (torch.Tensor, dict))
            must(is_record, "records", "tensors or dicts of them", type(record), TypeError)
    return _room_of_list(storage, len(records))


def _check_dumped_list(storage: CompressedListStorage, folder: Path) -> Room:
    metadata, indices = (read_json(folder / f"{n}.json") for n in ("metadata", "data_indices"))
    are_lists = isinstance(metadata, list) and isinstance(indices, list)
    if not are_lists or len(metadata) != len(indices):
        raise not_whole(
            f"metadata.json and data_indices.json in {folder} must be lists of one length."
        )
    if (folder / "compressed_data").exists():
        check_tensordict(folder / "compressed_data")
    # What is compressed is not looked into.
    attempted(lambda: storage.checkpointer.loads(CompressedListStorage(1), folder), "storage")
    return _room_of_list(storage, len(metadata))


def _room_of_list(storage: ListStorage, records: int) -> Room:
    slots = min([storage.max_size, *(sampler.max_size for sampler in Trees(storage).samplers())])
    check_capacity("records", records, slots, fits=records <= slots)
    return Room(storage.max_size, records)


# ------------------------------------------------------------------ tensors


def _described(records: Any, prefix: str = "") -> _Described:
    """Describes a tensor, or the tensors in nested dicts."""
    if isinstance(records, torch.Tensor):
        return {None: (records.shape, records.dtype)}
    found: _Described = {}
    for key, value in records.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            found[name] = (value.shape, value.dtype)
        elif isinstance(value, Mapping) and value:
            found.update(_described(value, f"{name}."))
        elif not is_non_tensor(value) and not str(key).startswith("__"):
            told = f"tensors: got {type(value).__name__} for {name!r}"
            raise TypeError(f"The checkpoint's records must be {told}.")
    return found


def _described_records(records: Any) -> _Described:
    """Describes records as a storage has them."""
    if is_tensor_collection(records):
        return _described(records.state_dict())
    if isinstance(records, torch.Tensor):
        return _described(records)
    # TorchRL saves plain tensors in the order of their tree.
    return {i: (leaf.shape, leaf.dtype) for i, leaf in enumerate(tree_leaves(records))}


def _described_tree(storage: TensorStorage, folder: Path, tensors: Mapping[str, Any]) -> _Described:
    """Describes dumped plain tensors, which TorchRL loads into a storage that has some alone."""
    if not storage.initialized:
        raise RuntimeError(
            "TorchRL loads a dump of plain tensors into a storage that has records: this buffer "
            "has none. Write one first, or use load_state_dict()."
        )
    found: _Described = {}
    for i, (name, entry) in enumerate(tensors.items()):
        file = inside(folder, name.replace(".", "/") + ".memmap")
        shape = mapping(entry, "records").get("shape")
        found[None if name == _SINGLE else i] = check_memmap(file, shape, entry.get("dtype"))
    if not found:
        raise not_whole(f"storage_metadata.json in {folder} has no records.")
    return found


def _check_tensors(
    storage: TensorStorage, saved: _Described, length: Any, *, may_add: bool = False
) -> Room:
    """Compares the records of a checkpoint with the storage's, or with what it will make."""
    ndim = storage.ndim
    if not saved:
        if ndim > 1 and storage.initialized:
            raise ValueError(
                f"The checkpoint has no records: with ndim={ndim} it can't be loaded into a buffer "
                "that has some. Call empty()."
            )
        integer(0, 0)(length, "_len")
        return Room(0 if ndim > 1 else storage.max_size, 0)
    shape = next(iter(saved.values()))[0][:ndim]
    _check_ndim(storage, shape)
    for key, (found, _) in saved.items():
        if found[:ndim] != shape:
            raise ValueError(
                f"The checkpoint's records must have {ndim} dimensions of one shape: got "
                f"{tuple(found)} for {key!r}, and {tuple(shape)} before."
            )
    room = _room_for(storage, shape, length)
    if storage.initialized:
        own = _described_records(storage._storage)
        if "index" not in saved or (may_add and "index" not in own):
            # Whether records have one depends on the writer, and on which call wrote first.
            for each in (saved, own):
                each.pop("index", None)
        check_same("records", saved, own)
    return room


def _check_ndim(storage: TensorStorage, shape: torch.Size) -> None:
    if len(shape) != storage.ndim:
        raise ValueError(
            f"The checkpoint has records of shape {tuple(shape)}: this buffer has "
            f"ndim={storage.ndim}. Load it into a buffer with ndim={len(shape)}."
        )


def _room_for(storage: TensorStorage, shape: torch.Size, length: Any) -> Room:
    """The room of a storage with records of this shape; a capacity may be rounded up to rows."""
    width = shape[1:].numel()
    slots = -(storage.max_size // -width) if width else 0
    cells = storage.max_size if storage.ndim == 1 else slots * width
    check_capacity("records", shape.numel(), cells, fits=shape[0] == slots)
    if storage.initialized and shape_of_records(storage) != shape and storage.ndim > 1:
        raise ValueError(
            f"The checkpoint has records of shape {tuple(shape)}: this buffer has "
            f"{tuple(shape_of_records(storage))}. Load it into a new buffer."
        )
    for sampler in Trees(storage).samplers():
        fits = shape.numel() <= sampler.max_size
        check_capacity("records", shape.numel(), sampler.max_size, fits)
    integer(0, shape.numel())(length, "_len")
    return Room(slots, -(length // -width) if width else 0)


def _check_reshaped(storage: TensorStorage, dumped: Any, folder: Path, length: Any) -> Room:
    """For the flat and nested checkpointers, which save the shape of the records apart."""
    name = "_storage_shape"
    saved = mapping(read_json(folder / name / "meta.json"), name).get("data")
    sizes: Any = saved if isinstance(saved, list) else [saved]
    shape = attempted(lambda: torch.Size(sizes), name)
    _check_ndim(storage, shape)
    records: Any = storage._storage if storage.initialized else None
    if is_tensor_collection(records) and records.is_locked:  # the load can't add a key to it
        keys = set(records.keys(True, True)) | {"reward"}  # it goes under "next" alone
        missing = [key for key, _ in dumped.items(True, True) if key not in keys]
        if missing:
            raise ValueError(
                f"The checkpoint's records have {missing} at their root: this buffer's have not, "
                "and their files can't get more. Load it into a new buffer."
            )
    return _room_for(storage, shape, length)
