"""Buffers whose priority updates reach only the record that they were computed from.

:class:`ConditionalPriorityUpdates` stands in front of a TorchRL buffer class. It finds the table of
its storage by itself, whoever put it there, and uses the table's lock as its own. On a storage
without a table every method is TorchRL's. What the methods do stands in the modules beside:
``recording``, ``updates``, ``parts``, and in the folder ``checkpoints``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import Sampler, SampleUnit, Storage, Writer
from torchrl.data.replay_buffers.replay_buffers import _maybe_delay_init

from ..checkpoints.saving import Saves
from ..core.learner import Learner
from ..core.result import PriorityUpdateResult, Tally, stats_of
from ..processes.holding import locked
from . import parts, services, updates
from .recording import Records
from .sequence import stamped_unit
from .torchrls import ours

# Every buffer of ours in this process, for what a forked child must not inherit.
built: weakref.WeakSet[ConditionalPriorityUpdates] = weakref.WeakSet()


@ours
class ConditionalPriorityUpdates(Records, Saves):
    """Mix-in that gives a TorchRL buffer class generation stamps and conditional priority updates.

    What a stamp means is told in :ref:`ref_buffers_generations`.

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
            Of this package, or a user's: TorchRL's own stamp after the data.

    Raises:
        ValueError: for ``track_generations=True`` with a writer that does not track, one of
            TorchRL's that does, a priority sampler that holds fewer slots than the storage, or with
            ``ndim > 1`` a TensorStorage made of records or a sampler of one dimension.
        TypeError: for a kind of storage that cannot be tracked.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> class LoggedReplayBuffer(ConditionalPriorityUpdates, ReplayBuffer):
        ...     pass
        >>> rb = LoggedReplayBuffer(storage=LazyTensorStorage(4), track_generations=True)
        >>> rb.writer.tracks_generations
        True
    """

    _ServiceClass = services.service_class
    as_remote = services.as_remote
    _initialized: bool
    _init_storage: Any
    _sample_unit: SampleUnit | None
    # Whether the priorities are written by whoever writes records, as with TorchRL's sync=True.
    _sync: bool = True
    # For the classes whose TorchRL constructor takes no generator.
    _generator_argument: torch.Generator | None = None

    def __init__(
        self,
        *args: Any,
        track_generations: bool = False,
        writer: Writer | Callable[[], Writer] | None = None,
        **kwargs: Any,
    ) -> None:
        self._track_generations = track_generations
        self._writer_argument = writer
        # What an asynchronous learner's tree has seen. Guarded by the table's lock.
        self._learner = Learner()
        self._begin()
        if isinstance(writer, Writer):
            self._check_writer(writer)
        parts.check_has_end(self, kwargs.get("storage"), kwargs.get("sampler"))
        super().__init__(*args, **kwargs)

    def _begin(self) -> None:
        self._tally = Tally()
        # Taken by the thread that is inside of add() or extend(), under the table's lock.
        self._in_write: Any = threading.RLock()
        self._replay_lock = threading.RLock()
        built.add(self)

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
            if self._table is not None:
                self._table.sharing.install_cells()
                if self.shared:
                    self._table.sharing.share()
        except BaseException:
            self._initialized = False
            parts.leave_storage(self, forget_table=not tracked)
            raise
        self._writer_argument = self._generator_argument = None

    def _check_updatable(self, name: str) -> None:
        """Refuses a conditional update that no input could make possible."""
        updates.needed_parts(self, name)

    def _check_writer(self, writer: Writer) -> None:
        parts.check_writer(writer, self._track_generations)

    def _maybe_make_writer(self, writer: Writer | Callable[[], Writer] | None) -> Writer:
        writer = self._writer_argument
        if writer is None:
            compilable = bool(self._init_compilable)
            writer = parts.default_writer(self, compilable, self._track_generations)
        made = super()._maybe_make_writer(writer)
        self._check_writer(made)
        parts.check_together(self._storage, self._sampler, self._learner_sampler, made)
        return made

    # ------------------------------------------------------------------ priorities

    @_maybe_delay_init
    def update_priority(self, index: Any, priority: Any) -> None:
        """Writes priorities by slot, as TorchRL does, whatever record is in it now.

        :meth:`update_priority_if_present` is the safe form.

        Raises:
            ValueError: for a slot past the end of the priority tree.
        """
        if self._table is None:
            super().update_priority(index, priority)
        else:
            locked(self, updates.update_by_slot, self, index, priority, super().update_priority)

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
            >>> from torchrl.data.replay_buffers.generations import PrioritizedReplayBuffer
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
        if self._table is None:
            updates.needed_parts(self, "update_priority_if_present")  # which raises
        return locked(self, updates.update_if_live, self, index, generation, priority)

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
        return updates.update_sample(self, data)

    @_maybe_delay_init
    def submit_update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> Future[PriorityUpdateResult]:
        """Runs :meth:`update_priority_if_present` in the background, in order with samples.

        It runs after the samples that were prefetched when it was submitted, and after all earlier
        submissions, :meth:`~torchrl.data.ReplayBuffer.submit_update_if_present` among them; samples
        that are asked for later wait for it. ``synchronize`` and ``shutdown`` wait, too. If there
        is nothing to wait for, one of at most 1024 handles on the CPU is made at once.

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
            do samples meanwhile, if no later update was submitted. Of several errors, the last two
            raise the first, with each further one as the ``__context__`` of the one before.

        Raises:
            RuntimeError: if the writer does not track, the sampler has no priorities, or the buffer
                was shut down.

        Examples:
            >>> import torch
            >>> from torchrl.data import LazyTensorStorage
            >>> from torchrl.data.replay_buffers.generations import PrioritizedReplayBuffer
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
        return updates.submit(self, index, generation, priority)

    @_maybe_delay_init
    def _guards_samples(self) -> bool:
        """Whether ``update_tensordict_priority`` of a sample can be made conditional now.

        Not inside of a write of this thread: the priorities that it carries are of its own records.
        """
        return updates.are_possible(self) and not self._in_write._is_owned()

    def _tallies(self) -> list[Tally]:
        """Where its conditional updates are counted; none if it takes none."""
        return [self._tally] if updates.are_possible(self) else []

    def stats(self) -> dict[str, int | float | bool]:
        """Returns what :meth:`torchrl.data.ReplayBuffer.stats` does, and counts of updates.

        Returns:
            What TorchRL gives, and, if there are stamps and priorities, what became of the handles
            that this process brought to conditional updates since :meth:`reset_stats`:

            - ``"updates_applied"`` (int): their priority was written;
            - ``"updates_stale"`` (int): their record was gone;
            - ``"stale_share"`` (float): the stale ones among all; 0.0 if there were none at all.

            Only this call waits for an accelerator that the sampler is on; the updates do not.
        """
        stats = super().stats()
        tallies = self._tallies()
        return {**stats, **stats_of(tallies)} if tallies else stats

    def reset_stats(self) -> None:
        """Lets the counts of conditional updates in :meth:`stats` begin at zero again."""
        with self._write_lock:
            for tally in self._tallies():
                tally.reset()

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
        torchrls = partial(super().set_storage, storage, collate_fn)
        if not self._writer.tracks_generations:
            return torchrls()
        return parts.change_storage(self, storage, torchrls)

    @_maybe_delay_init
    def set_writer(self, writer: Writer) -> Writer:
        """Gives the buffer another writer and returns the former one.

        Raises:
            ValueError: if the buffer was built with ``track_generations=True`` and the writer does
                not track, or for one of TorchRL's that does.
        """
        return parts.change_writer(self, writer, partial(super().set_writer, writer))

    @_maybe_delay_init
    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Gives the buffer another sampler and returns the former one.

        In a tracked buffer, a priority sampler begins with the default priority for every record:
        the priorities that it may have are those of records that nobody has followed since.

        Raises:
            ValueError: if the sampler holds fewer slots than a tracked storage.
        """
        torchrls = partial(super().set_sampler, sampler)
        return torchrls() if self._table is None else parts.change_sampler(self, sampler, torchrls)


def _reset_in_child() -> None:
    """Leaves to the parent its threads, what they held, and a learner's priorities."""
    for rb in list(built):
        rb._futures_lock = threading.RLock()
        rb._replay_lock = threading.RLock()
        rb._in_write = threading.RLock()
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
