"""The generation table: one int64 counter per slot, kept on the storage.

A replay-buffer index is only a slot number. This module gives each slot a counter that advances
with every record that is put into it, *before* the record is written. An ``(index, generation)``
pair, a *handle*, then names one record for good: it is live while the counter still agrees.

The table belongs to the storage, not to a buffer or a writer, because two buffers on one storage
overwrite each other's slots. Everything else in this package reads and advances it:

>>> import torch
>>> from torchrl.data import ListStorage
>>> storage = ListStorage(4)
>>> table = SlotGenerations.attach(storage)
>>> storage.set(range(2), ["a", "b"])
>>> table.advance([0, 1])      # a tracking writer does this by itself, before the data
>>> table.of([0, 1, 2])        # -1: no record there
tensor([ 0,  0, -1])
>>> table.advance(0)           # another record goes into slot 0
>>> table.is_live([0, 1], [0, 0])
tensor([False,  True])
"""

from __future__ import annotations

import os
import secrets
import threading
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from tensordict import MemoryMappedTensor, is_tensor_collection
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import (
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Storage,
    TensorStorage,
    Writer,
)

from .cells import Cell, Cells
from .first_write import FirstWrite, install_first_write
from .lock import StorageLock
from .ring_log import RingLog

# TorchRL's own attribute name: an unmodified TorchRL writer on the storage finds the counters
# there and advances them too.
STAMPS_ATTRIBUTE = "_slot_generations"
TABLE_ATTRIBUTE = "_generation_table"

# Up to here (1 GiB of counters) a table has its full size from the start; beyond it, and for lists
# without a maximum, it grows with the records.
EAGER_SLOTS = 2**27
SMALLEST_TABLE = 1024

# Bits of randomness in the distance between the stamps in use and a new base. Two branches of one
# history would have to write a slot about 2**48 times to meet; 2**14 restores fit into an int64.
BASE_BITS = 48

# Positions of a table's cells, and the names of TorchRL's values that they take the place of.
BASE, LINEAGE, LENGTH = 0, 1, 3
_STORAGE_VALUES = ("_len_value", "_mutation_revision_value", "_last_cursor_index_value")
_WRITER_VALUES = ("_cursor_value", "_write_count_value")
_NUM_CELLS = LENGTH + len(_STORAGE_VALUES)

_INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)
SHARED_MEMORY = "/dev/shm"
_attaching = threading.Lock()


def integer_tensor(value: Any, name: str) -> torch.Tensor:
    """Returns ``value`` as an int64 tensor of the same shape, on its own device.

    Args:
        value: int, sequence of ints, NumPy array or tensor of an integer dtype. An empty one counts
            as integer whatever its dtype.
        name (str): what the value is called in an error, such as ``"advance(): index"``.

    Raises:
        TypeError: for booleans, floats and anything else that is no integer.
        ValueError: for an integer that does not fit into an int64.
    """
    if isinstance(value, torch.Tensor):
        tensor = value
    else:
        if _holds_bool(value):
            raise TypeError(f"{name} must be integer: got a bool in {value!r}.")
        try:
            tensor = torch.as_tensor(native_array(value))
        except OverflowError as err:
            raise ValueError(f"{name} must fit into an int64: got {value!r}.") from err
        except (TypeError, ValueError, RuntimeError) as err:
            if "verflow" in str(err):
                raise ValueError(f"{name} must fit into an int64: got {value!r}.") from err
            raise TypeError(f"{name} must be integer: got {value!r}.") from err
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor: got layout {tensor.layout}.")
    if tensor.dtype is torch.int64:
        return tensor
    if tensor.dtype in _INTEGERS or (tensor.numel() == 0 and tensor.dtype is not torch.bool):
        return tensor.to(torch.int64)
    raise TypeError(f"{name} must be integer: got dtype {tensor.dtype}.")


def native_array(value: Any) -> Any:
    """A copy of an array that torch takes; anything else as it is.

    Torch refuses negative strides and foreign byte orders, and warns about read-only memory.
    """
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="))
    return value


def _holds_bool(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_bool, value))
    return isinstance(value, (bool, np.bool_))


def slot_index(index: Any, name: str) -> torch.Tensor:
    """Returns the dim-0 slots that ``index`` names, as an int64 tensor.

    Args:
        index: whatever :func:`integer_tensor` takes, or the tuple of per-dimension tensors that a
            sampler returns, here of length 1.
        name (str): see :func:`integer_tensor`.

    Raises:
        TypeError: see :func:`integer_tensor`.
        ValueError: for a tuple that names more dimensions than the storage has.
    """
    if isinstance(index, tuple) and any(
        isinstance(part, (torch.Tensor, np.ndarray)) and part.ndim for part in index
    ):
        if len(index) != 1:
            raise ValueError(
                f"{name} must hold one tensor per storage dimension: got a tuple of {len(index)} "
                "for a one-dimensional storage."
            )
        index = index[0]
    return integer_tensor(index, name)


class SlotGenerations:
    """The generation counters of one storage, with the lock that guards them.

    Do not build it; :meth:`attach` makes or returns the one table of a storage. It owns
    :attr:`stamps` and :attr:`lock`, and promises *Identity* and *No resurrection* (design notes):
    within one :attr:`lineage`, a stamp of a slot names one record.

    The lock guards the stamps, the records and the priority trees over them. Every method here
    takes it; hold it yourself around anything that acts on an answer.

    Attributes:
        lock (StorageLock): the one lock of every buffer of ours on the storage.
        num_advances (int): how often this process called :meth:`advance` and its siblings.
    """

    def __init__(self, storage: Storage) -> None:
        self.lock = StorageLock()
        self.lock.guard(self._share_counters, self._refusal_in_child)
        self.num_advances: int = 0
        self._storage = storage
        self._cells = Cells([0] * _NUM_CELLS)
        self.ring_log = RingLog()
        self._all_cells = [self._cells, self.ring_log.cells]
        self.lineage = uuid4().hex
        self._share_at_first_write = False
        # Of the last restore: the slots whose records had run on since the state was taken (None:
        # nothing tells), and the stamps as restored, to tell a TorchRL writer's advances from ours.
        self.ran_on: torch.Tensor | None = None
        self._restored: torch.Tensor | None = None
        self._capacity: int = storage.max_size
        self._tree_slots: int = self._capacity
        self._fixed_size: bool = self._capacity <= EAGER_SLOTS
        device = getattr(storage, "device", None)
        self._device_is_open: bool = device == "auto"
        device = torch.device("cpu") if device is None or self._device_is_open else device
        size = self._capacity if self._fixed_size else max(SMALLEST_TABLE, len(storage))
        self._stamps = torch.full((size,), -1, dtype=torch.int64, device=device)
        earlier = getattr(storage, STAMPS_ATTRIBUTE, None)  # a TorchRL writer's own counters
        if earlier is not None:
            self._stamps[: earlier.numel()] = earlier
        self._stamps[: len(storage)].clamp_(min=0)
        setattr(storage, STAMPS_ATTRIBUTE, self._stamps)
        self.install_cells()

    @classmethod
    def attach(cls, storage: Storage) -> SlotGenerations:
        """Makes or returns the table of a storage.

        Records that the storage already holds get stamp 0, so that their handles work.

        Args:
            storage (Storage): a one-dimensional :class:`~torchrl.data.TensorStorage` (lazy and
                memory-mapped ones too) or :class:`~torchrl.data.ListStorage`.

        Raises:
            TypeError: for another kind of storage.
            ValueError: for a storage with ``ndim > 1``.
        """
        table: SlotGenerations | None = getattr(storage, TABLE_ATTRIBUTE, None)
        if table is not None:
            return table
        if not isinstance(storage, (TensorStorage, ListStorage)):
            raise TypeError(
                "Generation tracking needs a TensorStorage, LazyTensorStorage, LazyMemmapStorage "
                f"or ListStorage: got {type(storage).__name__}."
            )
        if storage.ndim != 1:
            raise ValueError(
                "Generation tracking needs a storage with ndim=1 so far: got "
                f"{type(storage).__name__} with ndim={storage.ndim}."
            )
        with _attaching:
            table = getattr(storage, TABLE_ATTRIBUTE, None)
            if table is None:
                table = cls(storage)
                setattr(storage, TABLE_ATTRIBUTE, table)
        return table

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
        return self._cells.view[LINEAGE : LINEAGE + 2].tobytes().hex()

    @lineage.setter
    def lineage(self, lineage: str) -> None:
        self._cells.view[LINEAGE : LINEAGE + 2] = memoryview(bytes.fromhex(lineage)).cast("l")

    @property
    def stamps(self) -> torch.Tensor:
        """The counters: int64 ``[slots]`` on the storage's device, mutated in place.

        Also found at ``storage._slot_generations``. Raw: an emptied slot keeps its advanced stamp
        here, while :meth:`of` gives -1 for it.
        """
        foreign = getattr(self._storage, STAMPS_ATTRIBUTE)
        if foreign is not self._stamps:
            self._fold_in(foreign)
        if self._device_is_open and self._storage.device != "auto":
            self._stamps.data = self._stamps.to(self._storage.device)
            self._device_is_open = False
        return self._stamps

    def of(self, index: Any) -> torch.Tensor:
        """Returns the stamps of the records at ``index``.

        Args:
            index: dim-0 slots, any shape: int, sequence, NumPy array or tensor of integers.

        Returns:
            int64 tensor of the shape and on the device of ``index``. -1 where there is no usable
            stamp: never written, out of range, or past the length of the storage.

        Raises:
            TypeError: if ``index`` is not integer.
        """
        slots = slot_index(index, "index")
        with self.lock:
            stamps = self.stamps
            length = min(len(self._storage), stamps.numel())
            if length == 0:
                return torch.full_like(slots, -1)
            local = slots.to(stamps.device)
            inside = (local >= 0) & (local < length)
            local = local.clamp(0, length - 1)
            found = stamps.take(local)
            if self._restored is not None:
                found = self._raised_to_base(local, found, self._restored.take(local))
        return torch.where(inside, found, -1).to(slots.device)

    def _raised_to_base(
        self, slots: torch.Tensor, found: torch.Tensor, restored: torch.Tensor
    ) -> torch.Tensor:
        """Stamps of ``slots`` after a restore, where a TorchRL writer may have advanced some.

        It adds 1 and knows no base. Below the base only the restored stamps themselves are ours.
        """
        late = (found < self.base) & (found != restored) & (found >= 0)
        if bool(late.any()):
            self._stamps[slots[late]] = self.base
            found = self._stamps.take(slots)
        return found

    def records(self) -> torch.Tensor:
        """The slots below the length of the storage: int64 ``[records]``."""
        return torch.arange(len(self._storage), device=self._stamps.device)

    def is_live(self, index: Any, generation: Any) -> torch.Tensor:
        """Tells which handles still name the record that is in their slot.

        Args:
            index: dim-0 slots, any shape.
            generation: the stamps taken with them, of the same shape.

        Returns:
            bool tensor of the shape and on the device of ``index``.

        Raises:
            TypeError: if ``index`` or ``generation`` is not integer.
            ValueError: if their shapes differ.
        """
        slots = slot_index(index, "index")
        taken = integer_tensor(generation, "generation")
        if taken.shape != slots.shape:
            raise ValueError(
                "is_live() needs one generation per index: got generation of shape "
                f"{tuple(taken.shape)} for index of shape {tuple(slots.shape)}."
            )
        return (self.of(slots) == taken.to(slots.device)) & (taken >= 0).to(slots.device)

    def advance(self, index: Any) -> None:
        """Declares that another record goes into each slot of ``index``.

        Writers call it, before they touch the data. Call it for a write behind the buffer's back.

        Args:
            index: dim-0 slots; one that is named twice was written twice.

        Raises:
            TypeError: if ``index`` is not integer.
            IndexError: if a slot is negative or past the capacity. Nothing has advanced then.
        """
        slots = slot_index(index, "advance(): index").reshape(-1)
        if not slots.numel():
            return
        low, high = (int(bound) for bound in torch.aminmax(slots))
        if low < 0 or high >= self._capacity:
            raise IndexError(
                f"advance() needs slots from 0 to {self._capacity - 1}: got "
                f"{low if low < 0 else high}."
            )
        with self.lock:
            stamps = self._stamps_up_to(high + 1)
            slots = slots.to(stamps.device)
            if self.base:
                stamps[slots] = stamps[slots].clamp_(min=self.base - 1)
            stamps.index_add_(0, slots, torch.ones_like(slots))
            self._note_unknown()

    def advance_ring(self, start: int, count: int) -> None:
        """Advances ``count`` consecutive writes of a ring whose cursor stands at ``start``.

        The same as :meth:`advance` of ``range(start, start + count)`` modulo the capacity, in one
        or two slice operations; a ring that laps itself advances a slot as often as it writes it.
        """
        with self.lock:
            stamps = self._stamps_up_to(min(start + count, self._capacity))
            laps, rest = divmod(count, self._capacity)
            if laps:
                self._bump(stamps, laps)
            over = start + rest - self._capacity
            if over <= 0:
                self._bump(stamps[start : start + rest])
            else:
                self._bump(stamps[start:])
                self._bump(stamps[:over])
            self.num_advances += 1

    def advance_written(self) -> None:
        """Advances every slot that was ever written, so that no handle of now stays live."""
        with self.lock:
            stamps = self.stamps
            advanced = stamps.clamp(min=self.base - 1).add_(1)
            torch.where(stamps >= 0, advanced, stamps, out=stamps)
            self._note_unknown()

    def _note_unknown(self) -> None:
        self.num_advances += 1
        self.ring_log.append_unknown()

    def retire(self) -> None:
        """Makes every handle stale that was ever taken, here or from another table.

        Written slots jump to a new base, and so will the others at their first write.
        """
        with self.lock:
            stamps = self.stamps
            self.base = self._new_base(stamps)
            stamps.masked_fill_(stamps >= 0, self.base)
            self._restored = None
            self._note_unknown()

    def adopt(self, buffer: ReplayBuffer) -> None:
        """Gives a TorchRL buffer on this storage the table's lock.

        Buffers of this package find it by themselves. A TorchRL buffer drops it again at its own
        ``share()``.

        Args:
            buffer (torchrl.data.ReplayBuffer): a buffer on the storage of this table.

        Raises:
            ValueError: if the buffer is on another storage.
        """
        if buffer.storage is not self._storage:
            raise ValueError(
                f"adopt() needs a buffer on the table's own storage: got {type(buffer).__name__} "
                f"on another {type(buffer.storage).__name__}."
            )
        buffer._write_lock = self.lock

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs: a copy of the stamps, the lineage and the live stamps.

        A :class:`~torchrl.data.TensorStorage` saves its records as an alias, so they may run on
        before they are loaded. ``_live_generation`` aliases the stamps in the same way: where it
        differs from the copy at load, the record is no longer the one that the copy speaks of.
        """
        with self.lock:
            state: dict[str, Any] = {
                "_generation": self.stamps.clone(),
                "_lineage": self.lineage,
            }
            if isinstance(self._storage, TensorStorage):
                state["_live_generation"] = self.stamps
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the stamps of a checkpoint whose records the storage has just loaded.

        - A table that was never written takes stamps and lineage: handles from before the
          checkpoint work.
        - The same lineage: takes the stamps. Records that came back bring their handles back.
        - Another lineage, or no stamps: written slots jump to the base; all handles are stale.

        In each case a new base is drawn, so that no later write repeats a stamp of another branch.

        Args:
            state: what :meth:`state_dict` gave; ``_generation`` alone (TorchRL's own checkpoints)
                or nothing at all are another lineage.

        Raises:
            ValueError: if the stamps do not fit this table. Nothing has changed then.
        """
        with self.lock:
            saved = self._fitting(state.get("_generation"))
            live = self._fitting(state.get("_live_generation"))
            stamps = self.stamps
            never_written = not bool((stamps >= 0).any())
            # Compared before the stamps change: it may be these very stamps that ran on.
            self.ran_on = None if live is None or saved is None else live != saved
            if saved is not None and (never_written or state.get("_lineage") == self.lineage):
                self.base = self._new_base(stamps, saved)
                self.lineage = state.get("_lineage") or self.lineage
                stamps.copy_(saved)
                if self.ran_on is not None:
                    stamps.masked_fill_(self.ran_on, self.base)
            else:
                self.retire()
            records = self._stamps_up_to(len(self._storage))[: len(self._storage)]
            records.masked_fill_(records < 0, 0 if never_written else self.base)
            self._restored = stamps.clone()
            self._note_unknown()

    def _fitting(self, saved: torch.Tensor | None) -> torch.Tensor | None:
        """Saved stamps in this table's size and on its device, which grows where it may."""
        if saved is None:
            return None
        if saved.dtype is not torch.int64 or saved.ndim != 1 or saved.numel() > self._capacity:
            raise ValueError(
                f"The checkpoint's stamps must be int64 of shape [slots], at most {self._capacity} "
                f"of them: got {saved.dtype} of shape {tuple(saved.shape)}."
            )
        stamps = self._stamps_up_to(saved.numel())
        padding = (0, stamps.numel() - saved.numel())
        return torch.nn.functional.pad(saved.to(stamps.device), padding, value=-1)

    def limit_to_tree(self, slots: int) -> None:
        """Refuses records past the first ``slots`` slots from now on.

        A buffer calls it whose priority tree is smaller than its unbounded storage: the compiled
        tree checks no bounds.
        """
        self._tree_slots = min(self._tree_slots, slots)

    def _new_base(self, *in_use: torch.Tensor) -> int:
        """A random number above every stamp in use and every earlier base."""
        top = max(self.base, *(int(stamps.max()) for stamps in in_use if stamps.numel()))
        base = top + 1 + secrets.randbits(BASE_BITS)
        if base >= 2**62:
            raise OverflowError(
                "The generation counters of this storage are used up after some 16,000 restores. "
                "Build a new storage."
            )
        return base

    def _fold_in(self, foreign: torch.Tensor) -> None:
        """Takes notice of counters that a TorchRL writer put in place of ours.

        Its ``load_state_dict`` does so, and its growth beyond 2**20 slots. Nothing tells which
        records those counters speak of, so every handle of now turns stale.
        """
        with self.lock:
            if getattr(self._storage, STAMPS_ATTRIBUTE) is self._stamps:
                return
            foreign = foreign[: self._tree_slots]
            if not self._fixed_size and foreign.numel() > self._stamps.numel():
                self._grow(foreign.numel())
            ours = self._stamps[: foreign.numel()]
            torch.maximum(ours, foreign, out=ours)
            setattr(self._storage, STAMPS_ATTRIBUTE, self._stamps)
            self.retire()

    def _stamps_up_to(self, size: int) -> torch.Tensor:
        """The stamps, grown where necessary to hold ``size`` slots."""
        if size > self._tree_slots:
            raise ValueError(
                f"A priority sampler over this storage holds {self._tree_slots} slots: got a "
                f"record for slot {size - 1}. Give the sampler a larger max_capacity, or the "
                f"storage a max_size of {self._tree_slots}."
            )
        stamps = self.stamps
        if size > stamps.numel() and not self._fixed_size:
            self._grow(size)
        return stamps

    def _grow(self, size: int) -> None:
        """Grows geometrically and in place: the tensor on the storage stays the same object."""
        had = self._stamps.numel()
        self._stamps.resize_(min(max(size, 2 * had), self._capacity))
        self._stamps[had:] = -1

    def _bump(self, stamps: torch.Tensor, writes: int = 1) -> None:
        if self.base:
            stamps.clamp_(min=self.base - 1)
        stamps.add_(writes)

    # ------------------------------------------------------------------ several processes

    def install_cells(self) -> None:
        """Puts lock-free cells in place of the semaphores of the storage and its writers."""
        storage = self._storage
        if not storage._compilable:
            for position, name in enumerate(_STORAGE_VALUES, LENGTH):
                self._replace(storage, name, self._cells, position)
        for entity in storage._attached_entities:
            if getattr(entity, "_writer", None) is not None:
                self.install_writer_cells(entity._writer)
        if getattr(storage, "shared_init", False):
            install_first_write(storage, self.lock)

    def install_writer_cells(self, writer: Writer) -> None:
        """The same for a ring writer that writes into the storage."""
        if isinstance(writer, RoundRobinWriter) and not writer._compilable:
            if isinstance(writer._cursor_value, Cell) and writer._cursor_value._lock is self.lock:
                return
            cells = Cells([0] * len(_WRITER_VALUES))
            if self._stamps.is_shared():
                cells.share()
            self._all_cells.append(cells)
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
        stamps = self.stamps
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
            for cells in self._all_cells:
                cells.share()
            return
        raise RuntimeError(
            f"share() needs a storage that several processes can use: {reason}. Use a "
            "LazyMemmapStorage or LazyTensorStorage on the CPU."
        )

    def _refusal_in_child(self) -> str | None:
        """Why a forked child may not use the storage; None if it may."""
        storage = self._storage
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
            state["_all_cells"] = [self._cells, self.ring_log.cells]
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
            self.base = self._new_base(self._stamps)
            self._restored = self._stamps.clone()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(slots={self._stamps.numel()}, "
            f"storage={type(self._storage).__name__}, lineage={self.lineage[:8]})"
        )


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
