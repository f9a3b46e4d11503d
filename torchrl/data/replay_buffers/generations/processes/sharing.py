"""What several processes have in common of one storage: its counters, its records, its lock.

Nothing of it leaves the process's own memory until the process first forks, sends the buffer to a
process that it spawns, or calls ``share()``. What can't be shared is refused then: a child that
went on with a copy of the counters would make every handle a lie.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from tensordict import MemoryMappedTensor, is_tensor_collection
from torch.utils._pytree import tree_leaves, tree_map
from torchrl.data.replay_buffers import (
    LazyMemmapStorage,
    PrioritizedSampler,
    RoundRobinWriter,
    Storage,
    TensorDictMaxValueWriter,
    TensorStorage,
    Writer,
)

from ..core.ring_log import RingLog
from .cells import Cell, Cells
from .first_write import FirstWrite, install_first_write
from .lock import StorageLock

SHARED_MEMORY = "/dev/shm"
# Positions of a table's cells, and the names of TorchRL's values that they take the place of.
BASE, LINEAGE, LENGTH = 0, 1, 3
_STORAGE_VALUES = ("_len_value", "_mutation_revision_value", "_last_cursor_index_value")
_WRITER_VALUES = ("_cursor_value", "_write_count_value")
_WITH_VALUES = (RoundRobinWriter, TensorDictMaxValueWriter)
_NUM_CELLS = LENGTH + len(_STORAGE_VALUES)


class SharedState:
    """The state of a table that all processes on its storage share, and how they come to share it.

    Attributes:
        lock (StorageLock): the one lock of every buffer of ours on the storage.
        ring_log (RingLog): the last ring writes. Guarded by the lock.
    """

    _stamps: torch.Tensor
    _capacity: int
    _full_length: int  # of the storage, which counts cells with ndim > 1
    _fixed_size: bool

    def __init__(self, storage: Storage) -> None:
        self.lock = StorageLock()
        self.lock.guard(self._share_counters, self._refusal_in_child)
        self.ring_log = RingLog()
        self._storage = storage
        self._cells = Cells([0] * _NUM_CELLS)
        self._writer_cells: list[Cells] = []
        self._share_at_first_write = False
        self.lineage = uuid4().hex

    @property
    def base(self) -> int:
        """The first write of a slot after a restore or a copy lands at ``max(stamp + 1, base)``."""
        return self._cells.view[BASE]

    @base.setter
    def base(self, base: int) -> None:
        self._cells.view[BASE] = base

    @property
    def lineage(self) -> str:
        """Random id of this history of writes, 32 hex digits, kept through restores and copies."""
        return "".join(f"{part & (2**64 - 1):016x}" for part in self._cells.view[LINEAGE:LENGTH])

    @lineage.setter
    def lineage(self, lineage: str) -> None:
        for position in range(2):
            part = int(lineage[16 * position :][:16], 16)
            self._cells.view[LINEAGE + position] = part - 2**64 if part >= 2**63 else part

    def install_cells(self) -> None:
        """Puts lock-free cells in place of the semaphores of the storage and its writers."""
        storage = self._storage
        if not storage._compilable:
            for position, name in enumerate(_STORAGE_VALUES, LENGTH):
                self._replace(storage, name, self._cells, position)
        self._has_length_cell = isinstance(getattr(storage, "_len_value", None), Cell)
        for entity in storage._attached_entities:
            if getattr(entity, "_writer", None) is not None:
                self.install_writer_cells(entity._writer)
        if getattr(storage, "shared_init", False):
            install_first_write(storage, self.lock)

    def is_full(self) -> bool:
        """Whether there is a record in every slot: ``len()`` of a storage takes much longer."""
        if self._has_length_cell:
            return self._cells.view[LENGTH] == self._full_length
        return len(self._storage) == self._full_length

    def install_writer_cells(self, writer: Writer) -> None:
        """The same for one of TorchRL's writers that writes into the storage."""
        count = getattr(writer, "_write_count_value", None)
        if isinstance(writer, _WITH_VALUES) and count is not None and not writer._compilable:
            if isinstance(count, Cell) and count._lock is self.lock:
                return
            cells = Cells([0] * len(_WRITER_VALUES))
            if self._stamps.is_shared():
                cells.share()
            self._writer_cells.append(cells)
            for position, name in enumerate(_WRITER_VALUES):
                self._replace(writer, name, cells, position)

    def _replace(self, owner: Any, name: str, cells: Cells, position: int) -> None:
        value = getattr(owner, name, None)
        if value is not None and not (isinstance(value, Cell) and value._cells is cells):
            cells.view[position] = value.value
            setattr(owner, name, Cell(cells, position, self.lock))

    def first_write_failed(self) -> bool:
        """Whether the first write of a ``shared_init`` storage began and did not end."""
        first = getattr(self._storage, "_init_event", None)
        return isinstance(first, FirstWrite) and first.failed

    def is_inside(self, folder: Path) -> bool:
        """Whether memory-mapped records have their files in ``folder``."""
        return isinstance(self._storage, TensorStorage) and any(
            folder in Path(leaf._filename).resolve().parents
            for leaf in _leaves(self._storage)
            if isinstance(leaf, MemoryMappedTensor) and leaf._filename is not None
        )

    def share(self) -> None:
        """Moves counters and records into shared memory, the records at the latest when written.

        Raises:
            RuntimeError: for a list or CUDA storage, a table that grows, or if the shared-memory
                mount has too little room. Nothing has changed then.
        """
        with self.lock:
            self._share_counters()
            self._share_at_first_write = True
            self.share_records()

    def check_strategy(self) -> None:
        """Refuses to be sent under another sharing strategy; see :meth:`Cells.check_strategy`."""
        self._cells.check_strategy()

    def join_first_write(self) -> None:
        """Opens the records of a ``shared_init`` storage that another process has written first."""
        storage = self._storage
        first = getattr(storage, "_init_event", None)
        if isinstance(first, FirstWrite) and first.is_set() and not storage.initialized:
            storage._wait_for_init()

    def forget_failed_first_write(self) -> None:
        """Takes back what a first write claimed that did not end: length and every cursor."""
        if self.first_write_failed():
            self._storage._len = 0
            for cells in self._writer_cells:
                cells.view[0] = 0

    def share_records(self) -> None:
        """Moves the records into shared memory if :meth:`share` was called and there are some."""
        storage = self._storage
        if not self._share_at_first_write or not storage.initialized:
            return
        private = [leaf for leaf in _leaves(storage) if not _is_shared(leaf)]
        if private:
            _need_room(sum(leaf.numel() * leaf.element_size() for leaf in private), "records")
            if is_tensor_collection(storage._storage):
                storage._storage.share_memory_()
            else:
                for leaf in private:
                    leaf.share_memory_()
        self._share_at_first_write = False

    def _share_counters(self) -> None:
        self.install_cells()
        late = self._late_writer()
        if late is not None:
            raise RuntimeError(f"share() needs writers that stamp before the data: {late}.")
        stamps = self._stamps
        if not isinstance(self._storage, TensorStorage):
            reason = f"a {type(self._storage).__name__} can't be shared"
        elif not self._fixed_size:
            reason = f"a table of {self._capacity} slots grows and can't be shared"
        elif stamps.device.type != "cpu":
            reason = f"records and counters on {stamps.device} can't be shared"
        elif self._storage._compilable:
            reason = "a compilable storage can't be shared"
        else:
            if not stamps.is_shared():
                _need_room(stamps.numel() * stamps.element_size(), "counters")
                stamps.share_memory_()
            for cells in (self._cells, self.ring_log.cells, *self._writer_cells):
                cells.share()
            self.check_strategy()
            return
        raise RuntimeError(
            f"share() needs a storage that several processes can use: {reason}. Use a "
            "LazyMemmapStorage or LazyTensorStorage on the CPU."
        )

    def _late_writer(self) -> str | None:
        """Says why TorchRL's own tracking writers are for one process; None if there are none."""
        for entity in self._storage._attached_entities:
            writer = getattr(entity, "_writer", None)
            if (
                isinstance(writer, RoundRobinWriter)
                and writer.tracks_generations
                and not hasattr(writer, "table")
            ):
                name = type(writer).__name__
                return (
                    f"TorchRL's {name} stamps after the data, so that a process that is killed in "
                    "between leaves old handles live on new records (use the writer of the same "
                    "name from torchrl.data.replay_buffers.generations)"
                )
        return None

    def _refusal_in_child(self) -> str | None:
        """Why a forked child may not use the storage; None if it may."""
        storage = self._storage
        late = self._late_writer()
        if late is not None:
            return late
        if not self._stamps.is_shared():
            return f"the counters of its {type(storage).__name__} are in private memory"
        if not storage.initialized:
            if not getattr(storage, "shared_init", False):
                return "it had no records yet at the fork (write some, or use shared_init=True)"
        elif not all(_is_shared(leaf) for leaf in _leaves(storage)):
            return "its records are in private memory (call share() before the fork)"
        for entity in storage._attached_entities:
            if isinstance(getattr(entity, "_sampler", None), PrioritizedSampler):
                return (
                    "it would only have a copy of the priorities (build the buffer with sync=False)"
                )
        return None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if get_spawning_popen() is None:  # a copy
            state["_writer_cells"] = []
            state["_copied"] = True
        else:  # the same table in another process
            with self.lock:
                self._share_counters()
                self._share_at_first_write = True
                self.share_records()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = state.pop("_copied", False)
        self.__dict__.update(state)
        self.lock.guard(self._share_counters, self._refusal_in_child)
        if copied:
            self._begin_branch()

    def _begin_branch(self) -> None:
        """Keeps a copy's later stamps apart from the original's."""
        raise NotImplementedError


def _leaves(storage: TensorStorage) -> list[torch.Tensor]:
    records = storage._storage
    if is_tensor_collection(records):
        return list(records.values(include_nested=True, leaves_only=True))
    return tree_leaves(records)


def _is_shared(leaf: torch.Tensor) -> bool:
    return isinstance(leaf, MemoryMappedTensor) or leaf.is_shared()


def _need_room(size: int, what: str) -> None:
    """Refuses what the shared-memory mount can't hold: writing past it kills the process."""
    if os.path.isdir(SHARED_MEMORY):
        mount = os.statvfs(SHARED_MEMORY)
        free = mount.f_bavail * mount.f_frsize
        if size > free:
            raise RuntimeError(
                f"share() needs {size} bytes in {SHARED_MEMORY} for the {what}: {free} are free. "
                "Enlarge it, or use a LazyMemmapStorage."
            )


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
    if isinstance(storage, LazyMemmapStorage) or getattr(storage, "shared_init", False):
        folder = tempfile.mkdtemp(prefix="torchrl_storage_copy_")
        storage.scratch_dir = folder
        storage._auto_cleanup = False  # TorchRL's knows no copies, nor who made the folder
        storage.existsok = True  # a restore may let the records begin anew in the same files
        weakref.finalize(storage, _remove_own, folder, os.getpid())
        if hasattr(storage, "_init_directory"):
            storage._init_directory = folder
        records = storage._storage
        if records is None:
            return
        if is_tensor_collection(records):
            storage._storage = records.unlock_().memmap_(prefix=folder)
        else:
            storage._storage = tree_map(MemoryMappedTensor.from_tensor, records)
