"""Replay buffers whose priority updates reach only the record that they were computed from.

:class:`ConditionalPriorityUpdates` is the whole of it; the four buffers are TorchRL's with the
mix-in in front. A buffer of ours finds the table of its storage by itself, whoever put it there,
and uses the table's lock as its write lock. On a storage without a table every method is TorchRL's.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from torch.compiler import is_compiling
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import (
    ConditionalUpdateResult,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    Sampler,
    SampleUnit,
    Storage,
    Writer,
)
from torchrl.data.replay_buffers.replay_buffers import _maybe_delay_init
from torchrl.data.replay_buffers.utils import _reduce

from . import background, dumps
from .checks import (
    check_dump_fits,
    check_fits,
    checked_handles,
    checked_priority,
)
from .coordinates import checked_cells, priority_per_cell
from .index import names_field, slots_written
from .max_value import TensorDictMaxValueWriter, check_ranks
from .result import PriorityUpdateResult
from .ring_log import ENTRIES
from .sampling import check_dimensions, unmask_leaves
from .sharing import copy_records, own_files
from .slots import STAMPS_ATTRIBUTE, TABLE_ATTRIBUTE, SlotGenerations
from .tally import Tally, stats_of
from .tree import keeps_default, write_default, write_priority
from .units import ANCHOR_KEYS, StampedSequence, anchor_priorities, stamped_unit
from .users_writers import OUR_WRITERS, RING_WRITERS, stamp_rest, stamps_late, watched
from .writers import (
    GENERATION_KEY,
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
    give_default_priority,
    last_rows,
    row_generations,
    without_stamps,
)

# How long a restore holds up new samples, in seconds, while another thread holds the table's lock.
SETTLING = 0.05

# What dumps() adds to TorchRL's files.
STATE_FILE = "generations.pt"

# Every buffer of ours in this process, for what a forked child must not inherit.
_built: weakref.WeakSet[ConditionalPriorityUpdates] = weakref.WeakSet()

# The mix-in stands before a TorchRL buffer class, whose methods and attributes it works with.
if TYPE_CHECKING:
    from torchrl.data import ReplayBuffer as _Buffer
else:
    _Buffer = object


class ConditionalPriorityUpdates(_Buffer):
    """Mix-in that gives a TorchRL buffer class generation stamps and conditional priority updates.

    Put it before the TorchRL class: ``class Mine(ConditionalPriorityUpdates, SomeReplayBuffer)``.

    The lock of the storage's table guards the records, the stamps and the priority tree. ``add``
    and ``extend`` hold it from the first stamp to the last priority; a sample reads index, stamps
    and data under it; a conditional update compares and writes under it (*Atomicity* in the design
    notes).

    Keyword Args:
        track_generations (bool, optional): whether to stamp records, so that samples carry
            ``"index_generation"`` and :meth:`update_priority_if_present` works. Builds the tracking
            writer of the buffer's kind unless ``writer`` is given. Defaults to False.
        writer (Writer or Callable[[], Writer], optional): see :class:`torchrl.data.ReplayBuffer`.

    Raises:
        ValueError: for ``track_generations=True`` with a writer that does not track, a priority
            sampler that holds fewer slots than the storage, or with ``ndim > 1`` a TensorStorage
            made of records or a sampler of one dimension.
        TypeError: for a kind of storage that cannot be tracked.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> class LoggedReplayBuffer(ConditionalPriorityUpdates, ReplayBuffer):
        ...     pass
        >>> rb = LoggedReplayBuffer(storage=LazyTensorStorage(4), track_generations=True)
        >>> rb.writer.tracks_generations
        True
    """

    _initialized: bool
    _sample_unit: SampleUnit | None
    _init_storage: Any
    # TorchRL's own locks, for a storage without a table.
    _stock_write_lock: Any = contextlib.nullcontext()
    _stock_replay_lock: Any = None
    # How many add() and extend() calls are under way, nested ones. Guarded by the table's lock.
    _writes_under_way: int = 0
    # For the classes whose TorchRL constructor takes no generator.
    _generator_argument: torch.Generator | None = None
    # The stamps that an asynchronous learner's tree has seen. Guarded by the table's lock.
    _seen: torch.Tensor | None = None
    # The end of the ring log and the storage's revision when it looked last.
    _seen_until: tuple[int, int] = (0, 0)

    def __init__(
        self,
        *args: Any,
        track_generations: bool = False,
        writer: Writer | Callable[[], Writer] | None = None,
        **kwargs: Any,
    ) -> None:
        self._track_generations = track_generations
        self._writer_argument = writer
        self._tally = Tally()
        if isinstance(writer, Writer):
            self._check_tracks(writer)
        storage = kwargs.get("storage")
        if (
            isinstance(self, _WITH_OWN_TREE)
            and isinstance(storage, Storage)
            and storage.max_size == torch.iinfo(torch.int64).max
            and kwargs.get("sampler") is None
        ):
            raise ValueError(
                f"{type(self).__name__} needs a storage with a max_size, for which it can build a "
                f"priority tree: got a {type(storage).__name__} without one. Give it one, or build "
                "a ReplayBuffer with sampler=PrioritizedSampler(max_capacity, ...)."
            )
        super().__init__(*args, **kwargs)

    @classmethod
    def _ServiceClass(
        cls,
        service_backend: str,
        *args: Any,
        service_backend_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Builds what ``service_backend="ray"`` asks for; TorchRL's metaclass calls it."""
        from .remote import RayReplayBuffer  # which is built on this module

        options = dict(service_backend_options or {})
        if service_backend != "ray":
            return super()._ServiceClass(
                service_backend, *args, service_backend_options=options, **kwargs
            )
        configs = {name: options.pop(name, None) for name in ("ray_init_config", "remote_config")}
        if options:
            raise TypeError(
                "service_backend_options may hold ray_init_config and remote_config: got "
                f"{sorted(options)}."
            )
        return RayReplayBuffer(*args, replay_buffer_cls=cls, **configs, **kwargs)

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """Makes a Ray actor class of the buffer; see :meth:`torchrl.data.ReplayBuffer.as_remote`.

        An actor that Ray starts again after a crash knows no handle of before, until a checkpoint
        is loaded (*No resurrection*, design notes).
        """
        from .remote import in_actor

        torchrls = super(ConditionalPriorityUpdates, in_actor(cls))
        return torchrls.as_remote(remote_config)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ the table and its lock

    @property
    def _table(self) -> SlotGenerations | None:
        storage = self.__dict__.get("_storage")
        return None if storage is None else storage.__dict__.get(TABLE_ATTRIBUTE)

    @property
    def _write_lock(self) -> Any:
        table = self._table
        return self._stock_write_lock if table is None else table.lock

    @_write_lock.setter
    def _write_lock(self, lock: Any) -> None:
        # TorchRL's share() sets one each time: it is only in use where there is no table.
        self._stock_write_lock = lock

    # TorchRL takes both locks, this one first. One lock in place of both leaves no order between
    # them, which one who holds the table's lock and calls the buffer would get wrong.
    @property
    def _replay_lock(self) -> Any:
        table = self._table
        return self._stock_replay_lock if table is None else table.lock

    @_replay_lock.setter
    def _replay_lock(self, lock: Any) -> None:
        self._stock_replay_lock = lock

    def _hold(self) -> SlotGenerations:
        """Takes the lock of the storage's table, whichever storage that is when it is free."""
        while True:
            table = self._table
            assert table is not None  # a tracked buffer stays one
            table.lock.__enter__()
            if self._table is table:  # else set_storage() came in between
                return table
            table.lock.release()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[SlotGenerations]:
        """The same as a context."""
        table = self._hold()
        try:
            yield table
        finally:
            table.lock.release()

    @contextlib.contextmanager
    def _settled(self, *tables: SlotGenerations | None) -> Iterator[None]:
        """Holds every lock with no prefetched sample or background update still running.

        They need the tables' locks to finish, so they are waited for before those are taken, and
        ``_futures_lock`` keeps new ones from starting. It is given back while a table's lock is not
        to be had: who holds that may be about to sample, and samples take ``_futures_lock``.
        """
        ordered = {table.lock.order: table.lock for table in tables if table is not None}
        while True:
            with contextlib.ExitStack() as locks:
                locks.enter_context(self._futures_lock)
                self._synchronize_futures_locked()
                for order in sorted(ordered):
                    if not ordered[order].acquire(timeout=SETTLING):
                        break
                    locks.callback(ordered[order].release)
                else:
                    for table in tables:
                        if table is not None:
                            table.join_first_write()
                    yield
                    return

    # ------------------------------------------------------------------ construction

    def _init(self) -> None:
        if self._initialized:
            return
        if self._generator_argument is not None:
            self._init_generator = self._generator_argument
        tracked = False
        try:
            # TorchRL attaches the buffer to the storage first, and then makes its other parts.
            self._storage = self._init_storage = self._maybe_make_storage(
                self._init_storage, compilable=self._init_compilable
            )
            tracked = self._table is not None
            super()._init()
            self._sample_unit = stamped_unit(self._sample_unit, self._writer.tracks_generations)
            table = self._table
            if table is not None:
                self._limit_to_tree()
                table.install_cells()
                if self.shared:
                    table.share()
        except BaseException:
            self._initialized = False
            self._leave_storage(forget_table=not tracked)
            raise
        self._writer_argument = self._generator_argument = None
        _built.add(self)

    def _leave_storage(self, forget_table: bool) -> None:
        """Takes the buffer off its storage, which may be a user's."""
        storage = self.__dict__.get("_storage")
        if storage is not None:
            attached = storage._attached_entities
            attached[:] = [entity for entity in attached if entity is not self]
            if forget_table:
                storage.__dict__.pop(TABLE_ATTRIBUTE, None)
                storage.__dict__.pop(STAMPS_ATTRIBUTE, None)

    def _maybe_make_writer(self, writer: Writer | Callable[[], Writer] | None) -> Writer:
        if self._writer_argument is not None:
            writer = self._writer_argument
        else:
            cls = TensorDictRoundRobinWriter if self._is_tensordict else RoundRobinWriter
            writer = cls(
                compilable=bool(self._init_compilable), track_generations=self._track_generations
            )
        made = super()._maybe_make_writer(writer)
        self._check_tracks(made)
        self._ready_storage(self._storage, made)
        return made

    def _ready_storage(self, storage: Storage, writer: Writer) -> None:
        """Makes the table for a TorchRL writer that tracks; ours make it when they register."""
        if writer.tracks_generations or hasattr(storage, TABLE_ATTRIBUTE):
            self._check_tree(storage, self._priority_sampler)
            self._check_processes(storage, self._sampler)
            check_dimensions(storage, self._sampler, writer)
        if stamps_late(writer) and writer.tracks_generations:
            SlotGenerations.attach(storage)

    def _check_tracks(self, writer: Writer) -> None:
        if self._track_generations and not writer.tracks_generations:
            ours = [cls.__name__ for cls in OUR_WRITERS]
            name = type(writer).__name__ if type(writer).__name__ in ours else ours[0]
            raise ValueError(
                "track_generations=True needs a writer that tracks: got "
                f"{type(writer).__name__} that does not. Pass "
                f"generations.{name}(track_generations=True), or no writer."
            )

    def _check_tree(self, storage: Storage, sampler: Sampler | None) -> None:
        """Refuses a tree without a leaf for every slot: the compiled one checks no bounds."""
        if (
            isinstance(sampler, PrioritizedSampler)
            and sampler.max_size < storage.max_size < torch.iinfo(torch.int64).max
        ):
            raise ValueError(
                "A tracking buffer needs a priority sampler with a leaf for every slot: got "
                f"max_capacity={sampler.max_size} for a storage of {storage.max_size} slots."
            )

    def _check_processes(self, storage: Storage, sampler: Sampler) -> None:
        """Refuses a tree that would not hear of the writes of other processes."""
        table: SlotGenerations | None = getattr(storage, TABLE_ATTRIBUTE, None)
        if isinstance(sampler, PrioritizedSampler) and table is not None and table.lock.is_engaged:
            raise RuntimeError(
                "A storage that other processes may be writing needs a learner that catches up: "
                "got a sync=True priority sampler. Build the buffer with sync=False."
            )

    def _limit_to_tree(self) -> None:
        table, sampler = self._table, self._priority_sampler
        if table is not None and sampler is not None:
            table.limit_to_tree(sampler.max_size)

    def _initialize_prioritized_sampler(self) -> None:
        with self._write_lock:  # another buffer may be writing already
            super()._initialize_prioritized_sampler()

    def mark_update(self, index: Any) -> None:
        """Gives records the default priority; writers on the storage call it."""
        sampler = self.__dict__.get("_sampler")
        if sampler is None:  # another thread still builds the buffer
            return
        table = self._table
        if table is None:
            super().mark_update(index)
            return
        if table.grid is not None:
            self._check_tree(self._storage, self._priority_sampler)
            if isinstance(index, torch.Tensor) and index.ndim > 1:
                index = index[index[:, 0] < table.length]  # the others have no leaf yet
        write_default(sampler, index, self._storage)

    # ------------------------------------------------------------------ writing records

    @_maybe_delay_init
    def add(self, data: Any, *, return_generation: bool = False) -> Any:
        """Puts one record into the buffer; see :meth:`torchrl.data.ReplayBuffer.add`.

        Args:
            data: the record.

        Keyword Args:
            return_generation (bool, optional): whether to return the record's stamp, too.
                Defaults to False.

        Returns:
            The slot, or with ``return_generation=True`` the handle ``(index, generation)``, taken
            under the lock of the write: ``generation`` is an int64 tensor of shape ``[]``.

        Raises:
            RuntimeError: for ``return_generation=True`` if the writer does not track.
        """
        return self._write(partial(super().add, self._clean(data)), "add", return_generation)

    @_maybe_delay_init
    def extend(
        self, data: Any, *, update_priority: bool | None = None, return_generation: bool = False
    ) -> Any:
        """Puts a batch of records into the buffer; see :meth:`torchrl.data.ReplayBuffer.extend`.

        Args:
            data: N records.

        Keyword Args:
            update_priority (bool, optional): see TorchRL's tensordict buffers.
            return_generation (bool, optional): whether to return the records' stamps, too.
                Defaults to False.

        Returns:
            The slots, int64 ``[N]``, or with ``return_generation=True`` a handle per row,
            ``(index, generation)`` with ``generation`` int64 ``[N]``, taken under the lock of the
            write. A row that a later row of the call overwrote carries -1.

        Raises:
            RuntimeError: for ``return_generation=True`` if the writer does not track.

        Examples:
            >>> import torch
            >>> from torchrl.data import ListStorage
            >>> rb = ReplayBuffer(storage=ListStorage(2), track_generations=True)
            >>> rb.extend([10, 11, 12], return_generation=True)
            (tensor([0, 1, 0]), tensor([-1,  0,  1]))
        """
        call = partial(super().extend, self._clean(data), update_priority=update_priority)
        return self._write(call, "extend", return_generation)

    def _clean(self, data: Any) -> Any:
        """Drops the stamps of a sample put back, where TorchRL's writer would store them."""
        late = stamps_late(self._writer) and self._writer.tracks_generations
        return without_stamps(data) if late else data

    def _write(self, write: Callable[[], Any], name: str, return_generation: bool) -> Any:
        """Runs one of TorchRL's writing calls as a single critical section."""
        if return_generation and not self._writer.tracks_generations:
            raise RuntimeError(f"{name}(return_generation=True) needs stamps. {_ENABLE_TRACKING}")
        if self._table is None:
            return write()
        if is_compiling() and type(self._writer) in RING_WRITERS:  # takes no lock
            index = write()
            return (index, row_generations(self._table, index)) if return_generation else index
        plain = type(self._writer) in OUR_WRITERS
        if plain and not return_generation and not isinstance(self._sampler, PrioritizedSampler):
            # Stamps and data are one step inside of the call, and no priority follows them.
            return write()
        table = self._hold()
        try:
            self._writes_under_way += 1
            try:
                index = write() if plain else watched(write, table, self._storage, self._writer)
            finally:
                self._writes_under_way -= 1
            if return_generation:
                index = -1 if index is None else index  # the writer rejected the record
                return index, row_generations(table, index)
            return index
        finally:
            table.lock.release()

    @_maybe_delay_init
    def update_if_present(  # noqa: D417
        self,
        *,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: NestedKey | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Patches fields of records that are still in their slots.

        See :meth:`torchrl.data.ReplayBuffer.update_if_present` for the other arguments.

        Keyword Args:
            index (torch.Tensor): slots, or with ``ndim > 1`` coordinates ``[N, ndim]``. One that is
                negative or out of range is stale.
            generation (torch.Tensor): their stamps.

        Returns:
            ConditionalUpdateResult: as TorchRL's.
        """
        table = self._table
        if table is not None and table.grid is not None:
            index, generation = table.grid.without_outsiders(index, generation)
        return super().update_if_present(
            index=index,
            generation=generation,
            patch=patch,
            version_key=version_key,
            version=version,
            require_newer=require_newer,
        )

    @_maybe_delay_init
    def __setitem__(self, index: Any, value: Any) -> None:
        if self._table is None or names_field(index):
            super().__setitem__(index, value)
            return
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        with self._locked() as table:
            if table.grid is None:
                slots = slots_written(index, value, self._storage)
            else:
                slots = table.grid.slots_assigned(index, self.dim_extend)
            table.advance(slots)
            try:
                super().__setitem__(index, without_stamps(value))
            finally:
                give_default_priority(self._storage, slots)

    @_maybe_delay_init
    def empty(self, empty_write_count: bool = True) -> None:
        """Empties the buffer, which makes every handle stale."""
        if self._table is None:
            super().empty(empty_write_count=empty_write_count)
            return
        with self._locked() as table:
            super().empty(empty_write_count=empty_write_count)
            if not isinstance(self._writer, torchrl_buffers.RoundRobinWriter):
                table.advance_written()
            self._seen = None

    # ------------------------------------------------------------------ sampling

    def _sample(self, batch_size: int) -> tuple[Any, dict[str, Any]]:
        sampler = self._sampler
        if not isinstance(sampler, PrioritizedSliceSampler) or self._table is None:
            return super()._sample(batch_size)
        try:
            return super()._sample(batch_size)
        except BaseException:
            with self._locked():
                unmask_leaves(sampler)
            raise

    # ------------------------------------------------------------------ priorities

    @property
    def _priority_sampler(self) -> PrioritizedSampler | None:
        """The sampler that owns the priority tree, here or in an asynchronous learner."""
        sampler = self._learner_sampler or self._sampler
        return sampler if isinstance(sampler, PrioritizedSampler) else None

    @_maybe_delay_init
    def update_priority(self, index: Any, priority: Any) -> None:
        """Writes priorities by slot, as TorchRL does, whatever record is in it now.

        :meth:`update_priority_if_present` is the safe form.
        """
        if self._table is None:
            super().update_priority(index, priority)
            return
        with self._locked() as table:
            if self._writes_under_way and isinstance(index, torch.Tensor):
                # The priorities that the records of a write carry.
                stamp_rest(table, self._storage, index)
                priority = torch.as_tensor(priority).to(self._priority_dtype)
                if table.grid is not None:
                    priority = priority_per_cell(priority, index.shape[:1], self.dim_extend)
                    if priority.ndim > 1:
                        priority = _reduce(priority.flatten(1), self._sampler.reduction, dim=1)
                    stays = last_rows(table.grid.number(index))
                    index, priority = index[stays], priority[stays] if priority.ndim else priority
                elif index.numel() > table.stamps.numel():
                    # A row that the call itself overwrote has no record any more.
                    stays = last_rows(index)
                    index, priority = index[stays], priority[stays]
            super().update_priority(index, priority)

    @_maybe_delay_init
    def update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> PriorityUpdateResult:
        """Writes the priorities of the records that are still in their slots, and no others.

        Everything is validated first. Then comparing the stamps and writing the priorities is one
        step under the lock of the storage, for every writer of it (*Atomicity*, design notes).

        Keyword Args:
            index: the slots of N handles, as ``sample`` or ``extend`` gave them: int, sequence of
                ints, NumPy array, integer tensor, or the tuple of per-dimension tensors of a
                sampler. Trailing dimensions must repeat the slot. With ``ndim > 1``, coordinates: a
                tuple of one tensor per dimension, or a ``[..., ndim]`` tensor.
            generation: their stamps, integer, one per handle; never broadcast.
            priority: one per handle, or one for all. Finite, not negative, and such that
                ``(priority + eps) ** alpha`` (the sampling weight of Schaul et al. 2015,
                https://arxiv.org/abs/1511.05952) is above 0 and at most the largest number of the
                sampler's dtype over its capacity. Cast to that dtype. Trailing dimensions are
                reduced by the sampler's ``reduction``.

        Returns:
            PriorityUpdateResult: ``updated_mask``, ``num_updated`` and ``num_stale``. The mask is
            ``[N]``, or ``[]`` for an integer index; for coordinates, it has their leading shape. A
            handle is stale, which is no error, if its record is gone, its stamp is -1, or its slot
            is out of range or past the length of the storage. Of a live handle that comes twice,
            the last row wins; both count as updated.

        Raises:
            RuntimeError: if the writer does not track or the sampler has no priorities.
            TypeError: if ``index`` or ``generation`` is not integer or ``priority`` is no number.
            ValueError: if the numbers of handles, stamps and priorities differ, for the first
                priority outside its range, or for a 1-D index with ``ndim > 1``, which could be
                slots or cells. Nothing has changed then.

        Examples:
            >>> import torch
            >>> from torchrl.data import LazyTensorStorage
            >>> rb = PrioritizedReplayBuffer(
            ...     alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), track_generations=True
            ... )
            >>> index, generation = rb.extend(torch.arange(4), return_generation=True)
            >>> _ = rb.extend(torch.arange(4, 6))  # other records take slots 0 and 1
            >>> result = rb.update_priority_if_present(
            ...     index=index, generation=generation, priority=[7.0, 7.0, 3.0, 3.0]
            ... )
            >>> result.updated_mask
            tensor([False, False,  True,  True])
            >>> result.num_updated, result.num_stale
            (2, 2)
        """
        name = "update_priority_if_present"
        if self._table is None:
            self._conditional_parts(name)  # which raises
        held = self._hold()
        try:
            table, sampler = self._conditional_parts(name)
            (slots, taken, mask_shape, device), (values, highest) = self._checked_update(
                table, sampler, index, generation, priority
            )
            grid = table.grid
            ahead = False
            if self._learner_sampler is not None:
                ahead = self._may_write_ahead(table, sampler, highest)
                if not ahead:
                    self._catch_up()
            live = kept = table.live(slots if grid is None else slots // grid.width, taken)
            if not values.is_cpu:  # a parallel scatter has no last row
                kept = live.clone()
                kept[live] = last_rows(slots[live])
            num_handles = live.numel()
            if kept.all().item():
                num_kept = num_handles
            else:
                rows = kept.nonzero().view(-1)
                num_kept = rows.numel()
                if num_kept:
                    slots = slots.index_select(0, rows)
                    if values.ndim:
                        values = values.index_select(0, rows.to(values.device))
            if num_kept:
                leaves = slots if slots.is_cpu else slots.to(values.device)
                write_priority(sampler, leaves, values, highest, self._storage)
                if ahead and self._seen is not None:  # else they would be taken for unseen
                    self._seen[slots] = table.stamps[slots]
            if kept is live:
                self._tally.count(num_kept, num_handles)
            else:
                self._tally.count_mask(live)
        finally:
            held.lock.release()
        if mask_shape != live.shape or live.device != device:
            live = live.reshape(mask_shape).to(device)
        return PriorityUpdateResult.of(live)

    @_maybe_delay_init
    def update_tensordict_priority_if_present(self, data: TensorDictBase) -> PriorityUpdateResult:
        """Writes the priorities of a sample's records that are still in their slots.

        The conditional form of ``update_tensordict_priority``; see
        :meth:`update_priority_if_present`.

        Args:
            data (TensorDictBase): a sample of this buffer, ``[N]`` or ``[N, T]``, with ``"index"``,
                ``"index_generation"`` and the buffer's ``priority_key``. Without the latter the
                default priority is written, as TorchRL does. In a buffer with a ``Sequence`` unit,
                a priority goes to the anchor of its row, by ``"anchor_index"`` and
                ``"anchor_generation"``: of an anchor's valid rows, the largest.

        Returns:
            PriorityUpdateResult: with an ``updated_mask`` of shape ``[N]``, a flag for each row.

        Raises:
            KeyError: if one of these keys is missing, other than ``priority_key``.
            RuntimeError: if the writer does not track, the sampler has no priorities, or the buffer
                is no tensordict buffer.
        """
        name = "update_tensordict_priority_if_present"
        if not self._is_tensordict:
            raise RuntimeError(
                f"{name}() needs a tensordict buffer: got {type(self).__name__}. Use "
                "update_priority_if_present()."
            )
        self._conditional_parts(name)
        if not is_tensor_collection(data):
            raise TypeError(f"{name}() needs a tensordict: got {type(data).__name__}.")
        of_anchors = isinstance(self._sample_unit, StampedSequence)
        for key in ANCHOR_KEYS if of_anchors else ("index", GENERATION_KEY):
            if data.get(key, None) is None:
                raise KeyError(
                    f"{name}() needs {key!r} in the sample: got {sorted(map(str, data.keys()))}. "
                    "Either it was sampled while the writer did not track, or a transform or a "
                    "select() dropped the key."
                )
        if of_anchors:
            return self._update_anchors(data)
        if self._storage.ndim > 1:
            return self._update_cells(data)
        of_td = self._get_priority_vector if data.ndim else self._get_priority_item
        return self.update_priority_if_present(
            index=data.get("index"), generation=data.get(GENERATION_KEY), priority=of_td(data)
        )

    @_maybe_delay_init
    def submit_update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> Future[PriorityUpdateResult]:
        """Runs :meth:`update_priority_if_present` on a background thread.

        It runs after the samples that were prefetched when it was submitted, and after all earlier
        submissions, :meth:`~torchrl.data.ReplayBuffer.submit_update_if_present` among them; samples
        that are asked for later wait for it. ``synchronize`` and ``shutdown`` wait, too.

        CUDA tensors are copied on the caller's current stream, at once and without blocking it.
        Other inputs must not be changed until the future is done. A thread that holds the lock of
        the storage must not wait for the future, nor sample before it is done: it needs that lock.

        Keyword Args:
            index: see :meth:`update_priority_if_present`.
            generation: see there.
            priority: see there.

        Returns:
            concurrent.futures.Future: of the :class:`PriorityUpdateResult`, whose mask is on the
            CPU if ``index`` was a CUDA tensor. It raises what is wrong with the inputs, and if
            nobody asks it, so does, once, the next submission, ``synchronize`` or ``shutdown``; so
            do samples meanwhile, if no later update was submitted.

        Raises:
            RuntimeError: if the writer does not track, the sampler has no priorities, or the buffer
                was shut down.

        Examples:
            >>> import torch
            >>> from torchrl.data import LazyTensorStorage
            >>> rb = PrioritizedReplayBuffer(
            ...     alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), track_generations=True
            ... )
            >>> index, generation = rb.extend(torch.arange(4), return_generation=True)
            >>> future = rb.submit_update_priority_if_present(
            ...     index=index, generation=generation, priority=torch.rand(4)
            ... )
            >>> future.result().num_updated
            4
            >>> rb.shutdown()
        """
        name = "submit_update_priority_if_present"
        self._check_updatable(name)
        handles_and_priority, arrive = background.copy_to_host(index, generation, priority)

        def update() -> PriorityUpdateResult:
            arrive()
            slots, taken, values = handles_and_priority
            return self.update_priority_if_present(index=slots, generation=taken, priority=values)

        return background.submit(self, name, update)

    def _checked_update(
        self,
        table: SlotGenerations,
        sampler: PrioritizedSampler,
        index: Any,
        generation: Any,
        priority: Any,
    ) -> tuple[Any, Any]:
        """What :meth:`update_priority_if_present` got, validated: handles, and priorities."""
        if table.grid is None:
            handles = checked_handles(index, generation)
        else:  # from here on cells, by the numbers of their leaves
            handles = checked_cells(index, generation, table.grid)
            priority = priority_per_cell(priority, handles[2], self.dim_extend)
        return handles, checked_priority(priority, handles[0].numel(), sampler)

    def _check_update(self, index: Any, generation: Any, priority: Any) -> None:
        """Raises what :meth:`update_priority_if_present` would; changes nothing."""
        table, sampler = self._conditional_parts("update_priority_if_present")
        self._checked_update(table, sampler, index, generation, priority)

    def _update_anchors(self, data: TensorDictBase) -> PriorityUpdateResult:
        """Writes the priorities of a Sequence sample's anchors that are still in their slots."""
        _, sampler = self._conditional_parts("update_tensordict_priority_if_present")
        priority = data.get(self.priority_key, None)
        if priority is None:
            priority = torch.full((data.numel(),), float(sampler.default_priority))
        index, generation, priority, which = anchor_priorities(data, priority, sampler.reduction)
        result = self.update_priority_if_present(
            index=index, generation=generation, priority=priority
        )
        mask = result.updated_mask[which]
        if mask.ndim > 1:
            mask = mask.flatten(1).all(1)
        return PriorityUpdateResult.of(mask)

    def _update_cells(self, data: TensorDictBase) -> PriorityUpdateResult:
        """Writes the priorities of a sample's cells that are still in their slots."""
        _, sampler = self._conditional_parts("update_tensordict_priority_if_present")
        return self.update_priority_if_present(
            index=data.get("index").unbind(-1),
            generation=data.get(GENERATION_KEY),
            priority=data.get(self.priority_key, sampler.default_priority),
        )

    def _check_updatable(self, name: str) -> None:
        """Refuses a conditional update that no input could make possible."""
        self._conditional_parts(name)

    def _conditional_parts(self, name: str) -> tuple[SlotGenerations, PrioritizedSampler]:
        table, sampler = self._table, self._priority_sampler
        if table is None or not self._writer.tracks_generations:
            raise RuntimeError(f"{name}() needs stamps. {_ENABLE_TRACKING}")
        if sampler is None and getattr(self, "_sync", True) is False:
            raise RuntimeError(
                f"{name}() needs priorities: they are private to the learner, the process that "
                "built the buffer, and this process only writes records."
            )
        if sampler is None:
            raise RuntimeError(
                f"{name}() needs priorities: got a {type(self._sampler).__name__}. Build the "
                "buffer with sampler=PrioritizedSampler(...), or as a prioritized buffer."
            )
        return table, sampler

    def _takes_conditional_updates(self) -> bool:
        """Whether there are both stamps and priorities, so that an update can be conditional."""
        return (
            self._table is not None
            and self._priority_sampler is not None
            and self._writer.tracks_generations
        )

    @_maybe_delay_init
    def _guards_samples(self) -> bool:
        """Whether ``update_tensordict_priority`` of a sample can be made conditional now.

        Not inside of a write of this thread: the priorities that it carries are of its own records.
        """
        if not self._takes_conditional_updates():
            return False
        return not (self._write_lock.is_held() and self._writes_under_way)

    def stats(self) -> dict[str, int | float | bool]:
        """Returns what :meth:`torchrl.data.ReplayBuffer.stats` does, and counts of updates.

        Returns:
            What TorchRL gives, and, if there are stamps and priorities, what became of the handles
            that this process brought to conditional updates since :meth:`reset_stats`:

            - ``"updates_applied"`` (int): their priority was written;
            - ``"updates_stale"`` (int): their record was gone;
            - ``"stale_share"`` (float): the stale ones among all; 0.0 if there were none at all.

            Only this call waits for an accelerator that the sampler is on; the updates do not.

        Examples:
            >>> import torch
            >>> from torchrl.data import LazyTensorStorage
            >>> rb = PrioritizedReplayBuffer(
            ...     alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), track_generations=True
            ... )
            >>> index, generation = rb.extend(torch.arange(4), return_generation=True)
            >>> _ = rb.add(torch.tensor(4))  # another record takes slot 0
            >>> _ = rb.update_priority_if_present(index=index, generation=generation, priority=2.0)
            >>> stats = rb.stats()
            >>> stats["updates_applied"], stats["updates_stale"], stats["stale_share"]
            (3, 1, 0.25)
        """
        stats = super().stats()
        tallies = self._tallies()
        if tallies:
            stats.update(stats_of(tallies))
        return stats

    def reset_stats(self) -> None:
        """Lets the counts of conditional updates in :meth:`stats` begin at zero again."""
        with self._write_lock:
            for tally in self._tallies():
                tally.reset()

    def _tallies(self) -> list[Tally]:
        """Where its conditional updates are counted; none if it takes none."""
        return [self._tally] if self._takes_conditional_updates() else []

    # ------------------------------------------------------------------ asynchronous learners

    @property
    def _priority_dtype(self) -> torch.dtype:
        sampler = self._priority_sampler
        return torch.float32 if sampler is None else sampler.dtype

    @property
    def _learner_sampler(self) -> Sampler | None:
        """The private sampler of a ``sync=False`` learner."""
        return self.__dict__.get("_prioritized_sampler")

    def _catch_up(self) -> None:
        """Gives every record that a ``sync=False`` tree has not seen the default priority."""
        table = self._table
        sampler = self._learner_sampler
        if table is None or sampler is None:
            return
        revision, end = self._storage._mutation_revision, table.ring_log.end
        if (end, revision) == self._seen_until and self._seen is not None:
            return
        stamps, length, capacity = table.stamps, len(self._storage), self._storage.max_size
        known = 0 if self._seen is None else self._seen.numel()
        ranges = None
        if self._seen is None or known < stamps.numel():
            seen = torch.full_like(stamps, -1)
            if self._seen is not None:
                seen[:known] = self._seen
            self._seen = seen
        else:
            ranges = table.ring_log.ranges_since(*self._seen_until, revision, capacity)
        if ranges is None or sum(count for _, count in ranges) > length // 2:
            ranges = [(0, length)]
        self._seen_until = (end, revision)
        for start, count in ranges:
            over = start + count - capacity
            for begin, stop in ((start, min(start + count, length)), (0, over)):
                if begin < stop:
                    new = (stamps[begin:stop] != self._seen[begin:stop]).nonzero()[:, 0] + begin
                    if new.numel():
                        write_default(sampler, new, self._storage)
                        self._seen[new] = stamps[new]

    def _may_write_ahead(
        self, table: SlotGenerations, sampler: PrioritizedSampler, highest: float
    ) -> bool:
        """Whether a learner may write priorities up to ``highest`` before it catches up.

        It may where the records that it has not seen get the same default priority afterwards.
        """
        return (
            self._seen is not None
            and self._seen.numel() == table.stamps.numel()
            and keeps_default(sampler, highest)
        )

    def _catch_up_prioritized_sampler(self) -> None:
        # TorchRL catches up before it takes the lock, and a record could come in between.
        if self._table is None:
            super()._catch_up_prioritized_sampler()

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler that owns the priority tree.

        Under the lock of the table, where TorchRL's methods read it, it has caught up.
        """
        table = self._table
        if table is not None and table.lock.is_held():
            self._catch_up()
        return super().prioritized_sampler

    # ------------------------------------------------------------------ state and parts

    @_maybe_delay_init
    def state_dict(self) -> dict[str, Any]:
        """Returns records, priorities, stamps and lineage at one point in time.

        Of a ``sync=False`` learner, its priorities too.
        """
        table = self._table
        if table is None:
            return super().state_dict()
        with self._settled(table):
            return {**super().state_dict(), "_learner": self._learner_state()}

    @_maybe_delay_init
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state; :meth:`SlotGenerations.load_state_dict` tells which handles live on.

        Records that ran on since the state was taken get the default priority.
        """
        table = self._table
        if table is None:
            super().load_state_dict(state_dict)
            return
        learner = state_dict.get("_learner")
        check_fits(self._storage, self._priority_sampler, state_dict)
        check_ranks(self._writer, state_dict["_writer"])
        with self._restoring(table):
            super().load_state_dict(state_dict)
            self._load_learner_state(learner)

    @_maybe_delay_init
    def dumps(self, path: str | Path) -> None:
        """Saves records, priorities, stamps and lineage into the folder ``path``.

        An earlier dump there can be loaded until this one is complete, also if the process is
        killed; other files there stay. A memory-mapped storage whose own files are in that folder
        is exempt: it runs on there, and its handles from before are stale when it is loaded.
        """
        table = self._table
        if table is None:
            super().dumps(path)
            return
        path = Path(path).absolute()
        in_place = table.is_inside(path)
        with self._settled(table), contextlib.ExitStack() as replaced:
            folder = path if in_place else replaced.enter_context(dumps.replacing(path))
            (folder / dumps.MANIFEST).unlink(missing_ok=True)
            super().dumps(folder)
            torch.save(
                {"learner": self._learner_state(), "in_place": in_place}, folder / STATE_FILE
            )
            if in_place:
                dumps.write_manifest(folder)

    @_maybe_delay_init
    def loads(self, path: str | Path) -> None:
        """Restores what :meth:`dumps` saved; see :meth:`load_state_dict`.

        Raises:
            FileNotFoundError: if there is no whole dump in ``path``.
            RuntimeError: if a file of it is missing or truncated.
            ValueError: if it is of another capacity. In each case nothing has changed.
        """
        table = self._table
        if table is None:
            super().loads(path)
            return
        path = Path(path).absolute()
        dumps.finish(path)
        dumps.check(path)
        check_dump_fits(self._storage, self._sampler, path)
        check_ranks(self._writer, path / "writer")
        file = path / STATE_FILE
        ours = torch.load(file, weights_only=False) if file.exists() else {}
        with self._restoring(table):
            if isinstance(self._sampler, PrioritizedSampler):
                self._sampler._max_priority = None  # else TorchRL casts the saved one to its dtype
            super().loads(path)
            self._load_learner_state(ours.get("learner"))
            if ours.get("in_place"):
                self._note_that_records_ran_on()
            elif table.is_inside(path):  # the records run on in the dump from now on
                torch.save({**ours, "in_place": True}, file)
                dumps.write_manifest(path)

    def _note_that_records_ran_on(self) -> None:
        """For a dump that the records went on to be written into: nothing tells which."""
        table = self._table
        assert table is not None  # a tracked buffer was loaded
        table.retire()
        table.ran_on = torch.ones_like(table.stamps, dtype=torch.bool)
        if isinstance(self._writer, TensorDictMaxValueWriter):
            self._writer.rank_what_ran_on()

    @contextlib.contextmanager
    def _restoring(self, table: SlotGenerations, loaded: tuple[Any, ...] = ()) -> Iterator[None]:
        """A load, of ``loaded`` too: whatever comes of it, no tree keeps a gone priority."""
        with self._settled(table):
            before = table.stamps.clone()
            try:
                yield
            except BaseException:
                # The records may be new already, or in part: no handle is live on them.
                table.retire()
                give_default_priority(self._storage, table.records())
                raise
            # Ours came with the records; what another buffer has was for those of before.
            known = min(before.numel(), table.stamps.numel())  # it may have grown or got its shape
            gone = (table.stamps[:known] != before[:known]).nonzero().reshape(-1)
            ours = [self, *loaded]
            others = [entity for entity in self._storage._attached_entities if entity not in ours]
            give_default_priority(self._storage, gone, others)
            if table.ran_on is not None:
                give_default_priority(self._storage, table.ran_on.nonzero().reshape(-1), [self])

    def _learner_state(self) -> dict[str, Any] | None:
        sampler = self._learner_sampler
        if sampler is None:
            return None
        seen = None if self._seen is None else self._seen.clone()
        return {"sampler": sampler.state_dict(), "seen": seen}

    def _load_learner_state(self, state: dict[str, Any] | None) -> None:
        sampler = self._learner_sampler
        if sampler is None:
            return
        self._seen = None
        if state is None or state["seen"] is None:
            sampler._empty()
        else:
            sampler.load_state_dict(state["sampler"])
            self._seen = state["seen"].clone()
            self._seen_until = (-ENTRIES - 1, 0)  # compares every slot next

    def share(self, shared: bool = True) -> Any:
        """Readies the buffer for other processes; see :meth:`torchrl.data.ReplayBuffer.share`.

        Puts the records of a tracked :class:`~torchrl.data.LazyTensorStorage` into shared memory,
        at once or when they are first written. The lock is the table's before and after.

        Raises:
            RuntimeError: if the table of the storage can't be shared.
        """
        if shared and self._table is not None:
            self._table.share()
        return super().share(shared)

    def _torchrl_state(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_stock_replay_lock", None)  # a thread lock: __setstate__() makes another
        state.pop("_tally", None)  # what this buffer did
        return state

    def __getstate__(self) -> dict[str, Any]:
        table = self._table
        if table is None:
            return self._torchrl_state()
        if get_spawning_popen() is None:
            return self._copied_state()
        self._check_sendable()
        table.check_strategy()
        with self._settled(table):
            table.install_cells()
            state = self._torchrl_state()
        state["_seen"] = None  # the learner's, like its sampler
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._table is None:
            state = copy.deepcopy(self._torchrl_state(), memo)
        else:
            state = self._copied_state()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(state)
        return copied

    def _copied_state(self) -> dict[str, Any]:
        """A snapshot: a pickler or a deepcopy would read records and stamps one after the other."""
        with self._settled(self._table):
            state = self._torchrl_state()
            state.pop("_stock_write_lock", None)  # its semaphore; share() makes another
            memo: dict[int, Any] = {id(entity): None for entity in self._storage._attached_entities}
            copy_records(self._storage, memo)
            state = copy.deepcopy(state, memo)
        state["_storage"]._attached_entities_list = []  # they stay behind
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._stock_replay_lock = threading.RLock()
        self._tally = Tally()
        super().__setstate__(state)
        storage = self.__dict__.get("_storage")
        if storage is not None:
            storage.attach(self)
        _built.add(self)
        if self._table is None:
            return
        if "_stock_write_lock" not in state:  # a copy
            super().share(self.shared)
            own_files(self._storage)
        self._table.install_cells()

    def _check_sendable(self) -> None:
        if self._prefetch:
            raise RuntimeError(
                f"A buffer with prefetch={self._prefetch_cap} can't be sent to another process: "
                "threads of this one prefetch its batches. Build it with prefetch=None."
            )
        records = getattr(self._storage, "_storage", None)
        if isinstance(records, list) or records is None or is_tensor_collection(records):
            return  # TorchRL or the table refuse what they must
        raise RuntimeError(
            "TorchRL sends no storage of plain tensors to a spawned process: got "
            f"{type(records).__name__} records. Use tensordict records, or fork."
        )

    @_maybe_delay_init
    def set_storage(
        self, storage: Storage, collate_fn: Callable[..., Any] | None = None
    ) -> Storage:
        """Moves a tracking buffer to another storage: writer, lock and priority tree follow.

        Handles of the former storage are stale from then on, and so are those that other buffers
        took of this one: their stamps could be equal. Without tracking, see
        :meth:`torchrl.data.ReplayBuffer.set_storage`.

        Args:
            storage (Storage): the new storage.
            collate_fn (Callable, optional): see :meth:`torchrl.data.ReplayBuffer.set_storage`.

        Returns:
            Storage: the former storage.

        Raises:
            TypeError: for a kind of storage that cannot be tracked.
            ValueError: for more slots than the priority sampler holds, or a number of dimensions
                that the sampler does not know.
        """
        writer = self._writer
        if not writer.tracks_generations:
            return super().set_storage(storage, collate_fn)
        self._check_tree(storage, self._priority_sampler)
        self._check_processes(storage, self._sampler)
        check_dimensions(storage, self._learner_sampler or self._sampler, writer)
        if storage.ndim > 1 and self._learner_sampler is not None:
            raise ValueError(
                f"An asynchronous learner (sync=False) needs a storage with ndim=1: got ndim="
                f"{storage.ndim}."
            )
        table = SlotGenerations.attach(storage)
        with self._settled(self._table, table):
            former = self._storage
            self._leave_storage(forget_table=False)
            super().set_storage(storage, collate_fn)
            storage.attach(self)
            self._limit_to_tree()
            table.retire()
            writer.register_storage(storage)
            writer._cursor = 0
            self._forget_priorities()
        return former

    @_maybe_delay_init
    def set_writer(self, writer: Writer) -> Writer:
        """Gives the buffer another writer and returns the former one.

        Raises:
            ValueError: if the buffer was built with ``track_generations=True`` and the writer does
                not track.
        """
        self._check_tracks(writer)
        self._ready_storage(self._storage, writer)
        table = self._table
        if table is None and not writer.tracks_generations:
            return super().set_writer(writer)
        with self._settled(table):
            former = super().set_writer(writer)
            self._limit_to_tree()
            self._sample_unit = stamped_unit(self._sample_unit, writer.tracks_generations)
            return former

    @_maybe_delay_init
    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Gives the buffer another sampler and returns the former one.

        In a tracked buffer, a priority sampler begins with the default priority for every record:
        the priorities that it may have are those of records that nobody has followed since.

        Raises:
            ValueError: if the sampler holds fewer slots than a tracked storage.
        """
        table = self._table
        if table is None:
            return super().set_sampler(sampler)
        self._check_tree(self._storage, sampler)
        check_dimensions(self._storage, sampler, self._writer)
        if self._learner_sampler is None and not isinstance(self._sampler, PrioritizedSampler):
            self._check_processes(self._storage, sampler)
        with self._settled(table):
            if isinstance(sampler, PrioritizedSampler) and self._learner_sampler is not None:
                former, self._prioritized_sampler = self._learner_sampler, sampler
            else:
                former = super().set_sampler(sampler)
            self._limit_to_tree()
            self._forget_priorities()
            return former

    def _forget_priorities(self) -> None:
        sampler = self._priority_sampler
        if sampler is not None:
            sampler._empty()
        self._seen = None
        self._initialize_prioritized_sampler()


class ReplayBuffer(ConditionalPriorityUpdates, torchrl_buffers.ReplayBuffer):
    """A replay buffer whose samples carry generation stamps.

    See :class:`torchrl.data.ReplayBuffer` for the arguments that are not listed here.

    Keyword Args:
        track_generations (bool, optional): whether to stamp records. Defaults to False.
        writer (Writer or Callable[[], Writer], optional): a tracking :class:`RoundRobinWriter`, or
            any TorchRL writer.

    Examples:
        >>> import torch
        >>> from torchrl.data import LazyTensorStorage, PrioritizedSampler
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     sampler=PrioritizedSampler(4, alpha=1.0, beta=1.0),
        ...     batch_size=2,
        ...     track_generations=True,
        ... )
        >>> _ = rb.extend(torch.arange(4))
        >>> data, info = rb.sample(return_info=True)
        >>> result = rb.update_priority_if_present(
        ...     index=info["index"], generation=info["index_generation"], priority=2.0
        ... )
        >>> result.num_updated, result.num_stale
        (2, 0)
    """


class PrioritizedReplayBuffer(ReplayBuffer, torchrl_buffers.PrioritizedReplayBuffer):
    """A prioritized replay buffer with generation stamps and conditional priority updates.

    See :class:`torchrl.data.PrioritizedReplayBuffer` for the arguments that are not listed here.

    Keyword Args:
        alpha (float): exponent of the priorities.
        beta (float): exponent of the importance weights.
        writer (Writer or Callable[[], Writer], optional): see :class:`ReplayBuffer`.
        shared (bool, optional): see :class:`torchrl.data.ReplayBuffer`. Defaults to False.
        generator (torch.Generator, optional): source of randomness of the samples.
        track_generations (bool, optional): whether to stamp records. Defaults to False.

    Raises:
        ValueError: for ``shared=True`` with prefetching.

    Examples:
        >>> import torch
        >>> from torchrl.data import LazyTensorStorage
        >>> rb = PrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=LazyTensorStorage(4), track_generations=True
        ... )
        >>> index, generation = rb.extend(torch.arange(4), return_generation=True)
        >>> rb.update_priority_if_present(
        ...     index=index, generation=generation, priority=torch.rand(4)
        ... ).num_updated
        4
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        writer: Writer | Callable[[], Writer] | None = None,
        shared: bool = False,
        generator: torch.Generator | None = None,
        track_generations: bool = False,
        **kwargs: Any,
    ) -> None:
        if shared and kwargs.get("prefetch"):
            raise ValueError(
                "shared=True needs prefetch=None or 0, since threads do not reach other processes: "
                f"got prefetch={kwargs['prefetch']}."
            )
        self._generator_argument = generator
        super().__init__(
            alpha=alpha, beta=beta, writer=writer, track_generations=track_generations, **kwargs
        )
        if shared:
            self.share()


class TensorDictReplayBuffer(ReplayBuffer, torchrl_buffers.TensorDictReplayBuffer):
    """A tensordict replay buffer whose samples carry generation stamps.

    See :class:`torchrl.data.TensorDictReplayBuffer` for the arguments that are not listed here, and
    :class:`ReplayBuffer` for ``track_generations`` and ``writer``.

    Keyword Args:
        guard_priorities (bool, optional): whether :meth:`update_tensordict_priority`, which
            TorchRL's trainers and recipes call, is conditional. Defaults to False.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, PrioritizedSampler
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     sampler=PrioritizedSampler(4, alpha=1.0, beta=1.0),
        ...     batch_size=2,
        ...     track_generations=True,
        ... )
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> sample = rb.sample()
        >>> sample["td_error"] = torch.tensor([0.5, 0.25])
        >>> rb.update_tensordict_priority_if_present(sample).num_updated
        2
    """

    _guard_priorities: bool

    def __init__(self, *args: Any, guard_priorities: bool = False, **kwargs: Any) -> None:
        self._guard_priorities = guard_priorities
        super().__init__(*args, **kwargs)

    @_maybe_delay_init
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdateResult | None:
        """Writes the priorities of a sample by slot; see TorchRL's method of the same name.

        With ``guard_priorities=True`` it is :meth:`update_tensordict_priority_if_present`, so that
        code which knows nothing of stamps is safe. If the buffer does not track, or its sampler has
        no priorities, it writes by slot all the same, or nothing.

        Args:
            data (TensorDictBase): a sample of this buffer.

        Returns:
            PriorityUpdateResult: of a conditional update; else None.

        Raises:
            KeyError: if a conditional update finds no ``"index"`` or ``"index_generation"``.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl.data import LazyTensorStorage
            >>> rb = TensorDictPrioritizedReplayBuffer(
            ...     alpha=0.7,
            ...     beta=0.5,
            ...     storage=LazyTensorStorage(4),
            ...     batch_size=4,
            ...     track_generations=True,
            ...     guard_priorities=True,
            ... )
            >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))
            >>> sample = rb.sample()
            >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))  # a full lap
            >>> sample["td_error"] = torch.ones(4)
            >>> rb.update_tensordict_priority(sample).num_stale
            4
        """
        if self._guard_priorities and self._guards_samples():
            return self.update_tensordict_priority_if_present(data)
        grid = None if self._table is None else self._table.grid
        if grid is None or not self._writes_under_way:
            return super().update_tensordict_priority(data)
        priority = data.get(self.priority_key, None)
        if priority is not None:
            index = data.get("index").reshape(-1, grid.ndim)
            self.update_priority(index, priority.reshape(len(index), -1))
        return None

    def extend(
        self,
        tensordicts: TensorDictBase,
        *,
        update_priority: bool | None = None,
        return_generation: bool = False,
    ) -> Any:
        """Puts a batch of records into the buffer; see :meth:`ReplayBuffer.extend`."""
        return super().extend(
            tensordicts, update_priority=update_priority, return_generation=return_generation
        )

    # With ndim > 1, TorchRL's add() fails to label its record with coordinates, or with ndim > 2
    # takes the slots in them for the cells to give a priority to (update_tensordict_priority).

    def _set_index_in_td(self, tensordict: TensorDictBase, index: Any) -> None:
        grid = None if self._table is None else self._table.grid
        if grid is not None and tensordict.shape == grid.row:  # one record
            tensordict.set("index", index.reshape(*grid.row, grid.ndim))
        else:
            super()._set_index_in_td(tensordict, index)


class TensorDictPrioritizedReplayBuffer(
    TensorDictReplayBuffer, torchrl_buffers.TensorDictPrioritizedReplayBuffer
):
    """A prioritized tensordict replay buffer with stamps and conditional priority updates.

    See :class:`torchrl.data.TensorDictPrioritizedReplayBuffer` for the other arguments,
    :class:`ReplayBuffer` for ``track_generations`` and ``writer``, and
    :class:`TensorDictReplayBuffer` for ``guard_priorities``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> rb = TensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7,
        ...     beta=0.5,
        ...     storage=LazyTensorStorage(4),
        ...     batch_size=4,
        ...     track_generations=True,
        ... )
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> sample = rb.sample()
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))  # a full lap
        >>> sample["td_error"] = torch.ones(4)
        >>> result = rb.update_tensordict_priority_if_present(sample)
        >>> result.num_updated, result.num_stale
        (0, 4)
    """


# TorchRL's classes that make a priority tree as large as the storage.
_WITH_OWN_TREE = (
    torchrl_buffers.PrioritizedReplayBuffer,
    torchrl_buffers.TensorDictPrioritizedReplayBuffer,
)

_ENABLE_TRACKING = (
    "Build the buffer with track_generations=True, or pass "
    "writer=generations.RoundRobinWriter(track_generations=True)."
)


def _reset_in_child() -> None:
    """Leaves to the parent its threads, what they held, and a learner's priorities."""
    for rb in list(_built):
        rb._futures_lock = threading.RLock()
        rb._stock_replay_lock = threading.RLock()
        rb._writes_under_way = 0
        rb._tally.reset()
        rb._prefetch_queue.clear()
        rb._pending_update_futures.clear()
        rb._sample_dependency = rb._update_executor = None
        if rb._prefetch:
            rb._prefetch_executor = ThreadPoolExecutor(max_workers=rb._prefetch_cap)
        if rb._table is not None and rb._learner_sampler is not None:
            rb._prioritized_sampler = None  # as in a process that was spawned


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
