"""A TorchRL buffer on a storage with a table: its locks, its parts, its writes, its samples.

A buffer of ours finds the table of its storage by itself, whoever put it there, and uses the
table's lock as its own. On a storage without a table every method is TorchRL's. ``state.py`` adds
checkpoints and copies, and ``buffers.py`` the conditional updates.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDict
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

from ..core.index import names_field, slots_written
from ..core.priorities import check_leaves, keeps_default, samplers_on, write_default
from ..core.table import STAMPS_ATTRIBUTE, TABLE_ATTRIBUTE, SlotGenerations
from ..core.tally import Tally
from ..writers.foreign import OUR_WRITERS, RING_WRITERS, stamps_late, watched
from ..writers.ring import (
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
    give_default_priority,
    row_generations,
    without_stamps,
)
from .sampling import check_dimensions, info_on, put_info, unmask_leaves
from .sequence import stamped_unit

# How long a restore holds up new samples, in seconds, while another thread holds the table's lock.
SETTLING = 0.05

# Every buffer of ours in this process, for what a forked child must not inherit.
built: weakref.WeakSet[TrackingBuffer] = weakref.WeakSet()

ENABLE_TRACKING = (
    "Build the buffer with track_generations=True, or pass "
    "writer=generations.RoundRobinWriter(track_generations=True)."
)

_CPU = torch.device("cpu")

# TorchRL's classes that make a priority tree as large as the storage.
_WITH_OWN_TREE = (
    torchrl_buffers.PrioritizedReplayBuffer,
    torchrl_buffers.TensorDictPrioritizedReplayBuffer,
)

# TorchRL's own way to sample; see TrackingBuffer.sample().
_INTO_DATA = torchrl_buffers.TensorDictReplayBuffer
_SAMPLE_INTO_DATA, _SAMPLE = _INTO_DATA.sample, torchrl_buffers.ReplayBuffer.sample

# The mix-in stands before a TorchRL buffer class, whose methods and attributes it works with.
if TYPE_CHECKING:
    from torchrl.data import ReplayBuffer as _Buffer
else:
    _Buffer = object


class TrackingBuffer(_Buffer):
    """What a TorchRL buffer class does differently on a storage with a table.

    The lock of the table guards the records, the stamps and the priority tree. ``add`` and
    ``extend`` hold it from the first stamp to the last priority; a sample reads index, stamps and
    data under it.
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
                table.install_cells()
                if self.shared:
                    table.share()
        except BaseException:
            self._initialized = False
            self._leave_storage(forget_table=not tracked)
            raise
        self._writer_argument = self._generator_argument = None
        built.add(self)

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
            check_leaves(storage, self._priority_sampler, *samplers_on(storage))
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

    def _check_processes(self, storage: Storage, sampler: Sampler) -> None:
        """Refuses a tree that would not hear of the writes of other processes."""
        table: SlotGenerations | None = getattr(storage, TABLE_ATTRIBUTE, None)
        if isinstance(sampler, PrioritizedSampler) and table is not None and table.lock.is_engaged:
            raise RuntimeError(
                "A storage that other processes may be writing needs a learner that catches up: "
                "got a sync=True priority sampler. Build the buffer with sync=False."
            )

    def _initialize_prioritized_sampler(self) -> None:
        with self._write_lock:  # another buffer may be writing already
            if self._table is not None:
                self._table.limit_to_trees()
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
            check_leaves(self._storage, self._priority_sampler)
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
            >>> from torchrl.data.replay_buffers.generations import ReplayBuffer
            >>> rb = ReplayBuffer(storage=ListStorage(2), track_generations=True)
            >>> rb.extend([10, 11, 12], return_generation=True)
            (tensor([0, 1, 0]), tensor([-1,  0,  1]))
        """
        data = self._placed(self._clean(data))
        call = partial(super().extend, data, update_priority=update_priority)
        return self._write(call, "extend", return_generation)

    def _clean(self, data: Any) -> Any:
        """Drops the stamps of a sample put back, where TorchRL's writer would store them."""
        late = stamps_late(self._writer) and self._writer.tracks_generations
        return without_stamps(data) if late else data

    def _placed(self, data: Any) -> Any:
        """Gives a tensordict the device of its storage, which TorchRL does under the lock."""
        if type(data) is TensorDict and data.device is None and self._table is not None:
            device = getattr(self._storage, "device", None)
            if self._is_tensordict and device == _CPU:
                return data.to(_CPU)
        return data

    def _write(self, write: Callable[[], Any], name: str, return_generation: bool) -> Any:
        """Runs one of TorchRL's writing calls as a single critical section."""
        if return_generation and not self._writer.tracks_generations:
            raise RuntimeError(f"{name}(return_generation=True) needs stamps. {ENABLE_TRACKING}")
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

    @_maybe_delay_init
    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Samples records; see the method of the same name of the TorchRL class."""
        torchrls = super().sample
        size = self._batch_size
        if self._table is None or is_compiling() or size is None or self._service_shutdown:
            return torchrls(*args, **kwargs)
        try:
            asked, return_info = _batch_size_and_return_info(*args, **kwargs)
        except TypeError:
            return torchrls(*args, **kwargs)
        function = getattr(torchrls, "__func__", None)
        into_data = function is _SAMPLE_INTO_DATA
        if into_data:
            function = getattr(super(_INTO_DATA, self).sample, "__func__", None)
        with self._futures_lock:
            at_once = self._sample_dependency is None and not self._prefetch
        # A user's sample() in between may do anything.
        if function is not _SAMPLE or not at_once or asked not in (None, size):
            return torchrls(*args, **kwargs)
        data, info = self._sample(size)
        if into_data or return_info:
            info = info_on(getattr(self._storage, "device", None), info)
        if into_data:
            put_info(data, info)
        return (data, info) if return_info else data

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

    # ------------------------------------------------------------------ asynchronous learners

    @property
    def _priority_sampler(self) -> PrioritizedSampler | None:
        """The sampler that owns the priority tree, here or in an asynchronous learner."""
        sampler = self._learner_sampler or self._sampler
        return sampler if isinstance(sampler, PrioritizedSampler) else None

    @property
    def _priority_dtype(self) -> torch.dtype:
        sampler = self._priority_sampler
        return torch.float32 if sampler is None else sampler.dtype

    @property
    def _learner_sampler(self) -> Sampler | None:
        """The private sampler of a ``sync=False`` learner."""
        return self.__dict__.get("_prioritized_sampler")

    def _has_caught_up(self, table: SlotGenerations) -> bool:
        """Whether nothing was written since a ``sync=False`` learner looked last."""
        now = (table.ring_log.end, self._storage._mutation_revision)
        return now == self._seen_until and self._seen is not None

    def _catch_up(self) -> None:
        """Gives every record that a ``sync=False`` tree has not seen the default priority."""
        table = self._table
        sampler = self._learner_sampler
        if table is None or sampler is None or self._has_caught_up(table):
            return
        revision, end = self._storage._mutation_revision, table.ring_log.end
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
                        write_default(sampler, new, self._storage, are_leaves=new.is_cpu)
                        self._seen[begin:stop] = stamps[begin:stop]

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

    def _note_seen(self, slots: torch.Tensor, stamps: torch.Tensor) -> None:
        """Notes that the learner's tree has the priorities of the records with these stamps."""
        seen = self._seen
        assert seen is not None  # else it must catch up first
        seen.index_copy_(0, slots.to(seen.device), stamps.to(seen.device))

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

    # ------------------------------------------------------------------ replacing a part

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
        check_leaves(storage, self._priority_sampler, *samplers_on(storage))
        self._check_processes(storage, self._sampler)
        check_dimensions(storage, self._learner_sampler or self._sampler, writer)
        if storage.ndim > 1 and self._learner_sampler is not None:
            raise ValueError(
                f"An asynchronous learner (sync=False) needs a storage with ndim=1: got ndim="
                f"{storage.ndim}."
            )
        table = SlotGenerations.attach(storage)
        with self._settled(self._table, table):
            # It may have got records meanwhile.
            check_leaves(storage, self._priority_sampler, *samplers_on(storage))
            former = self._storage
            self._leave_storage(forget_table=False)
            super().set_storage(storage, collate_fn)
            storage.attach(self)
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
            if self._table is not None:
                self._table.limit_to_trees()
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
        check_dimensions(self._storage, sampler, self._writer)
        if self._learner_sampler is None and not isinstance(self._sampler, PrioritizedSampler):
            self._check_processes(self._storage, sampler)
        with self._settled(table):
            check_leaves(self._storage, sampler)
            if isinstance(sampler, PrioritizedSampler) and self._learner_sampler is not None:
                former, self._prioritized_sampler = self._learner_sampler, sampler
            else:
                former = super().set_sampler(sampler)
            self._forget_priorities()
            return former

    def _forget_priorities(self) -> None:
        sampler = self._priority_sampler
        if sampler is not None:
            sampler._empty()
        self._seen = None
        self._initialize_prioritized_sampler()


# With include_info, which tensordict buffers alone take.
TrackingBuffer.sample.__signature__ = inspect.signature(_SAMPLE_INTO_DATA)


def _batch_size_and_return_info(
    batch_size: int | None = None, return_info: bool = False
) -> tuple[int | None, bool]:
    return batch_size, return_info


def _reset_in_child() -> None:
    """Leaves to the parent its threads, what they held, and a learner's priorities."""
    for rb in list(built):
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
