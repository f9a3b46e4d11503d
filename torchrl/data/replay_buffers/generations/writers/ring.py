"""Ring writers that advance the stamps of the slots they write, under the lock, before the data.

They are TorchRL's writers. What differs: the counters belong to the storage's one table; a handle
from before a write is dead as soon as the write begins, also if it fails halfway; and a batch
larger than the storage writes only the rows that stay, so that no record is torn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from tensordict.utils import expand_as_right, is_tensorclass
from torch.utils._pytree import tree_leaves, tree_map
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import ListStorage, Storage, TensorStorage

from ..core.index import slot_index
from ..core.table import TABLE_ATTRIBUTE, SlotGenerations

STATE_KEYS = ("_generation", "_lineage", "_live_generation")

# The key under which a sample carries the stamps of its records.
GENERATION_KEY = "index_generation"


class StampingWriter:
    """What the writers of this package have in common; it stands before a TorchRL writer."""

    _storage: Storage
    tracks_generations: bool
    # What a load found while the writer has no storage, until it gets one.
    _pending: dict[str, Any] | None = None

    @property
    def table(self) -> SlotGenerations | None:
        """The table of the storage, whoever put it there; None if the storage has none."""
        return getattr(self._storage, TABLE_ATTRIBUTE, None)

    def register_storage(self, storage: Storage) -> None:
        """Binds the writer to a storage and, if it tracks, makes the storage's table.

        What was loaded before there was a storage goes into the table now, unless another buffer's
        table is there already: that one speaks of the records that are in the slots.
        """
        shared = hasattr(storage, TABLE_ATTRIBUTE)
        if self.tracks_generations:
            table = SlotGenerations.attach(storage)
            if self._pending is not None and not shared:
                table.stamps.fill_(-1)  # a new table: nobody holds its stamps yet
                table.load_state_dict(self._pending)
        self._storage = storage
        self._pending = None
        if self.table is not None:
            self.table.install_writer_cells(self)

    def generations_of(self, index: Any) -> torch.Tensor:
        """Returns the stamps of the records at ``index``.

        Args:
            index: dim-0 slots, any shape. With ``ndim > 1``, a tuple of one tensor per dimension
                or a ``[..., ndim]`` tensor is read as coordinates.

        Returns:
            int64 tensor of the shape and on the device of ``index`` (of coordinates: ``[...]``);
            -1 where there is no usable stamp: never written, emptied, out of range, or the writer
            does not track.
        """
        table = self.table
        if table is None or not self.tracks_generations:
            if isinstance(index, tuple) and self._storage is not None and self._storage.ndim > 1:
                index = index[0]
            return torch.full_like(slot_index(index, "generations_of(): index"), -1)
        return table.of(index)

    def _fill_gap(self, table: SlotGenerations, length: int, written: torch.Tensor) -> None:
        """Stamps slots that a write brought below the length without a record of their own.

        From now on they can be sampled: they get the default priority, too.
        """
        gap = torch.arange(length, table.length)
        gap = gap[~torch.isin(gap, written.cpu())]
        if gap.numel():
            table.advance(gap)
            give_default_priority(self._storage, gap)

    def _stamp_late(self, index: Any) -> Any:
        """For a write without a table, in the middle of which another thread made one."""
        table = self.table
        if table is not None:
            table.advance(index)
        return index

    def _take_over(self, state: dict[str, Any]) -> None:
        table = self.table
        if table is not None:
            table.load_state_dict(state)
        elif self._storage is None and self.tracks_generations:
            self._pending = state


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
    # What TorchRL's own load read, on its way into the table.
    _loaded: torch.Tensor | None = None

    def add(self, data: Any) -> int | torch.Tensor:
        """Puts one record at the cursor; see :meth:`torchrl.data.RoundRobinWriter.add`."""
        table = self.table
        if table is None:
            return self._stamp_late(super().add(data))
        put = super().add
        if self._is_traced(table):
            table.advance_traced(self._cursor, 1)
            return self._put(data, put)
        with table.lock:
            if table.grid is not None:
                table.fit(data, single=True)
            return self._ring_write(table, 1, lambda _: self._put(data, put))

    def extend(self, data: Any) -> torch.Tensor:
        """Puts a batch of records at the cursor and after.

        Args:
            data: N records, N > 0.

        Returns:
            int64 ``[N]``: the slot of each row, also of rows that were overwritten within the call
            because N exceeds the capacity. Of those, only the last ``capacity`` are written at all.
            With ``ndim > 1``, the coordinates of each cell, row by row: ``[N * cells, ndim]``.

        Raises:
            ValueError: if the first write of a lazy storage with ``ndim > 1`` makes more cells than
                a priority sampler over it holds. Nothing has changed then.
        """
        table = self.table
        if table is None:
            return self._stamp_late(super().extend(data))
        rows = _num_rows(data)
        put = super().extend
        if self._is_traced(table):
            table.advance_traced(self._cursor, rows)
            return self._put(data, put)
        with table.lock:
            if table.grid is not None:
                table.fit(data)
            if rows > table.capacity:
                return self._ring_write(
                    table, rows, lambda start: self._put_last(data, start, rows, table)
                )
            if not rows or not self._takes_ranges(data):
                return self._ring_write(table, rows, lambda _: self._put(data, put))
            return self._ring_write(
                table,
                rows,
                lambda start: self._put(data, lambda stored: self._put_range(stored, start, rows)),
            )

    def _is_traced(self, table: SlotGenerations) -> bool:
        """Whether to write as in a compiled region; a write that leaves a gap breaks the graph."""
        return table.is_traced() and self._cursor <= self._storage._len

    def _takes_ranges(self, data: Any) -> bool:
        """Whether consecutive rows may be written as a slice, in half the time of an index."""
        storage = self._storage
        return (
            isinstance(storage, TensorStorage)
            and storage.ndim == 1
            and not storage._compilable
            and not isinstance(data, (list, LazyStackedTensorDict))
        )

    def _put_range(self, data: Any, start: int, rows: int) -> torch.Tensor:
        """What TorchRL's ``extend`` does, but a range that does not wrap is written as a slice."""
        storage, stop = self._storage, start + rows
        capacity = storage.max_size
        index = torch.arange(start, stop, device=getattr(data, "device", None) or "cpu")
        if stop > capacity:
            index.remainder_(capacity)
        self._cursor = stop % capacity
        self._write_count += rows
        self._set_index(data, index)
        storage.set(slice(start, stop) if stop <= capacity else index, data)
        storage._last_cursor = index
        self._mark_update_entities(index)
        return index

    def _put_last(self, data: Any, start: int, rows: int, table: SlotGenerations) -> torch.Tensor:
        """Writes the last ``capacity`` rows of a batch that laps the ring."""
        capacity = table.capacity
        # The older of the rows that stay fill the ring to its end, the newer begin it.
        end = (start + rows) % capacity
        parts = [(end, slice(rows - capacity, rows - end)), (0, slice(rows - end, rows))]
        if table.grid is not None or isinstance(self._storage, ListStorage):
            parts.reverse()  # these only grow from their front
        self._write_count += rows - capacity
        for cursor, part in parts:
            if part.start < part.stop:
                self._cursor = cursor
                index = self._put(_rows(data, part), super().extend)
        self._cursor = end
        index = (torch.arange(rows, device=index.device) + start) % capacity
        if table.grid is not None:
            self._storage._set_last_cursor(index[-max(end, 1) :])
        self._label(data, index)
        return self._replicate_index(index)

    def write_at(self, index: Any, data: Any) -> int | torch.Tensor:
        """Puts records into the slots ``index`` without moving the cursor.

        Slots that this brings below the length of the storage without a record of their own get a
        stamp and the default priority all the same: from now on they can be sampled.
        """
        table = self.table
        if table is None:
            return self._stamp_late(super().write_at(index, data))
        put = super().write_at
        with table.lock:
            table.forget_failed_first_write()
            if table.grid is not None:
                table.fit(data, single=isinstance(index, int))
            length = table.length
            slots = slot_index(index, "write_at(): index").reshape(-1)
            table.advance(slots)
            try:
                written = self._put(data, lambda stored: put(index, stored))
            except BaseException:
                give_default_priority(self._storage, slots)
                raise
            self._fill_gap(table, length, slots)
            return written

    def _ring_write(self, table: SlotGenerations, rows: int, put: Callable[[int], Any]) -> Any:
        """Stamps the next ``rows`` slots of the ring, then lets ``put`` write them.

        Args:
            table (SlotGenerations): the table, whose lock the caller holds.
            rows (int): how many.
            put (Callable[[int], Any]): gets the first slot, and returns the index of the rows.
        """
        storage = self._storage
        table.forget_failed_first_write()
        start, length, capacity = self._cursor, table.length, table.capacity
        revision = storage._mutation_revision
        table.advance_ring(start, rows)
        try:
            index = put(start)
        except BaseException:
            table.forget_failed_first_write()
            slots = (torch.arange(min(rows, capacity)) + start) % capacity
            give_default_priority(storage, slots)
            raise
        if not storage._compilable:  # its learners compare every slot: cells can't be traced
            table.ring_log.append(start, rows, revision, storage._mutation_revision)
        if length < capacity:
            end = table.length
            if end > length and not (start <= length and start + rows >= end):
                written = (torch.arange(min(rows, capacity)) + start) % capacity
                self._fill_gap(table, length, written)
        return index

    def _put(self, data: Any, write: Callable[[Any], Any]) -> Any:
        """Writes ``data`` without the stamps that samples carry."""
        index = write(without_stamps(data))
        table = self.table
        if table is not None and table._share_at_first_write:
            table.share_records()
        if self._storage._compilable and isinstance(index, torch.Tensor):
            # TorchRL keeps a view of it as the last cursor, and writes the next one into that.
            index = index.clone()
        return index

    def _set_index(self, data: Any, index: torch.Tensor) -> None:
        """Writes the slots into the records where TorchRL's writer of this kind does; here not."""

    def _label(self, data: Any, index: Any) -> None:
        """Rewrites the caller's ``index`` where TorchRL's writer of this kind does; here not."""

    def _update_storage_len_for_write_at(self, index: Any) -> None:
        grid = None if self.table is None else self.table.grid
        slots = torch.as_tensor(index)
        if grid is not None and slots.numel():  # the length counts cells, TorchRL takes slots
            cells = (int(slots.max()) + 1) * grid.width
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
        table = self.table
        if not self.tracks_generations or table is None:
            return {**super().state_dict(), **(self._pending or {})}
        with table.lock:
            return {**super().state_dict(), **table.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave; the storage's records must be restored already.

        Which handles live on is told at
        :meth:`~torchrl.data.replay_buffers.generations.SlotGenerations.load_state_dict`.
        """
        self._take_over({key: state_dict[key] for key in STATE_KEYS if key in state_dict})
        super().load_state_dict(state_dict)
        self._loaded = None

    def dumps(self, path: str | Path) -> None:
        """Saves cursor, write count, stamps and lineage into the folder ``path``."""
        super().dumps(path)
        state = self.state_dict()
        if "_lineage" in state:
            file = Path(path) / "metadata.json"
            metadata = json.loads(file.read_text())
            file.write_text(json.dumps({**metadata, "lineage": state["_lineage"]}))

    def loads(self, path: str | Path) -> None:
        """Restores what :meth:`dumps` saved; see :meth:`load_state_dict`."""
        super().loads(path)
        lineage = json.loads((Path(path) / "metadata.json").read_text()).get("lineage")
        loaded, self._loaded = self._loaded, None
        self._take_over({} if loaded is None else {"_generation": loaded, "_lineage": lineage})


class TensorDictRoundRobinWriter(RoundRobinWriter, torchrl_buffers.TensorDictRoundRobinWriter):
    """A ring writer for tensordict buffers whose slots carry generation stamps.

    See :class:`torchrl.data.TensorDictRoundRobinWriter`, and :class:`RoundRobinWriter` for the
    arguments. It writes ``"index"`` into the tensordict that it is given, as TorchRL's does; where
    that tensordict carries an ``"index_generation"``, a sample put back in, it rewrites this, too.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl.data.replay_buffers.generations import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     writer=TensorDictRoundRobinWriter(track_generations=True),
        ...     batch_size=2,
        ... )
        >>> index = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> rb.sample()["index_generation"]
        tensor([0, 0])
    """

    def _put(self, data: Any, write: Callable[[Any], Any]) -> Any:
        stored = without_stamps(data)
        index = super()._put(stored, write)
        if stored is not data:
            one_dimension = self._storage.ndim == 1  # else TorchRL's writer labels with the slots
            self._label(data, index if one_dimension else stored.get("index"))
        return index

    def _set_index(self, data: Any, index: torch.Tensor) -> None:
        if not is_tensorclass(data):
            data.set("index", expand_as_right(index, data))

    def _label(self, data: Any, index: Any) -> None:
        if is_tensorclass(data):
            return
        table = self.table
        assert table is not None  # only writes into a tracked storage come here
        slots = torch.as_tensor(index, device=data.device)
        if slots.ndim > 1:
            slots = slots.reshape(slots.shape[0], -1)[:, 0]
        data.set("index", expand_as_right(slots, data))
        if GENERATION_KEY in data.keys():  # noqa: SIM118  a tensordict is no mapping
            data.set(GENERATION_KEY, expand_as_right(row_generations(table, slots), data))


def give_default_priority(
    storage: Storage, slots: torch.Tensor, entities: list[Any] | None = None
) -> None:
    """Gives the records at ``slots`` the default priority in every buffer on the storage.

    Args:
        storage (Storage): the storage.
        slots (torch.Tensor): int64 ``[slots]``; those past the length have no record and no leaf.
        entities (list, optional): the buffers to do it in. Defaults to all that are attached.
    """
    grid = getattr(storage, TABLE_ATTRIBUTE).grid
    slots = slots[slots < (len(storage) if grid is None else grid.length)]
    if slots.numel():
        if grid is not None:
            slots = grid.cells_of(slots)
        for entity in storage._attached_entities if entities is None else entities:
            entity.mark_update(slots)


def last_rows(index: torch.Tensor) -> torch.Tensor:
    """Returns which rows of ``index`` (``[N]``) no later row repeats: bool ``[N]``."""
    slots, which = torch.unique(index, return_inverse=True)
    rows = torch.arange(index.numel(), device=index.device)
    last = torch.zeros_like(slots).scatter_reduce_(0, which, rows, "amax")
    return last[which] == rows


def row_generations(table: SlotGenerations, index: Any) -> torch.Tensor:
    """Returns the stamp of each row of a write just made, under the lock that it was made in.

    Args:
        table (SlotGenerations): the table of the storage.
        index: what the write returned: an int, ``[N]`` slots, or ``[N, ndim]`` coordinates.

    Returns:
        int64, shaped like ``index`` (``[N]`` for coordinates ``[N, ndim]``): -1 for a row whose
        slot a later row of the call took.
    """
    stamps = table.of(index)
    if stamps.numel() > table.stamps.numel():
        slots = torch.as_tensor(index)
        if slots.ndim > 1:
            assert table.grid is not None  # else there are no coordinates
            slots = table.grid.number(slots)
        stamps[~last_rows(slots)] = -1
    return stamps


def _num_rows(data: Any) -> int:
    if isinstance(data, (list, torch.Tensor)) or is_tensor_collection(data):
        return len(data)
    return len(tree_leaves(data)[0])


def _rows(data: Any, part: slice) -> Any:
    if isinstance(data, (list, torch.Tensor)) or is_tensor_collection(data):
        return data[part]
    return tree_map(lambda leaf: leaf[part], data)


def without_stamps(data: Any) -> Any:
    """Returns ``data`` less the stamps that it carries if it is a sample: no part of a record."""
    if isinstance(data, TensorDictBase):
        return data.exclude(GENERATION_KEY) if GENERATION_KEY in data.keys() else data  # noqa: SIM118
    if isinstance(data, list) and data and isinstance(data[0], TensorDictBase):
        return [without_stamps(item) for item in data]
    return data
