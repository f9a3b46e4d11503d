"""What several processes have in common of one storage: its counters, its records, its lock.

Nothing of it leaves the process's own memory until the process first forks, sends the buffer to a
process that it spawns, or calls ``share()``. What can't be shared is refused then: a child that
went on with a copy of the counters would make every handle a lie.
"""

from __future__ import annotations

import os
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import MemoryMappedTensor, is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    RoundRobinWriter,
    Storage,
    TensorDictMaxValueWriter,
    TensorStorage,
    Writer,
)

from .cells import Cell, Cells
from .first_write import FirstWrite
from .lock import StorageLock

SHARED_MEMORY = "/dev/shm"
# TorchRL's values that cells take the place of, by position.
_STORAGE_VALUES = ("_len_value", "_mutation_revision_value", "_last_cursor_index_value")
LENGTH, REVISION, LAST_CURSOR = 0, 1, 2
_WRITER_VALUES = ("_cursor_value", "_write_count_value")
_CURSOR = 0
_WITH_VALUES = (RoundRobinWriter, TensorDictMaxValueWriter)


class Counters(Protocol):
    """The counters of a table, as far as sharing is about them."""

    @property
    def tensor(self) -> torch.Tensor:
        """The stamps, int64 ``[slots]``, which move into shared memory in place."""

    @property
    def grows(self) -> bool:
        """Whether the tensor has yet to grow, which shared memory can't."""


class Sharing:
    """How the processes on a storage come to share what a table knows of it.

    It owns the cells that stand in the place of the semaphores of the storage (its length, its
    mutation revision, its last cursor) and of its writers, and the first write of a storage made
    with ``shared_init=True``. The lock guards them all.

    Args:
        storage (Storage): the storage.
        lock (StorageLock): the lock of its table. From now on it prepares this for a fork.
        counters (Counters): the counters of the table.
        cells (list of Cells): further numbers that the processes share.

    Attributes:
        cells (Cells): length, revision and last cursor of the storage, by position.
        records_wait (bool): :meth:`share` was called when there were no records to share. Whoever
            writes the first ones calls :meth:`share_records`. Guarded by the lock.
    """

    def __init__(
        self, storage: Storage, lock: StorageLock, counters: Counters, cells: list[Cells]
    ) -> None:
        self._storage = storage
        self._lock = lock
        self._counters = counters
        self._more_cells = cells
        self.cells = Cells([0] * len(_STORAGE_VALUES))
        self._writer_cells: list[Cells] = []
        self._has_cells = False
        self.records_wait = False
        lock.guard(self._share_counters, self._refusal_in_child)

    # ------------------------------------------------------------------ cells

    def install_cells(self) -> None:
        """Puts lock-free cells in place of the semaphores of the storage and its writers."""
        storage = self._storage
        if not storage._compilable:
            for position, name in enumerate(_STORAGE_VALUES):
                self._replace(storage, name, self.cells, position)
        self._has_cells = isinstance(getattr(storage, "_len_value", None), Cell)
        for entity in storage._attached_entities:
            if getattr(entity, "_writer", None) is not None:
                self.install_writer_cells(entity._writer)
        if getattr(storage, "shared_init", False) and self._first_write() is None:
            storage._init_lock = storage._init_event = FirstWrite(storage, self._lock)

    def install_writer_cells(self, writer: Writer) -> None:
        """The same for one of TorchRL's writers that writes into the storage."""
        count = getattr(writer, "_write_count_value", None)
        if not isinstance(writer, _WITH_VALUES) or count is None or writer._compilable:
            return
        if isinstance(count, Cell) and count.lock is self._lock:
            return
        cells = Cells([0] * len(_WRITER_VALUES))
        if self._lock.is_engaged:  # else they are shared with the rest
            cells.share()
        self._writer_cells.append(cells)
        for position, name in enumerate(_WRITER_VALUES):
            self._replace(writer, name, cells, position)

    def _replace(self, owner: Any, name: str, cells: Cells, position: int) -> None:
        value = getattr(owner, name, None)
        if value is not None and not (isinstance(value, Cell) and value.cells is cells):
            cells.view[position] = value.value
            setattr(owner, name, Cell(cells, position, self._lock))

    @property
    def length(self) -> int:
        """``len()`` of the storage, which takes much longer; with ``ndim > 1`` it counts cells."""
        return self.cells.view[LENGTH] if self._has_cells else len(self._storage)

    @property
    def revision(self) -> int:
        """How often the storage was changed, as TorchRL counts it."""
        if self._has_cells:
            return self.cells.view[REVISION]
        return int(self._storage._mutation_revision)

    # ------------------------------------------------------------------ the first write

    def _first_write(self) -> FirstWrite | None:
        first = getattr(self._storage, "_init_event", None)
        return first if isinstance(first, FirstWrite) else None

    def first_write_failed(self) -> bool:
        """Whether the first write of a ``shared_init`` storage began and did not end."""
        first = self._first_write()
        return first is not None and first.failed

    def forget_failed_first_write(self) -> None:
        """Takes back what a first write claimed that did not end: length and every cursor."""
        if self.first_write_failed():
            self._storage._len = 0
            for cells in self._writer_cells:
                cells.view[_CURSOR] = 0

    def join_first_write(self) -> None:
        """Opens the records of a ``shared_init`` storage that another process has written first."""
        first = self._first_write()
        if first is not None and first.is_set() and not self._storage.initialized:
            self._storage._wait_for_init()

    # ------------------------------------------------------------------ sharing

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
        with self._lock:
            self._check_shareable()
            self._check_room(*self._private_records())
            self._share_counters()
            self._move_records()

    def share_records(self) -> None:
        """Moves the records into shared memory if they were waited for and are there."""
        if self.records_wait:
            self._check_room(*self._private_records())
            self._move_records()

    def check_strategy(self) -> None:
        """Refuses to be sent under another sharing strategy; see :meth:`Cells.check_strategy`."""
        self.cells.check_strategy()

    def _private_records(self) -> list[torch.Tensor]:
        storage = self._storage
        if not storage.initialized:
            return []
        return [leaf for leaf in _leaves(storage) if not _is_shared(leaf)]

    def _move_records(self) -> None:
        private = self._private_records()
        if private and is_tensor_collection(self._storage._storage):
            self._storage._storage.share_memory_()
        else:
            for leaf in private:
                leaf.share_memory_()
        self.records_wait = not self._storage.initialized

    def _check_room(self, *records: torch.Tensor) -> None:
        """Refuses what the shared-memory mount can't hold: writing past it kills the process."""
        stamps = self._counters.tensor
        counters = 0 if stamps.is_shared() else stamps.numel() * stamps.element_size()
        size = sum(leaf.numel() * leaf.element_size() for leaf in records)
        if os.path.isdir(SHARED_MEMORY) and counters + size:
            mount = os.statvfs(SHARED_MEMORY)
            free = mount.f_bavail * mount.f_frsize
            if counters > free:
                raise _no_room(counters, "counters", free)
            if counters + size > free:
                raise _no_room(size, "records", free - counters)

    def _check_shareable(self) -> None:
        late = self._late_writer()
        if late is not None:
            raise RuntimeError(f"share() needs writers that stamp before the data: {late}.")
        storage, stamps = self._storage, self._counters.tensor
        if not isinstance(storage, TensorStorage):
            reason = f"a {type(storage).__name__} can't be shared"
        elif self._counters.grows:
            reason = f"a table of {storage.max_size} slots grows and can't be shared"
        elif stamps.device.type != "cpu":
            reason = f"records and counters on {stamps.device} can't be shared"
        elif storage._compilable:
            reason = "a compilable storage can't be shared"
        else:
            self.check_strategy()
            return
        raise RuntimeError(
            f"share() needs a storage that several processes can use: {reason}. Use a "
            "LazyMemmapStorage or LazyTensorStorage on the CPU."
        )

    def _share_counters(self) -> None:
        """Moves counters and cells into shared memory, all or none of them."""
        self._check_shareable()
        self._check_room()
        self.install_cells()
        cells = [self.cells, *self._more_cells, *self._writer_cells]
        # All that may fail comes first, and changes nothing.
        copies = [each.shared_copy() for each in cells]
        stamps = self._counters.tensor
        if not stamps.is_shared():
            stamps.share_memory_()
        for each, copy in zip(cells, copies, strict=True):
            each.move_to(copy)

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
        if not self._counters.tensor.is_shared():
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
        if get_spawning_popen() is None:  # a copy, which the writers of this one do not write to
            state["_writer_cells"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock.guard(self._share_counters, self._refusal_in_child)


def _leaves(storage: TensorStorage) -> list[torch.Tensor]:
    records = storage._storage
    if is_tensor_collection(records):
        return list(records.values(include_nested=True, leaves_only=True))
    return tree_leaves(records)


def _is_shared(leaf: torch.Tensor) -> bool:
    return isinstance(leaf, MemoryMappedTensor) or leaf.is_shared()


def _no_room(size: int, what: str, free: int) -> RuntimeError:
    return RuntimeError(
        f"share() needs {size} bytes in {SHARED_MEMORY} for the {what}: {free} are free. "
        "Enlarge it, or use a LazyMemmapStorage."
    )
