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

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.compiler import is_compiling
from torchrl.data.replay_buffers import (
    CompressedListStorage,
    ListStorage,
    ReplayBuffer,
    Storage,
    TensorStorage,
)

from ..processes.sharing import BASE, SharedState
from .index import integer_tensor, slot_index
from .layout import Grid, shape_of_records
from .priorities import check_leaves, past_the_end, samplers_on

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

_attaching = threading.Lock()


def _reset_in_child() -> None:
    global _attaching
    _attaching = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)


class SlotGenerations(SharedState):
    """The generation counters of one storage, with the lock that guards them.

    What a stamp means is told in :ref:`ref_buffers_generations`.

    Do not build it; :meth:`attach` makes or returns the one table of a storage. It owns
    :attr:`stamps` and :attr:`lock`, and promises *Identity* and *No resurrection* (design notes):
    within one :attr:`lineage`, a stamp of a slot names one record.

    The lock guards the stamps, the records and the priority trees over them. Every method here
    takes it; hold it yourself around anything that acts on an answer.

    Attributes:
        lock (StorageLock): the one lock of every buffer of ours on the storage.
        grid (Grid or None): the cells of a storage with ``ndim > 1``.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        # The slots that advance during the write of a user's writer. Guarded by the lock.
        self._noted: list[torch.Tensor] | None = None
        # Of the last restore: the slots whose records had run on since the state was taken (None:
        # nothing tells), and the stamps as restored, to tell a TorchRL writer's advances from ours.
        self.ran_on: torch.Tensor | None = None
        self._restored: torch.Tensor | None = None
        self._restored_at: int = 0  # the base of then: another process may have restored since
        self.grid = Grid(storage) if storage.ndim > 1 else None
        self._capacity: int = storage.max_size if self.grid is None else self.grid.slots
        self._full_length: int = storage.max_size
        self._tree_slots: int = self._capacity
        self._fixed_size: bool = self._capacity <= EAGER_SLOTS
        device = getattr(storage, "device", None)
        self._device_is_open: bool = device == "auto"
        device = torch.device("cpu") if device is None or self._device_is_open else device
        self._shape_is_open = self.grid is not None and not self.grid.settled
        # Whether the storage has yet to tell its device or its shape.
        self._is_open: bool = self._device_is_open or self._shape_is_open
        size = self._capacity if self._fixed_size else max(SMALLEST_TABLE, self.length)
        self._stamps = torch.full((size,), -1, dtype=torch.int64, device=device)
        earlier = getattr(storage, STAMPS_ATTRIBUTE, None)  # a TorchRL writer's own counters
        if earlier is not None:
            self._stamps[: earlier.numel()] = earlier
        self._stamps[: self.length].clamp_(min=0)
        # The base at which each record of a full ring had a stamp. Guarded by the lock.
        self._all_stamped_at: int | None = None
        setattr(storage, STAMPS_ATTRIBUTE, self._stamps)
        self.install_cells()

    @classmethod
    def attach(cls, storage: Storage) -> SlotGenerations:
        """Makes or returns the table of a storage.

        Records that the storage already holds get stamp 0, so that their handles work.

        Args:
            storage (Storage): a :class:`~torchrl.data.TensorStorage` (lazy and memory-mapped ones
                too) or :class:`~torchrl.data.ListStorage` (lazy-stack and compressed ones too).

        Raises:
            TypeError: for another kind of storage.
            ValueError: for a :class:`~torchrl.data.TensorStorage` with ``ndim > 1`` that was made
                of records: TorchRL takes its slots for cells.
        """
        table: SlotGenerations | None = getattr(storage, TABLE_ATTRIBUTE, None)
        if table is not None:
            return table
        if not isinstance(storage, (TensorStorage, ListStorage)):
            raise TypeError(
                "Generation tracking needs a TensorStorage, LazyTensorStorage, LazyMemmapStorage "
                f"or ListStorage: got {type(storage).__name__}."
            )
        shape = shape_of_records(storage) if storage.ndim > 1 and storage.initialized else None
        if shape is not None and shape.numel() != storage.max_size:
            raise ValueError(
                f"Generation tracking with ndim={storage.ndim} needs a max_size that counts cells: "
                f"got {type(storage).__name__} with max_size={storage.max_size} and records of "
                f"shape {tuple(shape)}. Use LazyTensorStorage({shape.numel()}, "
                f"ndim={storage.ndim}) and extend it with the records."
            )
        with _attaching:
            table = getattr(storage, TABLE_ATTRIBUTE, None)
            if table is None:
                table = cls(storage)
                setattr(storage, TABLE_ATTRIBUTE, table)
        return table

    @property
    def stamps(self) -> torch.Tensor:
        """The counters, int64 ``[slots]`` on the storage's device, mutated in place.

        Also found at ``storage._slot_generations``. Raw: an emptied slot keeps its advanced stamp
        here, while :meth:`of` gives -1 for it.
        """
        foreign = getattr(self._storage, STAMPS_ATTRIBUTE)
        if foreign is not self._stamps:
            self._fold_in(foreign)
        if self._is_open:
            self._close()
        return self._stamps

    def _close(self) -> None:
        """Takes over device and shape of a lazy storage when it has them."""
        if self._device_is_open and self._storage.device != "auto":
            self._stamps.data = self._stamps.to(self._storage.device)
            self._device_is_open = False
        if self._shape_is_open and self._storage.initialized:
            assert self.grid is not None
            self.grid.settle()
            self._capacity = self._tree_slots = self.grid.slots
            self._full_length = self._storage.max_size
            if self._stamps.is_shared():  # the others have the memory
                self._stamps.resize_(self._capacity)
            else:
                self._stamps.data = self._stamps[: self._capacity].clone()
            self._shape_is_open = False
        self._is_open = self._device_is_open or self._shape_is_open

    @property
    def capacity(self) -> int:
        """How many slots the storage can hold."""
        if self._shape_is_open:
            self._close()
        return self._capacity

    @property
    def length(self) -> int:
        """How many slots of the storage hold a record, from the first on."""
        return len(self._storage) if self.grid is None else self.grid.length

    def fit(self, data: Any, single: bool = False) -> None:
        """Readies a storage with ``ndim > 1`` for its first write; see :meth:`Grid.fit`."""
        if self._shape_is_open:
            self._close()
        if self.grid is not None and self._shape_is_open:
            self.grid.fit(data, single)
            self._capacity = self._tree_slots = self.grid.slots

    def of(self, index: Any) -> torch.Tensor:
        """Returns the stamps of the records at ``index``.

        Args:
            index: dim-0 slots, any shape: int, sequence, NumPy array or tensor of integers. With
                ``ndim > 1``, a tuple of one tensor per dimension or a ``[..., ndim]`` tensor is
                read as coordinates.

        Returns:
            int64 tensor of the shape and on the device of ``index`` (of coordinates: ``[...]``).
            -1 where there is no usable stamp: never written, out of range, or past the length of
            the storage.

        Raises:
            TypeError: if ``index`` is not integer.
        """
        if isinstance(index, torch.Tensor) and index.dtype is torch.int64 and not is_compiling():
            with self.lock:  # the short way of every sample
                found = self._of_full(index)
            if found is not None:
                return found
        if self.grid is not None:
            with self.lock:
                slots, inside = self.grid.split(index, "index")
                if inside is not None:
                    found = self.of(slots.reshape(-1)).reshape(slots.shape)
                    return torch.where(inside, found, -1)
            index = slots
        slots = slot_index(index, "index")
        if self.is_traced():
            return self._of_traced(slots)
        with self.lock:
            return self._of(slots)

    def _of(self, slots: torch.Tensor) -> torch.Tensor:
        found = self._of_full(slots)
        if found is not None:
            return found
        stamps = self.stamps
        length = min(self.length, stamps.numel())
        if length == 0:
            return torch.full_like(slots, -1)
        local = slots if slots.device == stamps.device else slots.to(stamps.device)
        inside = None
        if local.device.type != "cpu" or not _all_below(local, length):
            inside = (local >= 0) & (local < length)
            local = local.clamp(0, length - 1)
        found = self._after_restore(local, stamps.take(local))
        if inside is None:
            return found
        return torch.where(inside, found, -1).to(slots.device)

    def _of_full(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Stamps of ``slots`` if the ring is full, so that there is a record in each; else None.

        The same in one operation, as every sample and update needs it; None also if a slot is out
        of range or on another device.
        """
        stamps = self.stamps
        if not self.is_full() or not stamps.is_cpu:
            return None
        if self._all_stamped_at != self.base:  # a restore, here or in another process, draws one
            self._stamp_all()
        if slots.ndim != 1 or not slots.is_cpu:
            return None
        try:
            found = stamps.index_select(0, slots)
        except (IndexError, RuntimeError):  # out of range: the caller tells where
            return None
        return self._after_restore(slots, found)

    def _stamp_all(self) -> None:
        """Stamps the records of a full ring that came past every writer, as :meth:`attach` does."""
        unstamped = self._stamps < 0
        if bool(unstamped.any()):
            self._stamps.masked_fill_(unstamped, self.base)
            self._note_unknown()
        self._all_stamped_at = self.base

    def is_traced(self) -> bool:
        """Whether this is a compiled region, which takes no lock and where nothing may branch.

        After a restore, where the table grows, and with ``ndim > 1``, it breaks the graph instead.
        """
        return is_compiling() and self._fixed_size and self._restored is None and self.grid is None

    def _of_traced(self, slots: torch.Tensor) -> torch.Tensor:
        stamps = self._stamps
        inside = (slots >= 0) & (slots < self._storage._len)
        local = slots.clamp(0, self._capacity - 1).to(stamps.device)
        return torch.where(inside, stamps[local].to(slots.device), -1)

    def advance_traced(self, start: int, count: int) -> None:
        """:meth:`advance_ring` in a compiled region, where a slice would be a graph per wrap."""
        stamps = self._stamps
        slots = torch.arange(start, start + count, device=stamps.device).remainder(self._capacity)
        stamps[slots] = torch.maximum(stamps[slots], self._cells.tensor[BASE] - 1)
        stamps.index_add_(0, slots, torch.ones_like(slots))

    def _after_restore(self, slots: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Stamps of ``slots``; after a restore a TorchRL writer may have advanced some.

        It adds 1 and knows no base. Below the base only the restored stamps themselves are ours.
        """
        if self._restored is None or self._restored_at != self.base:
            return found
        restored = self._restored.take(slots)
        late = (found < self.base) & (found != restored) & (found >= 0)
        if bool(late.any()):
            self._stamps[slots[late]] = self.base
            found = self._stamps.take(slots)
        return found

    def records(self) -> torch.Tensor:
        """The slots below the length of the storage: int64 ``[records]``."""
        return torch.arange(self.length, device=self._stamps.device)

    def is_live(self, index: Any, generation: Any) -> torch.Tensor:
        """Tells which handles still name the record that is in their slot.

        Args:
            index: dim-0 slots, any shape, or coordinates, see :meth:`of`.
            generation: the stamps taken with them, of the same shape.

        Returns:
            bool tensor of the shape and on the device of ``index``.

        Raises:
            TypeError: if ``index`` or ``generation`` is not integer.
            ValueError: if their shapes differ.
        """
        if self.grid is None:
            index = slots = slot_index(index, "index")
        else:
            slots, _ = self.grid.split(index, "index")
        taken = integer_tensor(generation, "generation")
        if taken.shape != slots.shape:
            raise ValueError(
                "is_live() needs one generation per index: got generation of shape "
                f"{tuple(taken.shape)} for index of shape {tuple(slots.shape)}."
            )
        if self.grid is None:
            with self.lock if not self.is_traced() else contextlib.nullcontext():
                return self.live(slots, taken)[0]
        found = self.of(index)
        return (found == taken.to(found.device)) & (found >= 0)

    def live(self, slots: torch.Tensor, taken: torch.Tensor) -> tuple[torch.Tensor, bool | None]:
        """:meth:`is_live` of int64 tensors of one shape, and of slots alone.

        The caller holds the lock.

        Returns:
            The mask, and whether it is True throughout; None if that takes a look at the mask.
        """
        if self.is_traced():
            found, is_full = self._of_traced(slots), False
        else:
            whole = self._of_full(slots)
            is_full = whole is not None
            found = self._of(slots) if whole is None else whole
        taken = taken if taken.device == found.device else taken.to(found.device)
        live = found == taken
        if is_full:  # so there is no -1 in it
            return live, torch.equal(found, taken)
        return live.logical_and_(found >= 0), None

    def advance(self, index: Any) -> None:
        """Declares that another record goes into each slot of ``index``.

        Writers call it, before they touch the data. Call it for a write behind the buffer's back.

        Args:
            index: dim-0 slots; one that is named twice was written twice. Or coordinates, see
                :meth:`of`: the cells of a slot are one write.

        Raises:
            TypeError: if ``index`` is not integer.
            IndexError: if a slot is negative or past the capacity. Nothing has advanced then.
        """
        if self.grid is not None:
            index = self.grid.writes(index)
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
            self.note(slots)
            self._note_unknown()

    def advance_ring(self, start: int, count: int) -> None:
        """Advances ``count`` consecutive writes of a ring whose cursor stands at ``start``.

        The same as :meth:`advance` of ``range(start, start + count)`` modulo the capacity, in one
        or two slice operations; a ring that laps itself advances a slot as often as it writes it.
        The caller holds the lock, and notes the write in the :attr:`ring_log` when it is made.
        """
        if self._noted is not None:
            self.note(torch.arange(start, start + count).remainder_(self._capacity))
        if self._storage._compilable and self._fixed_size:
            self.advance_traced(start, count)
            return
        stop = start + count
        if stop <= self._capacity:
            self._bump(self._stamps_up_to(stop)[start:stop])
            return
        stamps = self._stamps_up_to(self._capacity)
        laps, rest = divmod(count, self._capacity)
        if laps:
            self._bump(stamps, laps)
        over = start + rest - self._capacity
        self._bump(stamps[start : start + rest])
        if over > 0:
            self._bump(stamps[:over])

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes which slots advance meanwhile, for :meth:`unnoted`. The lock must be held."""
        outer, self._noted = self._noted, []
        try:
            yield
        finally:
            if outer is not None:
                outer.extend(self._noted)
            self._noted = outer

    @property
    def is_noting(self) -> bool:
        """Whether :meth:`noting` is under way."""
        return self._noted is not None

    def note(self, slots: torch.Tensor) -> None:
        """Notes that ``slots`` (``[N]``) have advanced, if :meth:`noting` is under way."""
        if self._noted is not None:
            self._noted.append(slots)

    def unnoted(self, slots: torch.Tensor) -> torch.Tensor:
        """Those of ``slots`` (``[N]``) that have not advanced since :meth:`noting` began."""
        noted = [part.to(slots.device) for part in self._noted or ()]
        return slots[~torch.isin(slots, torch.cat([slots[:0], *noted]))]

    def advance_written(self) -> None:
        """Advances every slot that was ever written, so that no handle of now stays live."""
        with self.lock:
            stamps = self.stamps
            advanced = stamps.clamp(min=self.base - 1).add_(1)
            torch.where(stamps >= 0, advanced, stamps, out=stamps)
            self._note_unknown()

    def _note_unknown(self) -> None:
        self.ring_log.append_unknown()

    def retire(self) -> None:
        """Makes every handle stale that was ever taken, here or from another table.

        Written slots jump to a new base, and so will the others at their first write.
        """
        with self.lock:
            stamps = self.stamps
            self.base = self._new_base(stamps)
            stamps.masked_fill_(stamps >= 0, self.base)
            self._remember_restored()
            self._note_unknown()

    def adopt(self, buffer: ReplayBuffer) -> None:
        """Gives a TorchRL buffer on this storage the table's lock.

        Buffers of this package find it by themselves. A TorchRL buffer drops it again at its own
        ``share()``.

        Args:
            buffer (torchrl.data.ReplayBuffer): a buffer on the storage of this table.

        Raises:
            ValueError: if the buffer is on another storage, or has a priority tree that is too
                small for this one.
        """
        if buffer.storage is not self._storage:
            raise ValueError(
                f"adopt() needs a buffer on the table's own storage: got {type(buffer).__name__} "
                f"on another {type(buffer.storage).__name__}."
            )
        self.limit_to_trees()
        buffer._write_lock = buffer._replay_lock = self.lock

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs: a copy of the stamps, the lineage and the live stamps.

        Tensor and compressed storages save their records as an alias, so they may run on before
        they are loaded. ``_live_generation`` aliases the stamps in the same way: where it
        differs from the copy at load, the record is no longer the one that the copy speaks of.
        """
        with self.lock:
            stamps = self.stamps
            if self._shape_is_open:
                stamps = stamps[:0]  # never written
            state: dict[str, Any] = {"_generation": stamps.clone(), "_lineage": self.lineage}
            if isinstance(self._storage, (TensorStorage, CompressedListStorage)):
                state["_live_generation"] = stamps
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
            # Where there is a base already, handles of before may be about, such as those of a
            # buffer whose process was started again.
            unstamped = 0 if never_written and not self.base else None
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
            records = self._stamps_up_to(self.length)[: self.length]
            records.masked_fill_(records < 0, self.base if unstamped is None else unstamped)
            self._remember_restored()
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
        if not self._fixed_size:  # such a table is longer than its records
            written = (saved >= 0).nonzero()
            saved = saved[: int(written.max()) + 1 if written.numel() else 0]
        stamps = self._stamps_up_to(saved.numel())
        padding = (0, stamps.numel() - saved.numel())
        return torch.nn.functional.pad(saved.to(stamps.device), padding, value=-1)

    def limit_to_trees(self) -> None:
        """Refuses from now on records past the end of a priority tree over the storage.

        A buffer calls it when it comes with a sampler: the compiled tree checks no bounds. With
        ``ndim > 1``, a tree has a leaf per cell, see :meth:`fit`.

        Raises:
            ValueError: if a tree is too small already. Nothing has changed then.
        """
        with self.lock:
            samplers = list(samplers_on(self._storage))
            check_leaves(self._storage, *samplers)
            if self.grid is None:
                leaves = (sampler.max_size for sampler in samplers)
                self._tree_slots = min([self._capacity, *leaves])

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
            raise past_the_end(self._tree_slots, size - 1)
        stamps = self.stamps
        if size > stamps.numel() and not self._fixed_size:
            self._grow(size)
        return stamps

    def _grow(self, size: int) -> None:
        """Grows geometrically and in place: the tensor on the storage stays the same object."""
        had = self._stamps.numel()
        for counters in (self._stamps, self._restored):
            if counters is not None:
                counters.resize_(min(max(size, 2 * had), self._capacity))
                counters[had:] = -1

    def _bump(self, stamps: torch.Tensor, writes: int = 1) -> None:
        if self.base:
            stamps.clamp_(min=self.base - 1)
        stamps.add_(writes)

    def _begin_branch(self) -> None:
        self.base = self._new_base(self._stamps)
        self._remember_restored()

    def _remember_restored(self) -> None:
        self._restored, self._restored_at = self._stamps.clone(), self.base

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(slots={self._stamps.numel()}, "
            f"storage={type(self._storage).__name__}, lineage={self.lineage[:8]})"
        )


def _all_below(slots: torch.Tensor, length: int) -> bool:
    if not slots.numel():
        return True
    low, high = torch.aminmax(slots)
    return int(low) >= 0 and int(high) < length
