"""Checkpoints and copies of a buffer on a storage with a table, and what a process gets of it.

Which handles live on through a restore is told in ``slots.py``; a dump on disk is whole or not
there, see ``dumps.py``. A copy is independent: it has records, files and a lock of its own.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import torch
from tensordict import is_tensor_collection
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
)
from torchrl.data.replay_buffers.replay_buffers import _maybe_delay_init

from ..buffers.tracking import TrackingBuffer, built
from ..core.checks import (
    check_dump_fits,
    check_fits,
    check_learner_fits,
)
from ..core.ring_log import ENTRIES
from ..core.table import SlotGenerations
from ..core.tally import Tally
from ..processes.sharing import copy_records, own_files
from ..writers.max_value import TensorDictMaxValueWriter, check_ranks
from ..writers.ring import (
    give_default_priority,
)
from . import dumps

# What dumps() adds to TorchRL's files.
STATE_FILE = "generations.pt"


class SavedBuffer(TrackingBuffer):
    """Saves, restores, copies, shares and sends a buffer with its stamps (*No resurrection*)."""

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
        check_fits(self._storage, self._sampler, state_dict)
        check_learner_fits(self._learner_sampler, learner)
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
        check_learner_fits(self._learner_sampler, ours.get("learner"))
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
        built.add(self)
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
