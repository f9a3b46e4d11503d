"""Ensembles of generation-stamped buffers: a late priority finds its member, and there its record.

An ensemble samples from several buffers, its *members*. A handle of an ensemble is a member's
number, a slot of that member and its stamp. Each member keeps its own table, lock and priorities:
an ensemble adds no state that a write to a member would have to know of. It holds the locks of all
members, in the order that every process shares, while it samples, updates, writes, saves or loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import Sampler, SamplerEnsemble, Storage, StorageEnsemble, Writer
from torchrl.data.replay_buffers.replay_buffers import _maybe_delay_init

from ..core.result import PriorityUpdateResult, Tally
from ..layout.index import integer_tensor
from ..processes.holding import HoldOfAll
from ..writers.stamping import GENERATION_KEY
from . import updates
from .classes import ReplayBuffer
from .conditional import ConditionalPriorityUpdates
from .ensemble_parts import members_of_parts
from .ensemble_updates import update_handles, update_sample
from .ensemble_writer import WriterEnsemble, named


class ReplayBufferEnsemble(ReplayBuffer, torchrl_buffers.ReplayBufferEnsemble):
    """An ensemble of buffers of this package, with conditional updates for its samples.

    See :class:`torchrl.data.ReplayBufferEnsemble` for the arguments that are not listed here.
    Samples carry stamps if every member tracks. Members may be written, replaced in part
    (``set_sampler`` and its siblings) and updated by themselves: the ensemble follows. It samples
    from the priorities of an asynchronous (``sync=False``) member, too, where it is the learner.

    Args:
        rbs (ReplayBuffer): the members, buffers of this package.

    Keyword Args:
        storages (StorageEnsemble, optional): in place of ``rbs``, with ``samplers`` and
            ``writers``: the parts of which to build the members.
        samplers (SamplerEnsemble, optional): see ``storages``.
        writers (WriterEnsemble, optional): see ``storages``.
        track_generations (bool, optional): whether to insist that each member tracks. Defaults to
            False.

    Raises:
        TypeError: for a member of another kind, or one that is an ensemble itself.
        ValueError: for ``track_generations=True`` with a member that does not track, or for one
            that does on a storage with ``ndim > 1``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl.data.replay_buffers.generations import TensorDictPrioritizedReplayBuffer
        >>> members = [
        ...     TensorDictPrioritizedReplayBuffer(
        ...         alpha=0.7, beta=0.5, storage=LazyTensorStorage(4), track_generations=True
        ...     )
        ...     for _ in range(2)
        ... ]
        >>> for member in members:
        ...     _ = member.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
        >>> sample = ensemble.sample()  # [2, 4]
        >>> _ = members[0].extend(TensorDict({"obs": torch.arange(4)}, [4]))  # a full lap
        >>> sample["td_error"] = torch.ones(2, 4)
        >>> ensemble.update_tensordict_priority_if_present(sample).updated_mask
        tensor([[False, False, False, False],
                [ True,  True,  True,  True]])
    """

    _rbs: tuple[Any, ...]
    # The parts that the members were built of, if so, until the ensemble is initialized.
    _parts: tuple[Storage, Sampler, Writer] | None = None

    def __init__(
        self,
        *rbs: Any,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: torchrl_buffers.WriterEnsemble | None = None,
        collate_fns: list[Callable[..., Any]] | None = None,
        track_generations: bool = False,
        **kwargs: Any,
    ) -> None:
        if rbs and any(part is not None for part in (storages, samplers, writers)):
            raise RuntimeError(
                "ReplayBufferEnsemble needs members, or storages, samplers and writers in their "
                f"place: got {len(rbs)} members and storages={storages!r}, samplers={samplers!r}, "
                f"writers={writers!r}."
            )
        if not rbs:
            rbs = members_of_parts(storages, samplers, writers, collate_fns)
            self._parts = (storages, samplers, writers)
        for position, rb in enumerate(rbs):
            if isinstance(rb, torchrl_buffers.ReplayBufferEnsemble):
                raise TypeError(
                    f"ReplayBufferEnsemble needs buffers as members: member {position} is an "
                    "ensemble. Pass its members instead."
                )
            if not isinstance(rb, ConditionalPriorityUpdates):
                raise TypeError(
                    "ReplayBufferEnsemble needs members that are buffers of this package: member "
                    f"{position} is a {type(rb).__module__}.{type(rb).__name__}. Build it from "
                    "torchrl.data.replay_buffers.generations."
                )
        super().__init__(
            *rbs, collate_fns=collate_fns, track_generations=track_generations, **kwargs
        )

    def _init(self) -> None:
        for position, rb in enumerate(self._rbs):
            if rb._writer.tracks_generations and rb._storage.ndim > 1:
                raise ValueError(
                    "ReplayBufferEnsemble needs tracked members with ndim=1, as TorchRL's "
                    f"StorageEnsemble takes coordinates for slots: member {position} has a "
                    f"{type(rb._storage).__name__} with ndim={rb._storage.ndim}."
                )
        if not self._initialized and self._parts is not None:
            self._init_storage, self._init_sampler, self._init_writer = self._parts
        super()._init()
        self._parts = None

    def _maybe_make_writer(self, writer: Any) -> Writer:
        if not isinstance(writer, WriterEnsemble):
            writer = WriterEnsemble(*writer._writers)
        self._check_writer(writer)
        return writer

    def _check_writer(self, writer: Any) -> None:
        if self._track_generations and not writer.tracks_generations:
            raise ValueError(
                "track_generations=True needs members that track: "
                f"{named(self._rbs, writer._not_tracking())} not. Build each of them with "
                "track_generations=True."
            )

    # ------------------------------------------------------------------ the members and their locks

    @property
    def _member_list(self) -> tuple[Any, ...]:
        return self._rbs

    def _lock_of_tables(self, stock: str) -> Any:
        if not self._tables():
            return None
        return HoldOfAll(
            self._tables, self._follow_members if stock == "_stock_replay_lock" else None
        )

    def _follow_members(self) -> None:
        """Takes over the parts that members may have got since. Under their locks."""
        members = self._rbs
        self._storage._storages = tuple([rb._storage for rb in members])
        self._sampler._samplers = tuple([rb._learner_sampler or rb._sampler for rb in members])
        self._writer._writers = tuple([rb._writer for rb in members])
        for rb in members:
            if rb._learner_sampler is not None and rb._table is not None:
                rb._learner.catch_up(rb._table, rb._learner_sampler)

    # ------------------------------------------------------------------ writing records

    @_maybe_delay_init
    def extend(
        self, data: Any, *, update_priority: bool | None = None, return_generation: bool = False
    ) -> Any:
        """Puts each record of a batch into its member; see TorchRL's class for the routing.

        Args:
            data (TensorDictBase): N records, of any batch shape.

        Keyword Args:
            update_priority (bool, optional): must be None, as in TorchRL's class.
            return_generation (bool, optional): whether to return the stamps on their own, too.
                Defaults to False.

        Returns:
            A tensordict of shape ``[N]`` with ``"buffer_ids"``, ``"index"`` and, if every member
            tracks, ``"index_generation"``: -1 for a row that a later row of the call overwrote.
            With ``return_generation=True``, the pair of it and its stamps: handles as
            :meth:`update_priority_if_present` takes them.

        Raises:
            RuntimeError: for ``return_generation=True`` if a member does not track, or if no
                routing was configured.
        """
        if return_generation:
            self._check_all_track("extend(return_generation=True)")
        if not self._tables() or update_priority is not None:
            return super().extend(data, update_priority=update_priority)
        self._refuse_in_a_write("extend()")
        rows, ids = self._route(data)
        metadata = TensorDict({"buffer_ids": ids}, [ids.numel()])
        tracks = self._writer.tracks_generations
        index, stamps = None, torch.full_like(ids, -1)
        with self._replay_lock:
            for member, rb in enumerate(self._rbs):
                chosen = (ids == member).nonzero()[:, 0]
                if not chosen.numel():
                    continue
                written = rb.extend(rows[chosen], return_generation=tracks)
                slots = torch.as_tensor(written[0] if tracks else written).to(ids.device)
                if index is None:
                    index = slots.new_full((ids.numel(), *slots.shape[1:]), -1)
                if slots.shape[0]:  # else a transform took the records
                    index[chosen] = slots
                    if tracks:
                        stamps[chosen] = written[1].to(ids.device)
        metadata["index"] = torch.full_like(ids, -1) if index is None else index
        if tracks:
            metadata[GENERATION_KEY] = stamps
        return (metadata, metadata[GENERATION_KEY]) if return_generation else metadata

    @_maybe_delay_init
    def add(self, data: Any, *, return_generation: bool = False) -> Any:
        """Puts one record into its member; see :meth:`extend`."""
        if return_generation:
            self._check_all_track("add(return_generation=True)")
        self._refuse_in_a_write("add()")
        metadata = super().add(data)
        return (metadata, metadata[GENERATION_KEY]) if return_generation else metadata

    @_maybe_delay_init
    def empty(self, empty_write_count: bool = True) -> None:
        """Empties every member, which makes every handle stale."""
        if not self._tables():
            super().empty(empty_write_count=empty_write_count)
            return
        self._refuse_in_a_write("empty()")
        with self._replay_lock:
            for rb in self._members:
                rb.empty(empty_write_count=empty_write_count)

    # ------------------------------------------------------------------ priorities

    @_maybe_delay_init
    def update_priority_if_present(
        self, *, index: Any, generation: Any, priority: Any
    ) -> PriorityUpdateResult:
        """Writes the priorities of the records that are still in their slots, and no others.

        Each priority goes to the member that its handle names. All of them are validated first, and
        then each member is updated in one step under its lock (*Atomicity*, design notes).

        Keyword Args:
            index (TensorDictBase): ``"buffer_ids"`` and ``"index"``, as ``sample`` and
                :meth:`extend` give them: the number of the member and the slot in it, of any shape.
                Where a sample's ``"buffer_ids"`` has one number for each block of rows, that
                holds for all rows of the block.
            generation: the stamps, of the shape of the handles; never broadcast.
            priority: one number per handle, of their shape, or one for all; see
                :meth:`ReplayBuffer.update_priority_if_present`. Further dimensions are reduced by
                the member's sampler.

        Returns:
            PriorityUpdateResult: with an ``updated_mask`` of the shape of the handles.

        Raises:
            RuntimeError: if a member does not track, or one that a handle names has no priorities.
            TypeError: if ``index`` is no such tensordict, its parts or ``generation`` are not
                integer, or ``priority`` is no number.
            ValueError: if the shapes don't fit, a member's number is out of range, or for the first
                priority outside its range. Nothing has changed then, in any member.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl.data import LazyTensorStorage
            >>> from torchrl.data.replay_buffers.generations import PrioritizedReplayBuffer
            >>> members = [
            ...     PrioritizedReplayBuffer(
            ...         alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), track_generations=True
            ...     )
            ...     for _ in range(2)
            ... ]
            >>> for member in members:
            ...     _ = member.extend(torch.arange(4))
            >>> _ = members[1].add(torch.tensor(9))  # another record takes slot 0
            >>> ensemble = ReplayBufferEnsemble(*members)
            >>> index = TensorDict(
            ...     {"buffer_ids": torch.tensor([0, 1, 1]), "index": torch.tensor([0, 0, 3])}, [3]
            ... )
            >>> ensemble.update_priority_if_present(
            ...     index=index, generation=[0, 0, 0], priority=[5.0, 6.0, 7.0]
            ... ).updated_mask
            tensor([ True, False,  True])
        """
        name = "update_priority_if_present()"
        self._check_all_track(name)
        return update_handles(self, index, generation, priority)

    @_maybe_delay_init
    def update_tensordict_priority_if_present(self, data: TensorDictBase) -> PriorityUpdateResult:
        """Writes the priorities of a sample's records that are still in their slots.

        Args:
            data (TensorDictBase): a sample of this ensemble, of any batch shape, with ``"index"``,
                ``"index_generation"`` and each member's ``priority_key``. Without the latter the
                member's default priority is written, as TorchRL does.

        Returns:
            PriorityUpdateResult: with an ``updated_mask`` of the shape of the sample.

        Raises:
            KeyError: if ``"index"`` or ``"index_generation"`` is missing.
            RuntimeError: if a member does not track, or one that is named has no priorities or is
                no tensordict buffer.
        """
        name = "update_tensordict_priority_if_present()"
        self._check_all_track(name)
        return update_sample(self, data)

    @_maybe_delay_init
    def _guards_samples(self) -> bool:
        """Whether every update of a sample can be made conditional."""
        return all(updates.are_possible(rb) for rb in self._rbs)

    def _tallies(self) -> list[Tally]:
        """Those of the members, whose own updates count too."""
        return [tally for rb in self._members for tally in rb._tallies()]

    def _check_all_track(self, name: str) -> None:
        missing = [i for i, rb in enumerate(self._rbs) if not rb._writer.tracks_generations]
        if missing:
            raise RuntimeError(
                f"{name} needs stamps from every member: {named(self._rbs, missing)} not. Build "
                "each of them with track_generations=True."
            )

    def _check_updatable(self, name: str) -> None:
        self._check_all_track(f"{name}()")

    # ------------------------------------------------------------------ parts

    @_maybe_delay_init
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (list, range, np.ndarray)):
            index = torch.as_tensor(index)
        if isinstance(index, torch.Tensor) and index.ndim == 1 and index.numel():
            chosen = integer_tensor(index, "ensemble[index]: index").tolist()
        elif isinstance(index, slice) and index != slice(None):
            chosen = list(range(len(self._rbs)))[index]
        else:
            return super().__getitem__(index)
        sampler = self._sampler
        return ReplayBufferEnsemble(
            *(self._rbs[i] for i in chosen),
            transform=self._transform,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn_val,
            collate_fns=[self._collate_fns[i] for i in chosen],
            sample_from_all=sampler.sample_from_all,
            # One that samples from all takes the number of its own members.
            num_buffer_sampled=None if sampler.sample_from_all else sampler.num_buffer_sampled,
            p=sampler.p[chosen] if isinstance(sampler.p, torch.Tensor) else sampler.p,
            generator=self._rng,
        )

    def set_storage(self, storage: Storage, collate_fn: Any = None) -> Storage:
        """Is refused if a member tracks: replace the part of the member, the ensemble follows."""
        self._refuse_part("set_storage")
        return super().set_storage(storage, collate_fn)

    def set_writer(self, writer: Writer) -> Writer:
        """Is refused if a member tracks: replace the part of the member, the ensemble follows."""
        self._refuse_part("set_writer")
        return super().set_writer(writer)

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Is refused if a member tracks: replace the part of the member, the ensemble follows."""
        self._refuse_part("set_sampler")
        return super().set_sampler(sampler)

    def _refuse_part(self, name: str) -> None:
        if self._tables():
            raise RuntimeError(
                f"{name}() works on the members of an ensemble, which follows them: call "
                f"ensemble[i].{name}(). How the ensemble chooses among them can be set in "
                "ensemble.sampler.p."
            )
