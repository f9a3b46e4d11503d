"""A writer that keeps the records of the highest rank, and stamps the slots that it gives away.

A record that ranks too low is not written, and its row has index -1. One that ranks high enough
evicts the lowest, whose handles are stale from before the data is touched. Of several records of
one call that were given the same slot only the last is written: the slot advances once, and the
rows of the others have index -1, too.

The ranks are in the memory of the process that built the writer. After a fork, the first process
that writes goes on with them, and any other is refused.
"""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import is_tensor_collection
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import Storage, TensorStorage

from ..core.table import SlotGenerations
from ..processes.writing import cleaning_up_after
from .records import check_records
from .stamping import GENERATION_KEY, StampingWriter, give_default_priority, without_stamps

# What dumps() adds to TorchRL's files.
STATE_FILE = "max_value.pt"


class TensorDictMaxValueWriter(StampingWriter, torchrl_buffers.TensorDictMaxValueWriter):
    """A writer that keeps the records of the highest rank, and whose slots carry stamps.

    See :class:`torchrl.data.TensorDictMaxValueWriter`; for the stamps, :class:`RoundRobinWriter`.
    The lock of the table guards the ranks, too. A write that fails leaves them as they were.

    Args:
        rank_key (NestedKey, optional): what to rank by. Defaults to ``("next", "reward")``.
        reduction (str, optional): how to reduce a rank of several numbers. Defaults to ``"sum"``.

    Keyword Args:
        track_generations (bool, optional): whether to stamp the slots. Defaults to False.
        compilable (bool, optional): see :class:`torchrl.data.RoundRobinWriter`. Defaults to False.

    Raises:
        TypeError: when it is given a storage of a kind that cannot be tracked.
        ValueError: when it is given a storage with ``ndim > 1``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl.data.replay_buffers.generations import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(2),
        ...     writer=TensorDictMaxValueWriter(rank_key="score", track_generations=True),
        ... )
        >>> rb.extend(TensorDict({"score": torch.tensor([5, 1])}, [2]), return_generation=True)
        (tensor([0, 1]), tensor([0, 0]))
        >>> rb.extend(TensorDict({"score": torch.tensor([3, 2])}, [2]), return_generation=True)
        (tensor([ 1, -1]), tensor([ 1, -1]))
    """

    _cursor: int
    _current_top_values: list[tuple[float, int]]
    _write_count: int

    def __init__(
        self,
        rank_key: Any = None,
        reduction: str = "sum",
        *,
        track_generations: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(rank_key, reduction, **kwargs)
        self.tracks_generations = track_generations
        # The writes that the ranks know of; _write_count is shared with forked processes.
        self._ranked_writes = self._write_count

    def register_storage(self, storage: Storage) -> None:
        """Binds the writer to a storage; see :meth:`RoundRobinWriter.register_storage`."""
        if storage.ndim > 1:
            raise ValueError(
                "TensorDictMaxValueWriter needs a storage with ndim=1, since it ranks whole "
                f"records: got {type(storage).__name__} with ndim={storage.ndim}."
            )
        if self._storage not in (None, storage):  # ranks of records that are elsewhere
            self._cursor, self._current_top_values = 0, []
        super().register_storage(storage)

    def add(self, data: Any) -> int | None:
        """Puts one record in if it ranks high enough.

        Args:
            data: the record. ``"index"`` is written into it, as TorchRL's writer does, and where it
                carries an ``"index_generation"``, a sample put back in, this is rewritten, too.

        Returns:
            The slot, or None if the record ranks too low.

        Raises:
            KeyError: if the record has no rank key.
            RuntimeError: if it is no tensordict or tensorclass, or another process wrote.
        """
        table = self.table
        if table is None:
            slot = super().add(data)
            self._ranked_writes = self._write_count
            return slot if slot is None else self._stamp_late(slot)
        stored = self._rankable(data)
        with table.lock, self._ranking(table) as replaced:
            slot = self._insert(stored, replaced)
            if slot is None:
                return None
            stored.set("index", slot)
            self._put(table, torch.tensor([slot]), slot, stored)
            self._count(1)
            if stored is not data:
                data.set("index", slot)
                data.set(GENERATION_KEY, table.of(slot))
            return slot

    def extend(self, data: Any) -> torch.Tensor:
        """Puts in those records of a batch that rank high enough.

        Args:
            data: N records.

        Returns:
            int64 ``[N]``: the slot of each row, -1 where it ranks too low or a later row of the
            batch took the slot.

        Raises:
            KeyError: if the records have no rank key.
            RuntimeError: if they are no tensordict or tensorclass, or another process wrote.
        """
        table = self.table
        if table is None:
            index = super().extend(data)
            self._ranked_writes = self._write_count
            self._stamp_late(index[index >= 0])
            return index
        stored = self._rankable(data)
        with table.lock, self._ranking(table) as replaced:
            slots = [self._insert(record, replaced) for record in stored]
            row_of = {slot: row for row, slot in enumerate(slots) if slot is not None}
            index = torch.full((len(slots),), -1, device=getattr(data, "device", None))
            if row_of:
                taken = torch.tensor(list(row_of), device=index.device)
                rows = torch.tensor(list(row_of.values()), device=index.device)
                kept = [stored[i] for i in rows] if isinstance(stored, list) else stored[rows]
                self._put(table, taken, taken, kept)
                index[rows] = taken
            self._count(sum(slot is not None for slot in slots))
            return index

    def _rankable(self, data: Any) -> Any:
        """``data`` without the stamps that samples carry."""
        for part in data if isinstance(data, list) else [data]:
            if not is_tensor_collection(part):
                raise RuntimeError(
                    "TensorDictMaxValueWriter needs tensordicts or tensorclasses: got "
                    f"{type(part).__name__}."
                )
            if part.get(self._rank_key, None) is None:
                raise KeyError(
                    f"TensorDictMaxValueWriter needs its rank_key {self._rank_key!r} in the "
                    f"records: got {sorted(map(str, part.keys()))}."
                )
        return without_stamps(data)

    @contextlib.contextmanager
    def _ranking(self, table: SlotGenerations) -> Iterator[dict[int, tuple[float, int] | None]]:
        """Guards the ranks of a write: gives the dict of the entries that it replaces."""
        table.writing.refuse("A write", by_writer=True)
        if self._ranked_writes != self._write_count:
            raise RuntimeError(
                "This TensorDictMaxValueWriter does not know the ranks of all records: another "
                "process wrote through its copy of it. Only one process may write; build the "
                "writer in that one."
            )
        if not len(self._storage):  # another buffer on the storage may have emptied it
            self._cursor, self._current_top_values = 0, []
        cursor = self._cursor
        replaced: dict[int, tuple[float, int] | None] = {}
        try:
            with table.writing.marker:
                yield replaced
        except BaseException:
            kept = [entry for entry in self._current_top_values if entry[1] not in replaced]
            self._current_top_values = kept + [entry for entry in replaced.values() if entry]
            heapq.heapify(self._current_top_values)
            self._cursor = cursor
            raise

    def _insert(self, record: Any, replaced: dict[int, tuple[float, int] | None]) -> int | None:
        """Ranks a record; returns its slot and notes the entry that it replaces there."""
        lowest = self._current_top_values[0] if self._current_top_values else None
        slot = self.get_insert_index(record)
        if slot is not None:
            replaced.setdefault(slot, lowest if lowest and lowest[1] == slot else None)
        return slot

    def _put(self, table: SlotGenerations, slots: torch.Tensor, cursor: Any, data: Any) -> None:
        """Stamps ``slots`` and then writes ``data`` there."""
        storage = self._storage
        table.sharing.forget_failed_first_write()
        lead = torch.Size([]) if isinstance(cursor, int) else slots.shape
        check_records(storage, data, lead, "A write")
        length = len(storage)
        table.writing.slots = slots
        table.advance(slots)
        try:
            storage.set(cursor, data)
        except BaseException as error:
            with cleaning_up_after(error):
                if isinstance(storage, TensorStorage):
                    storage._len = length  # slots past it may never have been written
                give_default_priority(table, slots)
            raise
        finally:
            table.writing.slots = None
        if table.sharing.records_wait:
            table.sharing.share_records()
        give_default_priority(table, slots)
        self._fill_gap(table, length, slots)

    def _count(self, writes: int) -> None:
        self._write_count += writes
        self._ranked_writes = self._write_count

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count=empty_write_count)
        self._ranked_writes = self._write_count

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Returns ranks, cursor, write count, stamps and lineage.

        Raises:
            NotImplementedError: as TorchRL's does, if the writer does not track.
        """
        if not self.tracks_generations:
            return super().state_dict()
        table = self.table
        with contextlib.nullcontext() if table is None else table.lock:
            return {
                "_cursor": self._cursor,
                "_write_count": self._write_count,
                "_rank_key": self._rank_key,
                "_current_top_values": list(self._current_top_values),
                **self._saved_stamps(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave; the storage's records must be restored already.

        Which handles live on is told at :ref:`ref_buffers_generations_checkpoints`. Records that
        ran on since the state was taken are ranked anew.

        Raises:
            NotImplementedError: as TorchRL's does, if the writer does not track.
        """
        if not self.tracks_generations:
            super().load_state_dict(state_dict)
        ranks = [(rank, int(slot)) for rank, slot in state_dict["_current_top_values"]]
        self._take_over(state_dict)
        self._write_count = self._ranked_writes = state_dict["_write_count"]
        self._rank_key = state_dict["_rank_key"]
        self._current_top_values = ranks
        self._cursor = state_dict["_cursor"]
        self.rank_what_ran_on()

    def rank_what_ran_on(self) -> None:
        """Ranks the records anew that are others than at the time of the state last loaded."""
        table, cursor = self.table, self._cursor
        if table is None or table.history.ran_on is None:
            return
        ran_on = table.history.ran_on[: len(self._storage)].nonzero()[:, 0].tolist()
        others = [entry for entry in self._current_top_values if entry[1] not in set(ran_on)]
        self._current_top_values = others
        heapq.heapify(others)
        for slot in ran_on:
            self._cursor = slot  # where a record goes while there are fewer ranks than slots
            self.get_insert_index(self._storage.get(slot))
        self._cursor = cursor

    def dumps(self, path: str | Path) -> None:
        """Saves what :meth:`state_dict` returns into the folder ``path``."""
        super().dumps(path)
        if self.tracks_generations:
            state = self.state_dict()
            state.pop("_live_generation", None)
            torch.save(state, Path(path) / STATE_FILE)
            if "_generation" in state:
                file = Path(path) / "metadata.json"
                # A ring writer that loads this would look for stamps under its own key.
                shape = {"max_value_generation_shape": list(state["_generation"].shape)}
                file.write_text(json.dumps({**json.loads(file.read_text()), **shape}))

    def loads(self, path: str | Path) -> None:
        """Restores what :meth:`dumps` saved; see :meth:`load_state_dict`.

        A dump of TorchRL's writer has ranks and no stamps.
        """
        file = Path(path) / STATE_FILE
        if self.tracks_generations and file.exists():
            self.load_state_dict(torch.load(file))
            return
        super().loads(path)
        self._ranked_writes = self._write_count
        self._take_over({})
