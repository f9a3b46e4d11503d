"""Checkpoints of a buffer with its stamps: of a plain one as of an ensemble of one.

Which handles live on through a restore is told at :func:`~..core.restore.restore`, and how a dump
on disk is one whole in ``dumps.py``. A restore is ordered like a write: everything is read and
checked, then every handle is made stale, then records and priorities change, then the stamps come
back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data.replay_buffers.replay_buffers import _maybe_delay_init

from ..core import restore
from ..core.table import SlotGenerations
from ..processes.holding import in_order, settled
from ..processes.writing import cleaning_up_after
from ..writers.max_value import TensorDictMaxValueWriter
from ..writers.stamping import give_default_priority
from . import copies, dumps
from .files import read_torch
from .fits import check_dump, check_state
from .samplers import dumpable, load_sampler_state, sampler_state

# What dumps() adds to TorchRL's files.
STATE_FILE = "generations.pt"

# The mix-in stands before a TorchRL buffer class, whose methods and attributes it works with.
if TYPE_CHECKING:
    from torchrl.data import ReplayBuffer as _Buffer
else:
    _Buffer = object


class Saves(_Buffer):
    """Saves, restores, copies, shares and sends buffers with their stamps (*No resurrection*).

    It works on all members: those of an ensemble, or the buffer itself.
    """

    _learner: Any
    _learner_sampler: Any
    _priority_sampler: Any

    if TYPE_CHECKING:

        @property
        def _table(self) -> SlotGenerations | None: ...

    @property
    def _member_list(self) -> tuple[Any, ...]:
        """The members in their order, of which one may stand there twice."""
        return (self,)

    @property
    def _members(self) -> list[Any]:
        """The different members."""
        return list({id(rb): rb for rb in self._member_list}.values())

    def _tables(self) -> list[SlotGenerations]:
        """The tables of the members; if there are none all methods are TorchRL's."""
        return [rb._table for rb in self._members if rb._table is not None]

    @contextlib.contextmanager
    def _settled(self, name: str, *more: SlotGenerations) -> Iterator[None]:
        """Holds the locks of all members, with nothing running in the background of any.

        Args:
            name (str): the method that the user called, which is refused inside of a write.
            more (SlotGenerations): further tables to hold.
        """
        self._refuse_in_a_write(name, *more)
        others = [rb for rb in self._members if rb is not self]
        with settled([self, *others], lambda: [*self._tables(), *more]):
            tables = in_order([*self._tables(), *more])
            for table in tables:
                table.writing.refuse(name)
                table.sharing.join_first_write()
            with _marked(tables):
                yield

    def _refuse_in_a_write(self, name: str, *more: SlotGenerations) -> None:
        """Refuses what a signal handler can't do, before it waits for what waits for its thread."""
        for table in (*self._tables(), *more):
            if table.writing.is_under_way:
                table.writing.refuse(name)

    # ------------------------------------------------------------------ checkpoints

    @_maybe_delay_init
    def state_dict(self) -> dict[str, Any]:
        """Returns records, priorities, stamps and lineage at one point in time.

        Of a ``sync=False`` learner, its priorities too.
        """
        if not self._tables():
            return super().state_dict()
        with self._settled("state_dict()"):
            return {**super().state_dict(), "_learners": self._learner_states()}

    @_maybe_delay_init
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state; :ref:`ref_buffers_generations_checkpoints` tells which handles live on.

        Records that ran on since the state was taken get the default priority.

        Raises:
            TypeError: if a part of the state has another type than it must. Nothing has changed
                then, here and below.
            ValueError: if it is of a buffer of another capacity or kind.
        """
        if not self._tables():
            super().load_state_dict(state_dict)
            return

        def stamps() -> list[Any]:
            check_state(self, state_dict)
            writers = state_dict["_writer"]
            if self._member_list == (self,):
                return [writers]
            return [writers[str(number)] for number in range(len(self._member_list))]

        with self._restoring("load_state_dict()", stamps):
            super().load_state_dict(state_dict)
            self._load_learners(state_dict.get("_learners"))

    @_maybe_delay_init
    def dumps(self, path: str | Path) -> None:
        """Saves records, priorities, stamps and lineage into the folder ``path``.

        An earlier dump there can be loaded until this one is complete, also if the process is
        killed; other files there stay. A memory-mapped storage whose own files are in that folder
        is exempt: it runs on there, and its handles from before are stale when it is loaded.
        """
        if not self._tables():
            super().dumps(path)
            return
        path = Path(path).absolute()
        in_place = self._are_inside(path)
        begin = dumps.rewriting if any(in_place) else dumps.replacing
        with begin(path) as folder, self._settled("dumps()"), self._dumpable() as without:
            if in_place != self._are_inside(path):
                raise RuntimeError(
                    "dumps() needs a buffer that keeps its storage: set_storage() came in between."
                )
            super().dumps(folder)
            ours = {"learners": self._learner_states(), "in_place": in_place, "without": without}
            torch.save(ours, folder / STATE_FILE)

    @_maybe_delay_init
    def loads(self, path: str | Path) -> None:
        """Restores what :meth:`dumps` saved; see :meth:`load_state_dict`.

        Raises:
            FileNotFoundError: if there is no whole dump in ``path``.
            RuntimeError: if a file of it is missing or truncated.
            ValueError: if it is of another capacity or kind. In each case nothing has changed.
        """
        if not self._tables():
            super().loads(path)
            return
        path = Path(path).absolute()
        directly = any(copies.has_files_in(path, rb) for rb in self._members)
        with dumps.opened(path, directly=directly) as folder:
            file = folder / STATE_FILE
            ours = read_torch(file) if file.exists() else {}
            none = [False] * len(self._member_list)

            def stamps() -> list[Any]:
                check_dump(self, folder, ours)
                return [{} for _ in self._member_list]

            with self._restoring("loads()", stamps):
                without, ran_on = (ours.get(name) or none for name in ("without", "in_place"))
                # TorchRL would cast the saved ones like those of now.
                self._forget_largest([True] * len(self._member_list))
                super().loads(folder)
                self._forget_largest(without)
                self._load_learners(ours.get("learners"))
                for rb, late in zip(self._member_list, ran_on, strict=True):
                    rb._torchrl_checkpoint_detach_from_load_path()
                    if late:
                        _note_that_records_ran_on(rb)
            inside = self._are_inside(path)
            if inside != ran_on and any(inside):  # the records run on in the dump from now on
                torch.save({**ours, "in_place": inside}, path / STATE_FILE)
                dumps.write_manifest(path)

    def _are_inside(self, path: Path) -> list[bool]:
        tables = [rb._table for rb in self._member_list]
        return [table is not None and table.sharing.is_inside(path) for table in tables]

    def _dumpable(self) -> contextlib.AbstractContextManager[list[bool]]:
        return dumpable(*(rb._priority_sampler for rb in self._member_list))

    def _forget_largest(self, which: list[bool]) -> None:
        """Lets some priority samplers have no largest priority."""
        for rb, forgets in zip(self._member_list, which, strict=True):
            if forgets and rb._priority_sampler is not None:
                rb._priority_sampler._max_priority = None

    @contextlib.contextmanager
    def _restoring(self, name: str, stamps: Callable[[], list[Any]]) -> Iterator[None]:
        """A load: whatever comes of it, no handle lives and no tree keeps a gone priority.

        Args:
            name (str): the method that the user called.
            stamps (Callable[[], list]): makes sure that the checkpoint fits the parts that the
                buffer has now, and returns the stamps of each member's state, as far as they are
                known.
        """
        with self._settled(name):
            saved = stamps()
            tables = in_order(self._tables())
            before = [table.stamps.clone() for table in tables]
            prepared = set()
            for rb, state in zip(self._member_list, saved, strict=True):
                if rb._table is not None and rb._table not in prepared:
                    restore.prepare_restore(rb._table, state)
                    prepared.add(rb._table)
            try:
                for table in tables:
                    restore.begin_restore(table)
                yield
            except BaseException as error:
                # The records may be new already, or in part: no handle is live on them.
                with cleaning_up_after(error):
                    for table in tables:
                        restore.retire(table)
                        give_default_priority(table, torch.arange(table.layout.length))
                raise
            finally:
                for table in tables:
                    table.history.is_restoring = False
            for table, then in zip(tables, before, strict=True):
                self._default_what_is_gone(table, then)

    def _default_what_is_gone(self, table: SlotGenerations, before: torch.Tensor) -> None:
        """Ours came with the records; what other buffers have was for those of before."""
        known = min(before.numel(), table.stamps.numel())  # it may have grown or got its shape
        gone = (table.stamps[:known] != before[:known]).nonzero().reshape(-1)
        attached, ours = table.storage._attached_entities, [self, *self._members]
        give_default_priority(table, gone, [entity for entity in attached if entity not in ours])
        if table.history.ran_on is not None:
            ran_on = table.history.ran_on.nonzero().reshape(-1)
            give_default_priority(table, ran_on, [rb for rb in self._members if rb._table is table])

    def _learner_states(self) -> list[dict[str, Any] | None]:
        """The tree of each ``sync=False`` member, and the stamps that it has seen."""
        return [
            None
            if rb._learner_sampler is None
            else {"sampler": sampler_state(rb._learner_sampler), "seen": rb._learner.state()}
            for rb in self._member_list
        ]

    def _load_learners(self, states: list[dict[str, Any] | None] | None) -> None:
        states = states or [None] * len(self._member_list)
        for rb, state in zip(self._member_list, states, strict=True):
            sampler = rb._learner_sampler
            if sampler is None:
                continue
            if state is None or state["seen"] is None:
                sampler._empty()
                rb._learner.forget()
            else:
                load_sampler_state(sampler, state["sampler"])
                rb._learner.restore(state["seen"])

    # ------------------------------------------------------------------ sharing and copies

    def share(self, shared: bool = True) -> Any:
        """Readies the buffer for other processes; see :meth:`torchrl.data.ReplayBuffer.share`.

        Puts the records of a tracked :class:`~torchrl.data.LazyTensorStorage` into shared memory,
        at once or when they are first written. The lock is the table's before and after.

        Raises:
            RuntimeError: if the table of the storage can't be shared.
        """
        if shared:
            self._refuse_in_a_write("share()")
            for rb in self._members:
                if rb is not self:
                    rb.share()
                elif rb._table is not None:
                    rb._table.sharing.share()
        return super().share(shared)

    def __getstate__(self) -> dict[str, Any]:
        if not self._tables():
            return self._own_state()
        is_sent = get_spawning_popen() is not None
        return copies.sent_state(self) if is_sent else copies.copied_state(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        is_tracked = bool(self._tables())
        state = copies.copied_state(self) if is_tracked else copy.deepcopy(self._own_state(), memo)
        return copies.made_of(self, state)

    def _own_state(self) -> dict[str, Any]:
        """TorchRL's state, less what is of this process, or of the members."""
        state = super().__getstate__()
        for name in ("_stock_replay_lock", "_tally", "_in_write"):
            state.pop(name, None)
        is_plain = self._member_list == (self,)
        return state if is_plain or not self._tables() else copies.without_parts(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        has_transforms = state.pop("_has_transforms", None)
        self._begin()
        super().__setstate__(state)
        copies.arrive(self, is_copy="_stock_write_lock" not in state)
        if has_transforms is not None:
            copies.rejoin(self, has_transforms)

    def _begin(self) -> None:
        """Makes what a buffer has for itself in a process."""
        raise NotImplementedError


@contextlib.contextmanager
def _marked(tables: list[SlotGenerations]) -> Iterator[None]:
    """Refuses signal handlers what they can't do in the middle of a write, for some tables."""
    if not tables:
        yield
        return
    with tables[0].writing.marker, _marked(tables[1:]):
        yield


def _note_that_records_ran_on(rb: Any) -> None:
    """For a dump that the records went on to be written into: nothing tells which."""
    table = rb._table
    restore.retire(table)
    table.history.ran_on = torch.ones_like(table.stamps, dtype=torch.bool)
    if isinstance(rb._writer, TensorDictMaxValueWriter):
        rb._writer.rank_what_ran_on()
