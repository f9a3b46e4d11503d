"""Replay buffers whose priority updates reach only the record that they were computed from.

:class:`ConditionalPriorityUpdates` is the whole of it; the four buffers are TorchRL's with the
mix-in in front. A buffer of ours finds the table of its storage by itself, whoever put it there,
and uses the table's lock as its write lock. On a storage without a table every method is TorchRL's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    Writer,
)
from torchrl.data.replay_buffers.replay_buffers import _maybe_delay_init
from torchrl.data.replay_buffers.utils import _reduce

from ..checkpoints.state import SavedBuffer
from ..core.checks import (
    checked_handles,
    checked_priority,
)
from ..core.layout import checked_cells, priority_per_cell
from ..core.priorities import write_priority
from ..core.result import PriorityUpdateResult
from ..core.table import SlotGenerations
from ..core.tally import Tally, stats_of
from ..writers.foreign import stamp_rest
from ..writers.ring import (
    GENERATION_KEY,
    last_rows,
)
from . import background
from .sequence import ANCHOR_KEYS, StampedSequence, anchor_priorities
from .tracking import ENABLE_TRACKING


class ConditionalPriorityUpdates(SavedBuffer):
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

    @classmethod
    def _ServiceClass(
        cls,
        service_backend: str,
        *args: Any,
        service_backend_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Builds what ``service_backend="ray"`` asks for; TorchRL's metaclass calls it."""
        from ..remote.remote import RayReplayBuffer  # which is built on this module

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
        from ..remote.remote import in_actor

        torchrls = super(ConditionalPriorityUpdates, in_actor(cls))
        return torchrls.as_remote(remote_config)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ priorities

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
            if self._learner_sampler is not None and not self._has_caught_up(table):
                ahead = self._may_write_ahead(table, sampler, highest)
                if not ahead:
                    self._catch_up()
            live, all_live = table.live(slots if grid is None else slots // grid.width, taken)
            kept = live
            if not values.is_cpu:  # a parallel scatter has no last row
                kept = live.clone()
                kept[live] = last_rows(slots[live])
                all_live = None
            num_handles = live.numel()
            if kept.all().item() if all_live is None else all_live:
                num_kept = num_handles
            else:
                rows = kept.nonzero().view(-1)
                num_kept = rows.numel()
                if num_kept:
                    slots = slots.index_select(0, rows)
                    if ahead:
                        taken = taken.index_select(0, rows.to(taken.device))
                    if values.ndim:
                        values = values.index_select(0, rows.to(values.device))
            if num_kept:
                leaves = slots if slots.is_cpu else slots.to(values.device)
                write_priority(sampler, leaves, values, highest, self._storage)
                if ahead:  # else they would be taken for unseen
                    self._note_seen(slots, taken)
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
        """Runs :meth:`update_priority_if_present` in the background, in order with samples.

        It runs after the samples that were prefetched when it was submitted, and after all earlier
        submissions, :meth:`~torchrl.data.ReplayBuffer.submit_update_if_present` among them; samples
        that are asked for later wait for it. ``synchronize`` and ``shutdown`` wait, too. If there
        is nothing to wait for, an update of at most 1024 handles on the CPU is made at once: to
        pass it to another thread would take the caller longer.

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

        sampler = self._priority_sampler  # None in an ensemble
        on_cpu = sampler is not None and sampler.device.type == "cpu"
        small = on_cpu and background.is_small(index, generation, priority)
        return background.submit(self, name, update, small)

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
            raise RuntimeError(f"{name}() needs stamps. {ENABLE_TRACKING}")
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
        code which knows nothing of stamps is safe. If the buffer does not track, it warns
        and writes by slot all the same; without priorities, it writes nothing.

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
        if self._guard_priorities:
            if self._guards_samples():
                return self.update_tensordict_priority_if_present(data)
            if not self._writer.tracks_generations and self._priority_sampler is not None:
                warnings.warn(
                    "guard_priorities=True guards nothing without stamps: "
                    f"update_tensordict_priority() writes by slot. {ENABLE_TRACKING}",
                    stacklevel=3,  # TorchRL's decorator is in between
                )
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
