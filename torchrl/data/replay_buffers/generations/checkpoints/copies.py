"""Copies of a buffer, which are independent, and what another process gets of one."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, is_tensor_collection
from torch.utils._pytree import tree_map
from torchrl.data.replay_buffers import LazyMemmapStorage, Storage, TensorStorage


def copied_state(rb: Any) -> dict[str, Any]:
    """Returns the state of an independent copy of a tracked buffer, with records of its own.

    A snapshot: a pickler or a deepcopy would read records and stamps one after the other.
    """
    with rb._settled("A copy"):
        return _copied(rb)


def _copied(rb: Any) -> dict[str, Any]:
    if len({id(member._storage) for member in rb._member_list}) < len(rb._member_list):
        raise RuntimeError(
            "An ensemble whose members share a storage can't be copied: each copied member would "
            "get a storage of its own. Copy a member, and build the ensemble anew."
        )
    state = rb._own_state()
    state.pop("_stock_write_lock", None)  # its semaphore; share() makes another
    members = state.pop("_rbs", None)
    memo: dict[int, Any] = {id(entity): None for entity in state["_storage"]._attached_entities}
    copy_records(state["_storage"], memo)
    state = copy.deepcopy(state, memo)
    if members is not None:
        state["_rbs"] = tuple(made_of(member, _copied(member)) for member in members)
    state["_storage"]._attached_entities_list = []  # they stay behind
    return state


def made_of(rb: Any, state: dict[str, Any]) -> Any:
    """Returns a buffer of the kind of ``rb`` with this state."""
    cls: Any = type(rb)
    made = cls.__new__(cls)
    made.__setstate__(state)
    return made


def sent_state(rb: Any) -> dict[str, Any]:
    """Returns the state that a spawned process gets of a tracked buffer, which shares records."""
    check_sendable(rb)
    for table in rb._tables():
        table.sharing.check_strategy()
    with rb._settled("Sending a buffer"):
        for table in rb._tables():
            table.sharing.install_cells()
        return rb._own_state()


def arrive(rb: Any, is_copy: bool) -> None:
    """Readies a buffer that was copied, or sent here."""
    storage = rb.__dict__.get("_storage")
    if storage is not None:
        storage.attach(rb)
    if rb._table is None:
        return
    if is_copy:
        own_files(storage)
    rb._table.sharing.install_cells()


def without_parts(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an ensemble without the parts that its members have; see :func:`rejoin`."""
    storage, sampler, writer = (
        copy.copy(state[name]) for name in ("_storage", "_sampler", "_writer")
    )
    has_transforms = storage._transforms is not None
    storage._transforms = writer._storage = None
    storage._storages = sampler._samplers = writer._writers = ()
    storage._rng_private = sampler._rng_private = writer._rng_private = None
    storage._attached_entities_list = []
    parts = {"_storage": storage, "_sampler": sampler, "_writer": writer}
    return {**state, **parts, "_has_transforms": has_transforms}


def rejoin(ensemble: Any, has_transforms: bool) -> None:
    """Gives an ensemble that was copied, or sent here, the parts of its members."""
    ensemble._writer._storage = ensemble._storage
    if has_transforms:
        ensemble._storage._transforms = [rb._transform for rb in ensemble._rbs]
    with ensemble._replay_lock:  # follows the members
        if ensemble._rng is not None:
            ensemble.set_rng(ensemble._rng)


def check_sendable(rb: Any) -> None:
    """Refuses what TorchRL would send in part.

    Raises:
        RuntimeError: for a buffer that prefetches, or a storage of plain tensors.
    """
    if rb._prefetch:
        raise RuntimeError(
            f"A buffer with prefetch={rb._prefetch_cap} can't be sent to another process: "
            "threads of this one prefetch its batches. Build it with prefetch=None."
        )
    records = getattr(rb._storage, "_storage", None)
    if isinstance(records, list) or records is None or is_tensor_collection(records):
        return  # TorchRL or the table refuse what they must
    raise RuntimeError(
        "TorchRL sends no storage of plain tensors to a spawned process: got "
        f"{type(records).__name__} records. Use tensordict records, or fork."
    )


def has_files_in(path: Path, rb: Any) -> bool:
    """Whether a buffer's storage has, or will have, files of its own below ``path``."""
    scratch = getattr(rb._storage, "scratch_dir", None)
    return scratch is not None and path in Path(scratch).absolute().parents


def _remove_own(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends, too
        shutil.rmtree(folder, ignore_errors=True)


def copy_records(storage: Storage, memo: dict[int, Any]) -> None:
    """Lets a deepcopy with ``memo`` find the records of memory-mapped files copied into memory.

    TorchRL copies no such storage: the files are the storage's own. :func:`own_files` makes the
    copy's.
    """
    records: Any = getattr(storage, "_storage", None)
    if isinstance(storage, TensorStorage) and storage.initialized:
        if is_tensor_collection(records) and records.is_memmap():
            memo[id(records)] = records.clone()
        elif isinstance(records, MemoryMappedTensor):
            memo[id(records)] = torch.empty(records.shape, dtype=records.dtype).copy_(records)


def own_files(storage: Storage) -> None:
    """Gives a copied memory-mapped storage files of its own, in a new temporary folder."""
    if not isinstance(storage, LazyMemmapStorage) and not getattr(storage, "shared_init", False):
        return
    folder = tempfile.mkdtemp(prefix="torchrl_storage_copy_")
    storage.scratch_dir = folder
    storage._auto_cleanup = False  # TorchRL's knows no copies, nor who made the folder
    storage.existsok = True  # a restore may let the records begin anew in the same files
    weakref.finalize(storage, _remove_own, folder, os.getpid())
    if hasattr(storage, "_init_directory"):
        storage._init_directory = folder
    records = storage._storage
    if is_tensor_collection(records):
        storage._storage = records.unlock_().memmap_(prefix=folder)
    elif records is not None:
        storage._storage = tree_map(MemoryMappedTensor.from_tensor, records)
