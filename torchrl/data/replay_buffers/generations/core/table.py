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
import threading
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch.compiler import is_compiling
from torchrl.data.replay_buffers import ReplayBuffer, Storage

from ..layout.grid import Layout, layout_of
from ..layout.index import integer_tensor
from ..processes.lock import StorageLock
from ..processes.memory import claim
from ..processes.sharing import Sharing
from ..processes.writing import Writing
from . import compiled
from .counters import Counters
from .history import STAMPS_ATTRIBUTE, History, fold_in
from .trees import Trees

TABLE_ATTRIBUTE = "_generation_table"

_attaching = threading.Lock()
if hasattr(os, "register_at_fork"):  # another thread may hold it at the fork
    os.register_at_fork(after_in_child=_attaching._at_fork_reinit)  # type: ignore[attr-defined]


class SlotGenerations:
    """The generation counters of one storage, with the lock that guards them.

    What a stamp means is told in :ref:`ref_buffers_generations`. Do not build it; :meth:`attach`
    makes or returns the one table of a storage. It promises *Identity* and *No resurrection*
    (design notes). The lock guards the stamps, the records and the priority trees over them. The
    public methods take it; hold it yourself around anything that acts on an answer.

    Attributes:
        lock (StorageLock): the one lock of every buffer of ours on the storage.
    """

    def __init__(self, storage: Storage) -> None:
        self.lock = StorageLock()
        self.storage = storage
        self.layout: Layout = layout_of(storage)
        device = getattr(storage, "device", None)
        # A lazy storage tells its device, or with ndim > 1 its shape, when it is first written.
        self.is_settled: bool = device != "auto" and self.layout.is_settled
        device = torch.device("cpu") if device in (None, "auto") else device
        self.counters = Counters(self.layout.slots, self.layout.length, device)
        earlier = getattr(storage, STAMPS_ATTRIBUTE, None)  # a TorchRL writer's own counters
        if earlier is not None:
            ours = self.counters.tensor[: earlier.numel()]
            torch.maximum(ours, earlier, out=ours)
        setattr(storage, STAMPS_ATTRIBUTE, self.counters.tensor)
        self.history = History(self.counters)
        self.trees = Trees(storage)
        self.writing = Writing()
        cells = [self.counters.cells, self.history.cells]
        self.sharing = Sharing(storage, self.lock, self.counters, cells)
        self.sharing.install_cells()
        # The base at which each record of a full ring had a stamp. Guarded by the lock.
        self._all_stamped_at: int | None = None

    @classmethod
    def attach(cls, storage: Storage) -> SlotGenerations:
        """Makes or returns the table of a storage; records that it holds already get stamp 0.

        Args:
            storage (Storage): any kind of :class:`~torchrl.data.TensorStorage` or
                :class:`~torchrl.data.ListStorage`.

        Raises:
            TypeError: for another kind of storage.
            ValueError: for a :class:`~torchrl.data.TensorStorage` with ``ndim > 1`` that was made
                of records (TorchRL takes its slots for cells), or one over the memory of another.
        """
        if not hasattr(storage, TABLE_ATTRIBUTE):
            with _attaching:
                if not hasattr(storage, TABLE_ATTRIBUTE):
                    claim(storage)
                    setattr(storage, TABLE_ATTRIBUTE, cls(storage))
        return getattr(storage, TABLE_ATTRIBUTE)

    @property
    def stamps(self) -> torch.Tensor:
        """The counters, int64 ``[slots]`` on the storage's device, mutated in place.

        Also found at ``storage._slot_generations``. Raw: an emptied slot keeps its advanced stamp
        here, while :meth:`of` gives -1 for it.
        """
        if getattr(self.storage, STAMPS_ATTRIBUTE) is not self.counters.tensor:
            with self.lock:
                fold_in(self.storage, self.counters, self.history, self.layout.slots)
        if not self.is_settled and self.storage.initialized:
            self.counters.settle(self.layout.slots, self.storage.device)
            self.is_settled = True
        return self.counters.tensor

    def of(self, index: Any) -> torch.Tensor:
        """Returns the stamps of the records at ``index``.

        Args:
            index: dim-0 slots, any shape: int, sequence, NumPy array or tensor of integers. With
                ``ndim > 1``, a tuple of one tensor per dimension or a ``[..., ndim]`` tensor is
                read as coordinates.

        Returns:
            int64 tensor of the shape and on the device of ``index`` (of coordinates: ``[...]``).
            -1 where there is no usable stamp: never written, out of range, past the length of the
            storage, or, for a signal handler, in the middle of the write of a record.

        Raises:
            TypeError: if ``index`` is not integer.
        """
        slots, inside = self.layout.split(index, "index")
        if self.is_traced():
            return compiled.stamps_at(self.counters, self.storage, slots)
        with self.lock:
            found, _ = self._read(slots)
        return found if inside is None else torch.where(inside, found, -1)

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
        found = self.of(index)
        taken = integer_tensor(generation, "generation")
        if taken.shape != found.shape:
            raise ValueError(
                "is_live() needs one generation per index: got generation of shape "
                f"{tuple(taken.shape)} for index of shape {tuple(found.shape)}."
            )
        return (found == taken.to(found.device)) & (found >= 0)

    def live(self, slots: torch.Tensor, taken: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """:meth:`is_live` of int64 ``[N]``, slots alone. The caller holds the lock.

        Returns:
            The mask, and whether it is True throughout.
        """
        found, of_records = self._read(slots)
        taken = taken if taken.device == found.device else taken.to(found.device)
        live = found == taken
        if of_records:  # so there is no -1 in it
            return live, torch.equal(found, taken)
        live.logical_and_(found >= 0)
        return live, bool(live.all())

    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Stamps of int64 slots, -1 without a record, and whether all are known to have one."""
        stamps = self.stamps
        on_cpu = slots.is_cpu and stamps.is_cpu
        if on_cpu and slots.ndim == 1 and self._is_full():  # as a learner mostly finds it
            try:
                found = stamps.index_select(0, slots)
                if self.history.restored is not None:
                    found = self.history.corrected(slots, found)
                return found, True
            except (IndexError, RuntimeError):  # out of range: told apart below
                pass
        length = min(self.layout.length, stamps.numel())
        if length == 0:
            return torch.full_like(slots, -1), False
        local = slots.to(stamps.device)
        inside = (local >= 0) & (local < length)
        if self.writing.slots is not None:  # a signal handler looks in the middle of a write
            inside &= ~self.writing.holds(local, self.layout.slots)
        local = local.clamp(0, length - 1)
        found = self.history.corrected(local, stamps.take(local))
        return torch.where(inside, found, -1).to(slots.device), False

    def _is_full(self) -> bool:
        """Whether there is a stamped record in every slot, and none is being written."""
        if self.sharing.length != self.storage.max_size or self.writing.slots is not None:
            return False
        if self._all_stamped_at != self.counters.base:  # a restore, also elsewhere, draws one
            self.counters.stamp_rest()
            self._all_stamped_at = self.counters.base
        return True

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
        slots = self.layout.writes(index)
        if not slots.numel():
            return
        low, high = (int(bound) for bound in torch.aminmax(slots))
        last = self.layout.slots - 1
        if low < 0 or high > last:
            bad = low if low < 0 else high
            raise IndexError(f"advance() needs slots from 0 to {last}: got {bad}.")
        with self.lock, self.writing.marker:
            slots = slots.to(self.reach(high + 1).device)
            self.counters.advance(slots)
            self.writing.note(slots)

    def advance_ring(self, start: int, count: int) -> None:
        """:meth:`advance` for ``count`` consecutive writes of a ring whose cursor is at ``start``.

        The caller holds the lock, and finishes the entry in the log when the write is made.
        """
        capacity, stop = self.layout.slots, start + count
        self.reach(min(stop, capacity))
        self.counters.log_begin(start, count, self.sharing.revision)
        if self.writing.is_watched:
            self.writing.note(torch.arange(start, stop).remainder_(capacity))
        if self.storage._compilable and not self.counters.grows:
            compiled.advance_ring(self.counters, capacity, start, count)
            return
        self.counters.advance_ring(start, count, capacity)

    def is_traced(self) -> bool:
        """Whether this is a compiled region that the table can be traced in."""
        plain = not self.counters.grows and self.history.restored is None
        return is_compiling() and plain and self.layout.ndim == 1

    def advance_written(self) -> None:
        """Advances every slot that was ever written, so that no handle of now stays live."""
        with self.lock, self.writing.marker:
            self.reach(0)
            self.counters.advance_written()

    def reach(self, size: int) -> torch.Tensor:
        """Returns the stamps, grown where necessary to hold ``size`` slots."""
        self.trees.check_slots(size)
        stamps = self.stamps
        return self.counters.reach(size, self.layout.slots) if self.counters.grows else stamps

    def adopt(self, buffer: ReplayBuffer) -> None:
        """Gives a TorchRL buffer the table's lock, until that buffer's own ``share()`` drops it.

        Raises:
            ValueError: if the buffer is on another storage, or its priority tree is too small.
        """
        if buffer.storage is not self.storage:
            raise ValueError(
                f"adopt() needs a buffer on the table's own storage: got {type(buffer).__name__} "
                f"on another {type(buffer.storage).__name__}."
            )
        with self.lock:
            self.trees.limit()
        buffer._write_lock = buffer._replay_lock = self.lock

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["writing"]
        if get_spawning_popen() is None:  # a copy
            state["_is_copy"] = True
        else:  # the same table in another process
            self.sharing.share()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_copy = state.pop("_is_copy", False)
        self.__dict__.update(state, writing=Writing())
        if is_copy:
            self.history.branch()
