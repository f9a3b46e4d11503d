"""Ring writers that advance the stamps of the slots they write, under the lock, before the data.

They are TorchRL's writers. What differs: the counters belong to the storage's one table; a handle
from before a write is dead as soon as the write begins, also if it fails halfway; records that the
storage can't take change nothing; and a batch larger than the storage writes only the rows that
stay, so that no record is torn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import ListStorage, TensorStorage

from ..core import compiled
from ..core.table import SlotGenerations
from ..layout.index import slot_index
from ..processes.sharing import LAST_CURSOR, LENGTH, REVISION
from ..processes.writing import cleaning_up_after
from .columns import Pairs, columns_of, copy_one, copy_ring
from .records import check_records, num_rows, rows_of
from .stamping import StampingWriter, give_default_priority, without_stamps

_ONE = torch.Size([])


class RoundRobinWriter(StampingWriter, torchrl_buffers.RoundRobinWriter):
    """A ring writer whose slots carry generation stamps.

    See :class:`torchrl.data.RoundRobinWriter`. The stamps live in the table of the storage
    (:class:`~torchrl.data.replay_buffers.generations.SlotGenerations`) and are guarded by its lock.
    A writer that does not track still advances a table that another buffer put on its storage.

    Args:
        compilable (bool, optional): see :class:`torchrl.data.RoundRobinWriter`. Defaults to False.

    Keyword Args:
        track_generations (bool, optional): whether to stamp the slots, which adds
            ``"index_generation"`` to samples and 8 bytes per slot. Defaults to False.

    Raises:
        TypeError: when it is given a storage of a kind that cannot be tracked.
        ValueError: when it is given a TensorStorage with ``ndim > 1`` that was made of records.

    Examples:
        >>> import torch
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl.data.replay_buffers.generations import ReplayBuffer, RoundRobinWriter
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True)
        ... )
        >>> index = rb.extend(torch.arange(4))
        >>> _ = rb.extend(torch.arange(4, 6))  # puts other records into slots 0 and 1
        >>> rb.writer.generations_of(index)
        tensor([1, 1, 0, 0])
    """

    _cursor: int
    _write_count: int
    # Where TorchRL's writer of a kind writes the slots into the records that it stores.
    _index_key: str | None = None
    # What TorchRL's own load read, on its way into the table.
    _loaded: torch.Tensor | None = None

    def add(self, data: Any) -> int | torch.Tensor:
        """Puts one record at the cursor.

        Args:
            data: the record.

        Returns:
            The slot, or with ``ndim > 1`` the coordinates of its cells, ``[cells, ndim]``.

        Raises:
            ValueError: for a record that does not go into the storage; see :meth:`extend`.
        """
        return self._ring_write(data, _ONE, super().add)

    def extend(self, data: Any) -> torch.Tensor:
        """Puts a batch of records at the cursor and after.

        Args:
            data: N records, N > 0.

        Returns:
            int64 ``[N]``: the slot of each row, also of rows that were overwritten within the call
            because N exceeds the capacity. Of those, only the last ``capacity`` are written at all.
            With ``ndim > 1``, the coordinates of each cell, row by row: ``[N * cells, ndim]``.

        Raises:
            ValueError: for records of another kind, shape or dtype than the storage has, or if the
                first write of a lazy storage with ``ndim > 1`` makes more cells than a priority
                sampler over it holds. Nothing has changed then.
            RuntimeError: in the middle of another write of this thread (in a signal handler).
        """
        return self._ring_write(data, torch.Size([num_rows(data)]), super().extend)

    def write_at(self, index: Any, data: Any) -> int | torch.Tensor:
        """Puts records into the slots ``index`` without moving the cursor.

        Slots that this brings below the length of the storage without a record of their own get a
        stamp and the default priority all the same: from now on they can be sampled.

        Args:
            index: an int, or N slots.
            data: one record, or N.

        Raises:
            IndexError: if a slot is out of range. Nothing has changed then, here and below.
            TypeError: if ``index`` is not integer.
            ValueError: for records that do not go into the storage; see :meth:`extend`.
        """
        table, put = self.table, super().write_at
        if table is None:
            return self._stamp_late(put(index, data))
        with table.lock:
            table.writing.refuse("write_at()", by_writer=True)
            table.sharing.forget_failed_first_write()
            slots = slot_index(index, "write_at(): index").reshape(-1)
            single = isinstance(index, int)
            self._check_labelled(data, labels=True)
            stored = without_stamps(data)
            table.layout.fit(stored, table.trees.smallest(), single=single)
            lead = _ONE if single else slots.shape
            check_records(self._storage, stored, lead, "write_at()", but=self._index_key)
            before = (self._cursor, self._write_count, len(self._storage))
            length = table.layout.length
            with table.writing.marker:
                table.writing.slots = slots
                table.advance(slots)
                try:
                    written = self._put(table, stored, lambda records: put(index, records))
                except BaseException as error:
                    self._abandon(table, before, slots, error)
                finally:
                    table.writing.slots = None
                self._fill_gap(table, length, slots)
                if stored is not data:
                    self._label(table, data, self._labels(stored, written))
            return written

    def put(self, name: str, data: Any) -> Any:
        """``add`` or ``extend`` for a buffer, which leaves the records it is given as they are."""
        lead = _ONE if name == "add" else torch.Size([num_rows(data)])
        return self._ring_write(data, lead, getattr(super(), name), labels=False)

    def _ring_write(
        self, data: Any, lead: torch.Size, torchrls: Callable[[Any], Any], labels: bool = True
    ) -> Any:
        """Writes at the cursor: stamps first, then the data, then the default priority.

        Args:
            data: the records.
            lead (torch.Size): ``[N]``, or ``[]`` for one record.
            torchrls (Callable[[Any], Any]): TorchRL's own way to write them.
            labels (bool, optional): whether to write the slots into ``data`` where TorchRL's writer
                does so. Defaults to True.
        """
        table, rows = self.table, lead.numel()
        if table is None:
            return self._stamp_late(torchrls(data))
        if table.is_traced() and self._cursor <= self._storage._len:
            return self._traced_write(table, data, rows, torchrls)
        with table.lock:
            table.writing.refuse("A write", by_writer=True)
            table.sharing.forget_failed_first_write()
            self._check_labelled(data, labels)
            stored = without_stamps(data)
            start, length = self._cursor, table.layout.length
            before = (start, self._write_count, len(self._storage))
            pairs, index = self._paired(stored, start, lead)
            if pairs is None:
                if not labels:
                    stored = data = stored.copy()
                table.layout.fit(stored, table.trees.smallest(), single=not lead)
                check_records(self._storage, stored, lead, "A write", but=self._index_key)
            with table.writing.marker:
                table.writing.slots = range(start, start + rows)
                table.advance_ring(start, rows)
                try:
                    if pairs is None:
                        index = self._put_as_torchrl(table, stored, start, rows, torchrls)
                    else:
                        self._put_pairs(table, pairs, start, rows, index)
                        if labels:
                            self._set_index(stored, index)
                except BaseException as error:
                    slots = (torch.arange(rows) + start) % table.layout.slots
                    self._abandon(table, before, slots, error)
                finally:
                    table.writing.slots = None
                table.counters.log_finish(table.sharing.revision)
                if length < table.layout.slots:
                    self._fill_gap_of_ring(table, length, start, rows)
                if stored is not data and labels:
                    self._label(table, data, self._labels(stored, index))
            return index

    def _paired(self, data: Any, start: int, lead: torch.Size) -> tuple[Pairs | None, Any]:
        """Pairs the storage's leaves with those of the records, and returns the rows' slots.

        None in place of the pairs if the records must go TorchRL's way.
        """
        columns = columns_of(self._storage)
        if columns is None or not lead.numel():
            return None, None
        index: Any = start
        if lead:
            index = torch.arange(start, start + lead[0])
            if start + lead[0] > self._storage.max_size:
                index.remainder_(self._storage.max_size)
        return columns.pairs(data, lead, **self._index_entry(data, index)), index

    def _put_pairs(
        self, table: SlotGenerations, pairs: Pairs, start: int, rows: int, index: Any
    ) -> None:
        """Copies records leaf by leaf; of a batch that laps the ring, the rows that stay."""
        storage, stop = self._storage, start + rows
        capacity = storage.max_size
        if isinstance(index, torch.Tensor):
            copy_ring(pairs, start, rows, capacity)
        else:
            copy_one(pairs, start)
        self._cursor = stop % capacity
        self._write_count += rows
        storage._last_cursor = index
        cells = table.sharing.cells.view
        cells[LENGTH] = min(cells[LENGTH] + rows, capacity)
        cells[LAST_CURSOR] = (stop - 1) % capacity
        cells[REVISION] += 1
        for entity in storage._attached_entities:
            getattr(entity, "mark_written", entity.mark_update)(index)

    def _put_as_torchrl(
        self,
        table: SlotGenerations,
        data: Any,
        start: int,
        rows: int,
        torchrls: Callable[[Any], Any],
    ) -> Any:
        """Writes records as TorchRL does, which calls ``mark_update`` of the buffers at the end.

        Of a batch that laps the ring, it writes the last ``capacity`` rows in two parts.
        """
        capacity = table.layout.slots
        if rows <= capacity:
            return self._put(table, data, torchrls)
        # The older of the rows that stay fill the ring to its end, the newer begin it.
        end = (start + rows) % capacity
        parts = [(end, slice(rows - capacity, rows - end)), (0, slice(rows - end, rows))]
        if self._storage.ndim > 1 or isinstance(self._storage, ListStorage):
            parts.reverse()  # such a storage has no later slots before it has the first ones
        self._write_count += rows - capacity
        for cursor, part in parts:
            if part.start < part.stop:
                self._cursor = cursor
                index = self._put(table, rows_of(data, part), torchrls)
        self._cursor = end
        index = (torch.arange(rows, device=index.device) + start) % capacity
        if isinstance(self._storage, TensorStorage):
            flat = self._storage.ndim == 1
            self._storage._set_last_cursor(index if flat else index[-max(end, 1) :])
        self._label(table, data, index)
        return self._replicate_index(index)

    def _put(self, table: SlotGenerations, data: Any, torchrls: Callable[[Any], Any]) -> Any:
        index = torchrls(data)
        if table.sharing.records_wait:
            table.sharing.share_records()
        if self._storage._compilable and isinstance(index, torch.Tensor):
            # TorchRL keeps a view of it as the last cursor, and writes the next one into that.
            index = index.clone()
        return index

    def _traced_write(
        self, table: SlotGenerations, data: Any, rows: int, torchrls: Callable[[Any], Any]
    ) -> Any:
        """A write in a compiled region, which takes no lock; one that leaves a gap is none."""
        compiled.advance_ring(table.counters, table.layout.slots, self._cursor, rows)
        stored = without_stamps(data)
        index = self._put(table, stored, torchrls)
        if stored is not data:
            self._label(table, data, self._labels(stored, index))
        return index

    def _abandon(
        self,
        table: SlotGenerations,
        before: tuple[int, int, int],
        slots: torch.Tensor,
        error: BaseException,
    ) -> NoReturn:
        """Gives back what a write that failed has claimed; its slots are stale already.

        Args:
            table (SlotGenerations): the table.
            before (tuple): cursor, write count and length before the write.
            slots (torch.Tensor): the slots of the write, int64 ``[N]``.
            error (BaseException): why it failed, which is raised again.
        """
        with cleaning_up_after(error):
            self._cursor, self._write_count, length = before
            if isinstance(self._storage, TensorStorage):
                self._storage._len = length
            table.sharing.forget_failed_first_write()
            give_default_priority(table, slots)
        raise error

    def _fill_gap_of_ring(self, table: SlotGenerations, length: int, start: int, rows: int) -> None:
        end = table.layout.length
        if end > length and not (start <= length and start + rows >= end):
            slots = table.layout.slots
            self._fill_gap(table, length, (torch.arange(min(rows, slots)) + start) % slots)

    # The slots stand in the records where TorchRL's writer of a kind puts them there; here not.
    def _index_entry(self, data: Any, index: Any) -> dict[str, torch.Tensor]:
        """The entry for the slots in the records that are stored."""
        return {}

    def _set_index(self, data: Any, index: Any) -> None:
        """Writes the slots into the records that were given."""

    def _check_labelled(self, data: Any, labels: bool) -> None:
        """Refuses records that the slots are to be written into and can't be."""

    def _labels(self, stored: Any, index: Any) -> Any:
        """The slots that TorchRL's writer has written into the records."""
        return index

    def _label(self, table: SlotGenerations, data: Any, index: Any) -> None:
        """Rewrites the caller's ``index`` and the stamps that stand beside it."""

    def _update_storage_len_for_write_at(self, index: Any) -> None:
        table, slots = self.table, torch.as_tensor(index)
        if table is not None and self._storage.ndim > 1 and slots.numel():
            # The length counts cells, and TorchRL takes slots for them.
            cells = (int(slots.max()) + 1) * table.layout.width
            self._storage._len = min(max(len(self._storage), cells), self._storage.max_size)
        else:
            super()._update_storage_len_for_write_at(index)

    def _bump_generation(self, index: Any, data: Any) -> None:
        """TorchRL's methods call this after the data; the stamps have advanced before it."""

    def _empty(self, empty_write_count: bool = True) -> None:
        table = self.table
        if table is not None:
            table.advance_written()
        self._cursor = 0
        if empty_write_count:
            self._write_count = 0

    @property
    def _generation(self) -> torch.Tensor | None:
        # TorchRL's own dumps() and state_dict() read it.
        if self._storage is None:
            return (self._pending or {}).get("_generation")
        table = self.table
        return None if table is None else table.stamps

    @_generation.setter
    def _generation(self, value: torch.Tensor | None) -> None:
        self._loaded = value

    def _align_generation_device(self) -> None:
        """The table does it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns cursor and write count and, if the writer tracks, stamps and lineage."""
        return {**super().state_dict(), **self._saved_stamps()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave, after the storage's records.

        Which handles live on is told at :ref:`ref_buffers_generations_checkpoints`.
        """
        self._take_over(state_dict)
        super().load_state_dict(state_dict)
        self._loaded = None

    def dumps(self, path: str | Path) -> None:
        """Saves cursor, write count, stamps and lineage into the folder ``path``."""
        super().dumps(path)
        lineage = self._saved_stamps().get("_lineage")
        if lineage is not None:
            file = Path(path) / "metadata.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "lineage": lineage}))

    def loads(self, path: str | Path) -> None:
        """Restores what :meth:`dumps` saved; see :meth:`load_state_dict`."""
        super().loads(path)
        lineage = json.loads((Path(path) / "metadata.json").read_text()).get("lineage")
        loaded, self._loaded = self._loaded, None
        self._take_over({"_generation": loaded, "_lineage": lineage})
