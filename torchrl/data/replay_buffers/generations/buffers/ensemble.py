"""Ensembles of generation-stamped buffers: a late priority finds its member, and there its record.

An ensemble samples from several buffers, its *members*. A handle of an ensemble is a member's
number, a slot of that member and its stamp. Each member keeps its own table, lock and priorities:
an ensemble adds no state that a write to a member would have to know of. It holds the locks of all
members, in the order that every process shares, while it samples, updates, writes, saves or loads.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import (
    Sampler,
    SamplerEnsemble,
    Storage,
    StorageEnsemble,
    Writer,
)
from torchrl.data.replay_buffers.replay_buffers import _maybe_delay_init

from ..checkpoints import dumps
from ..checkpoints.state import STATE_FILE
from ..core.checks import check_dump_fits, check_fits, check_learner_fits, numbers
from ..core.index import integer_tensor
from ..core.result import PriorityUpdateResult
from ..core.table import SlotGenerations
from ..core.tally import Tally
from ..processes.lock import StorageLock
from ..writers.max_value import check_ranks
from ..writers.ring import GENERATION_KEY, row_generations
from .classes import ConditionalPriorityUpdates, ReplayBuffer
from .tracking import SETTLING


class WriterEnsemble(torchrl_buffers.WriterEnsemble):
    """The writers of an ensemble's members, whose stamps it reads.

    See :class:`torchrl.data.replay_buffers.WriterEnsemble`. It tracks if each of its writers does.

    Args:
        writers (Writer): the writers of the members.

    Keyword Args:
        track_generations (bool, optional): whether to insist that each writer tracks. Defaults to
            False.

    Raises:
        ValueError: for ``track_generations=True`` with a writer that does not track.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> members = [
        ...     ReplayBuffer(storage=LazyTensorStorage(4), track_generations=True) for _ in range(2)
        ... ]
        >>> ensemble = ReplayBufferEnsemble(*members)
        >>> _ = members[1].extend(torch.arange(5))
        >>> index = TensorDict(
        ...     {"buffer_ids": torch.tensor([1, 0, 1]), "index": torch.tensor([0, 0, 1])}, [3]
        ... )
        >>> ensemble.writer.generations_of(index)
        tensor([ 1, -1,  0])
    """

    _writers: tuple[Writer, ...]
    _storage: Storage | None

    def __init__(self, *writers: Writer, track_generations: bool = False) -> None:
        super().__init__(*writers)
        if track_generations and not self.tracks_generations:
            raise ValueError(
                "track_generations=True needs writers that track: "
                f"{_named(self._writers, self._not_tracking())} not."
            )

    def _not_tracking(self) -> list[int]:
        return [i for i, writer in enumerate(self._writers) if not writer.tracks_generations]

    def generations_of(self, index: TensorDictBase) -> torch.Tensor:
        """Returns the stamps of the records at ``index``.

        Args:
            index (TensorDictBase): ``"buffer_ids"``, the members' numbers, and ``"index"``, their
                slots, whose shape begins with that of ``"buffer_ids"``.

        Returns:
            int64 tensor of the shape and on the device of ``"index"`` (less the last dimension
            where that holds coordinates); -1 where there is no usable stamp.

        Raises:
            TypeError: if ``index`` is no such tensordict, or either part is not integer.
            ValueError: if the shapes don't fit, or a member's number is out of range.
        """
        ids, slots = _members_and_slots(index, len(self._writers), "generations_of()")
        rows = slots.reshape(ids.numel(), *slots.shape[ids.ndim :])
        ids, shape = ids.reshape(-1), ids.shape
        if 0 < ids.numel() <= len(self._writers):
            # As in a sample, which has few blocks of many rows: no need to sort them.
            blocks = zip(ids.tolist(), rows, strict=True)
            found = [self._writers[member].generations_of(block) for member, block in blocks]
            return torch.stack(found).reshape(*shape, *found[0].shape)
        stamps = None
        for member in ids.unique().tolist() or [0]:
            chosen = (ids == member).nonzero()[:, 0]
            of_member = self._writers[member].generations_of(rows[chosen])
            if stamps is None:
                stamps = of_member.new_full((rows.shape[0], *of_member.shape[1:]), -1)
            stamps[chosen] = of_member
        assert stamps is not None  # an ensemble has members
        return stamps.reshape(*shape, *stamps.shape[1:])

    def __getitem__(self, index: Any) -> Any:
        picked = super().__getitem__(index)
        if type(picked) is torchrl_buffers.WriterEnsemble:
            return WriterEnsemble(*picked._writers)
        return picked


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
            rbs = _members_of_parts(storages, samplers, writers, collate_fns)
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
        self._check_tracks(writer)
        return writer

    def _check_tracks(self, writer: Any) -> None:
        if self._track_generations and not writer.tracks_generations:
            raise ValueError(
                "track_generations=True needs members that track: "
                f"{_named(self._rbs, writer._not_tracking())} not. Build each of them with "
                "track_generations=True."
            )

    # ------------------------------------------------------------------ the members' locks

    @property
    def _members(self) -> list[Any]:
        """The different members, as one may stand in the ensemble twice."""
        return list({id(rb): rb for rb in self._rbs}.values())

    @property
    def _is_tracked(self) -> bool:
        """Whether any member's storage has a table; else all methods are TorchRL's."""
        return any(rb._table is not None for rb in self._rbs)

    def _member_tables(self) -> list[SlotGenerations]:
        """The tables of the members, in the order of their locks."""
        tables = [rb._table for rb in self._rbs if rb._table is not None]
        return [table for _, table in sorted({table.lock.order: table for table in tables}.items())]

    @property
    def _write_lock(self) -> Any:
        return _Hold(self, follow=False) if self._is_tracked else self._stock_write_lock

    @_write_lock.setter
    def _write_lock(self, lock: Any) -> None:
        self._stock_write_lock = lock

    @property
    def _replay_lock(self) -> Any:
        return _Hold(self, follow=True) if self._is_tracked else self._stock_replay_lock

    @_replay_lock.setter
    def _replay_lock(self, lock: Any) -> None:
        self._stock_replay_lock = lock

    def _follow_members(self) -> None:
        """Takes over the parts that members may have got since. Under their locks."""
        members = self._rbs
        self._storage._storages = tuple([rb._storage for rb in members])
        self._sampler._samplers = tuple([rb._learner_sampler or rb._sampler for rb in members])
        self._writer._writers = tuple([rb._writer for rb in members])
        for rb in members:
            rb._catch_up()

    @contextlib.contextmanager
    def _settled(self, *tables: SlotGenerations | None) -> Iterator[None]:
        """The same for all members: nothing runs in the background of any, and all locks are held.

        No two threads wait for each other, whatever the order of their members: each gives back
        what it has while it can't get the rest.
        """
        while True:
            with contextlib.ExitStack() as locks:
                locks.enter_context(self._futures_lock)
                self._synchronize_futures_locked()
                for rb in self._members:
                    if not rb._futures_lock.acquire(timeout=SETTLING):
                        break
                    locks.callback(rb._futures_lock.release)
                    rb._synchronize_futures_locked()
                else:
                    mine = self._member_tables()
                    for table in mine:
                        if not table.lock.acquire(timeout=SETTLING):
                            break
                        locks.callback(table.lock.release)
                    else:
                        if mine == self._member_tables():  # else set_storage() came in between
                            for table in mine:
                                table.join_first_write()
                            yield
                            return

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
        if not self._is_tracked or update_priority is not None:
            return super().extend(data, update_priority=update_priority)
        rows, ids = self._route(data)
        metadata = TensorDict({"buffer_ids": ids}, [ids.numel()])
        tracks = self._writer.tracks_generations
        index, stamps = None, torch.full_like(ids, -1)
        with self._replay_lock:
            for member, rb in enumerate(self._rbs):
                chosen = (ids == member).nonzero()[:, 0]
                if not chosen.numel():
                    continue
                slots = torch.as_tensor(rb.extend(rows[chosen])).to(ids.device)
                if index is None:
                    index = slots.new_full((ids.numel(), *slots.shape[1:]), -1)
                if slots.shape[0]:  # else a transform took the records
                    index[chosen] = slots
                    if tracks:
                        stamps[chosen] = row_generations(rb._table, slots)
        metadata["index"] = torch.full_like(ids, -1) if index is None else index
        if tracks:
            metadata[GENERATION_KEY] = stamps
        return (metadata, metadata[GENERATION_KEY]) if return_generation else metadata

    @_maybe_delay_init
    def add(self, data: Any, *, return_generation: bool = False) -> Any:
        """Puts one record into its member; see :meth:`extend`."""
        if return_generation:
            self._check_all_track("add(return_generation=True)")
        metadata = super().add(data)
        return (metadata, metadata[GENERATION_KEY]) if return_generation else metadata

    @_maybe_delay_init
    def empty(self, empty_write_count: bool = True) -> None:
        """Empties every member, which makes every handle stale."""
        if not self._is_tracked:
            super().empty(empty_write_count=empty_write_count)
            return
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
        handles = _Handles(index, generation, len(self._rbs))
        values = handles.rows_of(numbers(priority))
        return self._update(handles, lambda _, rows: values if not values.ndim else values[rows])

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
        if not is_tensor_collection(data):
            raise TypeError(f"{name} needs a tensordict: got {type(data).__name__}.")
        for key in ("index", GENERATION_KEY):
            if data.get(key, None) is None:
                raise KeyError(
                    f"{name} needs {key!r} in the sample: got {sorted(map(str, data.keys()))}. "
                    "Either it was sampled while a member did not track, or a select() dropped the "
                    "key."
                )
        handles = _Handles(data.get("index"), data.get(GENERATION_KEY), len(self._rbs))

        def priority(rb: Any, rows: torch.Tensor) -> Any:
            if not rb._is_tensordict:
                raise RuntimeError(
                    f"{name} needs tensordict buffers: member {self._rbs.index(rb)} is a "
                    f"{type(rb).__name__}. Use update_priority_if_present()."
                )
            given = data.get(rb.priority_key, None)
            if given is None:
                return rb._priority_sampler.default_priority
            values = handles.rows_of(given)
            return values[rows] if values.ndim else values

        return self._update(handles, priority)

    def _update(
        self, handles: _Handles, priority: Callable[[Any, torch.Tensor], Any]
    ) -> PriorityUpdateResult:
        mask = torch.zeros(handles.ids.numel(), dtype=torch.bool, device=handles.ids.device)
        with self._replay_lock:
            parts = []
            for rb in self._members:
                named = torch.tensor([i for i, other in enumerate(self._rbs) if other is rb])
                rows = torch.isin(handles.ids, named.to(handles.ids.device)).nonzero()[:, 0]
                if not rows.numel():
                    continue
                rb._conditional_parts(
                    f"update of member {int(named[0])}: update_priority_if_present"
                )
                part = {
                    "index": handles.slots[rows],
                    "generation": handles.stamps[rows],
                    "priority": priority(rb, rows),
                }
                try:
                    rb._check_update(**part)
                except (TypeError, ValueError) as error:
                    raise type(error)(
                        f"{error} (Rows as counted within the handles of member {int(named[0])}, "
                        f"which are rows {_some(rows)} of the call.)"
                    ) from error
                parts.append((rb, rows, part))
            for rb, rows, part in parts:
                mask[rows] = rb.update_priority_if_present(**part).updated_mask.to(mask.device)
        return PriorityUpdateResult(
            updated_mask=mask.reshape(handles.shape), batch_size=handles.shape
        )

    @_maybe_delay_init
    def _guards_samples(self) -> bool:
        """Whether every update of a sample can be made conditional."""
        return all(rb._takes_conditional_updates() for rb in self._rbs)

    def _tallies(self) -> list[Tally]:
        """Those of the members, whose own updates count too."""
        return [tally for rb in self._members for tally in rb._tallies()]

    def _check_all_track(self, name: str) -> None:
        missing = [i for i, rb in enumerate(self._rbs) if not rb._writer.tracks_generations]
        if missing:
            raise RuntimeError(
                f"{name} needs stamps from every member: {_named(self._rbs, missing)} not. Build "
                "each of them with track_generations=True."
            )

    def _check_updatable(self, name: str) -> None:
        self._check_all_track(f"{name}()")

    def _conditional_parts(self, name: str) -> Any:
        raise RuntimeError(
            f"{name}() works on the members of an ensemble: call it on ensemble[i] with the "
            "member's own handles."
        )

    # ------------------------------------------------------------------ state

    @_maybe_delay_init
    def state_dict(self) -> dict[str, Any]:
        """Returns the state of every member at one point in time."""
        if not self._is_tracked:
            return super().state_dict()
        with self._settled():
            state = super().state_dict()
            return {**state, "_learners": [rb._learner_state() for rb in self._rbs]}

    @_maybe_delay_init
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores every member; :meth:`SlotGenerations.load_state_dict` tells what lives on."""
        if not self._is_tracked:
            super().load_state_dict(state_dict)
            return
        self._check_count(len(state_dict["_storage"]))
        learners = state_dict.get("_learners", [None] * len(self._rbs))
        for i, rb in enumerate(self._rbs):
            parts = {part: state_dict[part][str(i)] for part in ("_storage", "_sampler", "_writer")}
            # TorchRL's ensemble saves the sampler that has the tree, a learner's private one too.
            check_fits(rb._storage, rb._priority_sampler or rb._sampler, parts)
            check_learner_fits(rb._learner_sampler, learners[i])
            check_ranks(rb._writer, parts["_writer"])
        with self._restoring_members():
            super().load_state_dict(state_dict)
            for rb, learner in zip(self._rbs, learners, strict=True):
                rb._load_learner_state(learner)

    @_maybe_delay_init
    def dumps(self, path: str | Path) -> None:
        """Saves every member into the folder ``path``; see :meth:`ReplayBuffer.dumps`."""
        if not self._is_tracked:
            super().dumps(path)
            return
        path = Path(path).absolute()
        in_place = [rb._table is not None and rb._table.is_inside(path) for rb in self._rbs]
        with self._settled(), contextlib.ExitStack() as replaced:
            folder = path if any(in_place) else replaced.enter_context(dumps.replacing(path))
            (folder / dumps.MANIFEST).unlink(missing_ok=True)
            super().dumps(folder)
            learners = [rb._learner_state() for rb in self._rbs]
            torch.save({"learners": learners, "in_place": in_place}, folder / STATE_FILE)
            if any(in_place):
                dumps.write_manifest(folder)

    @_maybe_delay_init
    def loads(self, path: str | Path) -> None:
        """Restores what :meth:`dumps` saved; see :meth:`ReplayBuffer.loads`."""
        if not self._is_tracked:
            super().loads(path)
            return
        path = Path(path).absolute()
        dumps.finish(path)
        dumps.check(path)
        file = path / STATE_FILE
        ours = torch.load(file, weights_only=False) if file.exists() else {}
        ran_on = ours.get("in_place", [False] * len(self._rbs))
        self._check_count(len(ran_on))
        for i, rb in enumerate(self._rbs):
            if rb._table is not None:
                check_dump_fits(rb._storage, rb._priority_sampler or rb._sampler, path, str(i))
                check_learner_fits(rb._learner_sampler, ours.get("learners", [None] * (i + 1))[i])
                check_ranks(rb._writer, path / "writer" / str(i))
        with self._restoring_members():
            for rb in self._members:
                if rb._priority_sampler is not None:  # TorchRL would cast the saved one like it
                    rb._priority_sampler._max_priority = None
            super().loads(path)
            learners = ours.get("learners", [None] * len(self._rbs))
            for rb, learner, late in zip(self._rbs, learners, ran_on, strict=True):
                rb._load_learner_state(learner)
                if late:
                    rb._note_that_records_ran_on()
            inside = [rb._table is not None and rb._table.is_inside(path) for rb in self._rbs]
            if inside != ran_on and any(inside):  # records run on in the dump from now on
                torch.save({**ours, "in_place": inside}, file)
                dumps.write_manifest(path)

    def _check_count(self, members: int) -> None:
        if members != len(self._rbs):
            raise ValueError(
                f"The checkpoint has {members} members: this ensemble has {len(self._rbs)}."
            )

    @contextlib.contextmanager
    def _restoring_members(self) -> Iterator[None]:
        members = tuple(self._members)
        with self._settled(), contextlib.ExitStack() as restoring:
            for rb in members:
                if rb._table is not None:
                    restoring.enter_context(rb._restoring(rb._table, loaded=members))
            yield

    def share(self, shared: bool = True) -> Any:
        """Readies the members for other processes; see :meth:`ReplayBuffer.share`."""
        if shared and self._is_tracked:
            for rb in self._members:
                rb.share()
        return super().share(shared)

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        if not self._is_tracked:
            return super().__getstate__()
        if get_spawning_popen() is None:
            return self._copied_state()
        self._check_sendable()
        with self._settled():
            return self._state_without_parts()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self._is_tracked:
            return super().__deepcopy__(memo)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(self._copied_state())
        return copied

    def _copied_state(self) -> dict[str, Any]:
        if len({id(rb._storage) for rb in self._rbs}) != len(self._rbs):
            raise RuntimeError(
                "An ensemble whose members share a storage can't be copied: each copied member "
                "would get a storage of its own. Copy a member, and build the ensemble anew."
            )
        with self._settled():
            state = self._state_without_parts()
            state.pop("_stock_write_lock", None)
            members = state.pop("_rbs")
            state = copy.deepcopy(state)
            state["_rbs"] = tuple(copy.deepcopy(rb) for rb in members)
        return state

    def _state_without_parts(self) -> dict[str, Any]:
        """The members have the parts: :meth:`__setstate__` takes them from there."""
        state = self._torchrl_state()
        storage, sampler, writer = (
            copy.copy(state[name]) for name in ("_storage", "_sampler", "_writer")
        )
        state["_has_transforms"] = storage._transforms is not None
        storage._transforms = writer._storage = None
        storage._storages = sampler._samplers = writer._writers = ()
        storage._rng_private = sampler._rng_private = writer._rng_private = None
        storage._attached_entities_list = []
        state["_storage"], state["_sampler"], state["_writer"] = storage, sampler, writer
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        has_transforms = state.pop("_has_transforms", None)
        super().__setstate__(state)
        if has_transforms is None:
            return
        self._writer._storage = self._storage
        if has_transforms:
            self._storage._transforms = [rb._transform for rb in self._rbs]
        with self._replay_lock:  # follows the members
            if self._rng is not None:
                self.set_rng(self._rng)

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
        if self._is_tracked:
            raise RuntimeError(
                f"{name}() works on the members of an ensemble, which follows them: call "
                f"ensemble[i].{name}(). How the ensemble chooses among them can be set in "
                "ensemble.sampler.p."
            )


class _Hold:
    """The locks of all members of an ensemble as one, for a ``with`` statement.

    TorchRL's methods enter both of a buffer's locks, ``_replay_lock`` first: that one follows the
    members, and the other finds everything taken.
    """

    def __init__(self, ensemble: ReplayBufferEnsemble, follow: bool) -> None:
        self._ensemble = ensemble
        self._follow = follow
        self._taken: list[StorageLock] = []

    def __enter__(self) -> None:
        ensemble, taken = self._ensemble, self._taken
        while True:
            tables = ensemble._member_tables()
            held = [table.lock.is_held() for table in tables]
            if any(held):
                if not all(held):  # the others would be out of order
                    raise RuntimeError(
                        "An ensemble takes the locks of all its members at once, lest two threads "
                        "wait for each other: a thread that holds some of them can't use it."
                    )
                if not self._follow:
                    return
            try:
                for table in tables:
                    table.lock.__enter__()
                    taken.append(table.lock)
                if tables == ensemble._member_tables():
                    if self._follow:
                        ensemble._follow_members()
                    return
            except BaseException:
                self._release()
                raise
            self._release()  # set_storage() came in between

    def __exit__(self, *exception: Any) -> None:
        self._release()

    def _release(self) -> None:
        while self._taken:
            self._taken.pop().__exit__(None, None, None)


class _Handles:
    """The handles of a call, validated: members' numbers, slots and stamps, row by row.

    Args:
        index: the tensordict of ``"buffer_ids"`` and ``"index"``.
        generation: the stamps.
        members (int): how many members there are.

    Attributes:
        shape (torch.Size): the shape of the handles as they were given.
        ids (torch.Tensor): int64 ``[rows]``.
        slots (torch.Tensor): int64 ``[rows]``, or with the trailing dimensions that came.
        stamps (torch.Tensor): the same.
    """

    def __init__(self, index: Any, generation: Any, members: int) -> None:
        name = "update_priority_if_present()"
        ids, slots = _members_and_slots(index, members, name)
        stamps = integer_tensor(generation, f"{name}: generation").to(slots.device)
        shape = ids.shape
        if stamps.shape[: ids.ndim] == shape and stamps.shape[ids.ndim :].numel() != 1:
            # One number for each block of rows, as in a sample that is no tensordict.
            shape = stamps.shape
            ids = ids.reshape(*ids.shape, *(1,) * (len(shape) - ids.ndim)).expand(shape)
        if stamps.shape[: len(shape)] != shape or slots.shape[: len(shape)] != shape:
            raise ValueError(
                f"{name} needs one generation per record: got generation of shape "
                f"{tuple(stamps.shape)} for buffer_ids of shape {tuple(ids.shape)} and index of "
                f"shape {tuple(slots.shape)}."
            )
        rows = shape.numel()
        self.shape = shape
        self.ids = ids.reshape(rows)
        self.slots = slots.reshape(rows, *slots.shape[len(shape) :])
        self.stamps = stamps.reshape(rows, *stamps.shape[len(shape) :])

    def rows_of(self, priority: torch.Tensor) -> torch.Tensor:
        """Returns priorities row by row, on the device of the handles; ``[]`` if one is for all."""
        if priority.numel() == 1:
            return priority.reshape(())
        if priority.shape[: len(self.shape)] != self.shape:
            raise ValueError(
                "update_priority_if_present() needs one priority per record, or one for all: got "
                f"priority of shape {tuple(priority.shape)} for handles of shape "
                f"{tuple(self.shape)}."
            )
        rows = priority.reshape(self.shape.numel(), *priority.shape[len(self.shape) :])
        return rows.to(self.ids.device)


def _members_and_slots(index: Any, members: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of an ensemble's index, int64, on the device of the slots."""
    is_td = isinstance(index, TensorDictBase)
    given = index.get("index", None) if is_td else None
    named = index.get("buffer_ids", None) if is_td else None
    if given is None or named is None:
        raise TypeError(
            f'{name} of an ensemble needs an index with "buffer_ids" and "index", as samples carry '
            f"it: got {sorted(index.keys()) if is_td else type(index).__name__}."
        )
    slots = integer_tensor(given, f"{name}: index")
    ids = integer_tensor(named, f"{name}: buffer_ids").to(slots.device)
    if slots.shape[: ids.ndim] != ids.shape:
        raise ValueError(
            f"{name} needs one of buffer_ids per record: got buffer_ids of shape "
            f"{tuple(ids.shape)} for index of shape {tuple(slots.shape)}."
        )
    if ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= members:
            raise ValueError(
                f"{name} needs buffer_ids from 0 to {members - 1}: got {low if low < 0 else high}."
            )
    return ids, slots


def _members_of_parts(
    storages: Any, samplers: Any, writers: Any, collate_fns: list[Callable[..., Any]] | None
) -> tuple[ReplayBuffer, ...]:
    if storages is None or samplers is None or writers is None:
        raise TypeError(
            "ReplayBufferEnsemble needs all of storages, samplers and writers, or members: got "
            f"storages={storages!r}, samplers={samplers!r}, writers={writers!r}."
        )
    transforms = storages._transforms or [None] * len(storages)
    collate_fns = collate_fns or [None] * len(storages)  # type: ignore[list-item]
    parts = (storages._storages, samplers._samplers, writers._writers, transforms, collate_fns)
    return tuple(
        ReplayBuffer(
            storage=storage,
            sampler=sampler,
            writer=writer,
            transform=transform,
            collate_fn=collate_fn,
            checkpointer=storage.checkpointer,
        )
        for storage, sampler, writer, transform, collate_fn in zip(*parts, strict=True)
    )


def _named(things: Any, positions: list[int]) -> str:
    named = [f"{position} ({type(things[position]).__name__})" for position in positions]
    return f"number {', '.join(named)} {'does' if len(named) == 1 else 'do'}"


def _some(rows: torch.Tensor) -> str:
    return f"{rows[:8].tolist()}{' and more' if rows.numel() > 8 else ''}"
