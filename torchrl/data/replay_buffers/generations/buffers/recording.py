"""What goes into a buffer and comes out of it on a storage with a table: writes and samples.

The methods are TorchRL's; what they do instead of it stands in ``writes`` and ``sampling``.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers import (
    ConditionalUpdateResult,
    PrioritizedSampler,
    Sampler,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.replay_buffers import _maybe_delay_init

from ..core.learner import Learner
from ..core.table import TABLE_ATTRIBUTE, SlotGenerations
from ..core.trees import write_default
from ..processes.holding import locked
from . import background, sampling, writes
from .torchrls import is_torchrls, ours

# The mix-in stands before a TorchRL buffer class, whose methods and attributes it works with.
if TYPE_CHECKING:
    from torchrl.data import ReplayBuffer as _Buffer
else:
    _Buffer = object


class _TableLock:
    """A lock of a buffer, which is the table's where there is one, and else TorchRL's own.

    TorchRL takes ``_replay_lock`` and ``_write_lock``, in this order. One lock in place of both
    leaves no order between them, which one who holds the table's lock and calls the buffer would
    get wrong. TorchRL's ``share()`` sets a write lock each time, which only counts without a table.
    """

    def __init__(self, stock: str, default: Any) -> None:
        self._stock, self._default = stock, default

    def __get__(self, rb: Records, cls: type) -> Any:
        lock = rb._lock_of_tables(self._stock)
        return rb.__dict__.get(self._stock, self._default) if lock is None else lock

    def __set__(self, rb: Records, lock: Any) -> None:
        rb.__dict__[self._stock] = lock


@ours
class Records(_Buffer):
    """Writes, marks and samples the records of a tracked buffer, each as one step under the lock.

    The lock of the storage's table guards the records, the stamps and the priority tree. ``add``
    and ``extend`` hold it from the first stamp to the last priority; a sample reads index, stamps
    and data under it.
    """

    _write_lock = _TableLock("_stock_write_lock", contextlib.nullcontext())
    _replay_lock = _TableLock("_stock_replay_lock", None)
    _learner: Learner

    @property
    def _table(self) -> SlotGenerations | None:
        storage = self.__dict__.get("_storage")
        return None if storage is None else storage.__dict__.get(TABLE_ATTRIBUTE)

    def _lock_of_tables(self, stock: str) -> Any:
        """What stands in place of TorchRL's lock of this name; None if the storage has no table."""
        table = self._table
        return None if table is None else table.lock

    @property
    def _learner_sampler(self) -> Sampler | None:
        """The private sampler of a ``sync=False`` learner."""
        return self.__dict__.get("_prioritized_sampler")

    @property
    def _priority_sampler(self) -> PrioritizedSampler | None:
        """The sampler that owns the priority tree, here or in an asynchronous learner."""
        sampler = self._learner_sampler or self._sampler
        return sampler if isinstance(sampler, PrioritizedSampler) else None

    def _initialize_prioritized_sampler(self) -> None:
        with self._write_lock:  # another buffer may be writing already
            if self._table is not None:
                self._table.trees.limit()
            super()._initialize_prioritized_sampler()

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler that owns the priority tree.

        Under the lock of the table, where TorchRL's methods read it, an asynchronous learner's has
        caught up.
        """
        table, sampler = self._table, self._learner_sampler
        if table is not None and sampler is not None and table.lock.is_held():
            self._learner.catch_up(table, sampler)
        return super().prioritized_sampler

    def _catch_up_prioritized_sampler(self) -> None:
        # TorchRL catches up before it takes the lock, and a record could come in between.
        if self._table is None:
            super()._catch_up_prioritized_sampler()

    def _synchronize_futures_locked(self) -> None:
        # TorchRL's tells the first of several errors, and loses the others.
        background.synchronize(self)

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
            RuntimeError: for ``return_generation=True`` if the writer does not track, or in the
                middle of another write of this thread (in a signal handler).
            ValueError: see :meth:`extend`.
        """
        return writes.write(self, "add", data, super().add, return_generation)

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
            RuntimeError: see :meth:`add`.
            ValueError: for records whose shapes or dtypes do not go into the storage, or that bring
                a priority outside its range. Nothing has changed then.

        Examples:
            >>> import torch
            >>> from torchrl.data import ListStorage
            >>> from torchrl.data.replay_buffers.generations import ReplayBuffer
            >>> rb = ReplayBuffer(storage=ListStorage(2), track_generations=True)
            >>> rb.extend([10, 11, 12], return_generation=True)
            (tensor([0, 1, 0]), tensor([-1,  0,  1]))
        """
        return writes.write(
            self,
            "extend",
            data,
            super().extend,
            return_generation,
            update_priority=update_priority,
        )

    @_maybe_delay_init
    def __setitem__(self, index: Any, value: Any) -> None:
        if self._table is None or writes.names_field(index):
            super().__setitem__(index, value)
        else:
            locked(self, writes.assign, self, index, value, super().__setitem__)

    @_maybe_delay_init
    def empty(self, empty_write_count: bool = True) -> None:
        """Empties the buffer, which makes every handle stale."""
        if self._table is None:
            super().empty(empty_write_count=empty_write_count)
        else:
            locked(self, writes.empty, self, super().empty, empty_write_count)

    def mark_update(self, index: Any) -> None:
        """Gives records the default priority; writers on the storage call it."""
        sampler, table = self.__dict__.get("_sampler"), self._table
        if sampler is None:  # another thread still builds the buffer
            return
        if table is None:
            super().mark_update(index)
            return
        if table.layout.ndim > 1:
            table.trees.check()
            if isinstance(index, torch.Tensor) and index.ndim > 1:
                index = index[index[:, 0] < table.layout.length]  # the others have no leaf yet
        write_default(sampler, index, self._storage)

    def mark_written(self, index: Any) -> None:
        """``mark_update`` for slots that a ring writer of ours knows to have a leaf."""
        sampler = self.__dict__.get("_sampler")
        if not is_torchrls(self, "mark_update"):
            self.mark_update(index)
        elif isinstance(sampler, PrioritizedSampler):
            covered = sampler.max_size >= self._storage.max_size
            write_default(sampler, index, self._storage, are_leaves=covered)

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

        Raises:
            RuntimeError: in the middle of a write of this thread (in a signal handler).
        """
        patched = partial(
            super().update_if_present,
            patch=patch,
            version_key=version_key,
            version=version,
            require_newer=require_newer,
        )
        if self._table is None:
            return patched(index=index, generation=generation)
        return locked(self, writes.patch, index, generation, patched)

    # ------------------------------------------------------------------ sampling

    @_maybe_delay_init
    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Samples records; see the method of the same name of the TorchRL class."""
        return sampling.sample(self, super().sample, *args, **kwargs)

    # With include_info, which tensordict buffers alone take.
    sample.__signature__ = inspect.signature(TensorDictReplayBuffer.sample)

    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        if self._table is None or not sampling.is_direct(self):
            return sampling.as_torchrl(self, super()._sample, batch_size)
        data, info = locked(self, sampling.read, self, batch_size)
        return self._collate_fn(data), info
