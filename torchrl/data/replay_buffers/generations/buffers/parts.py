"""The parts of a tracking buffer: what goes together, and how one takes the place of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, Storage, Writer

from ..core.history import STAMPS_ATTRIBUTE
from ..core.restore import retire
from ..core.table import TABLE_ATTRIBUTE, SlotGenerations
from ..core.trees import Trees
from ..processes.writing import cleaning_up_after
from ..writers.foreign import OUR_WRITERS
from ..writers.ring import RoundRobinWriter
from ..writers.tensordict_ring import TensorDictRoundRobinWriter
from .sampling import check_dimensions
from .sequence import stamped_unit

if TYPE_CHECKING:
    from .conditional import ConditionalPriorityUpdates

# TorchRL's classes that make a priority tree as large as the storage.
_WITH_OWN_TREE = (
    torchrl_buffers.PrioritizedReplayBuffer,
    torchrl_buffers.TensorDictPrioritizedReplayBuffer,
)


def check_has_end(rb: ConditionalPriorityUpdates, storage: Any, sampler: Any) -> None:
    """Refuses a storage without an end for a class that makes a tree as large as the storage.

    Raises:
        ValueError: if it is one.
    """
    if (
        isinstance(rb, _WITH_OWN_TREE)
        and isinstance(storage, Storage)
        and storage.max_size == torch.iinfo(torch.int64).max
        and sampler is None
    ):
        raise ValueError(
            f"{type(rb).__name__} needs a storage with a max_size, for which it can build a "
            f"priority tree: got a {type(storage).__name__} without one. Give it one, or build "
            "a ReplayBuffer with sampler=PrioritizedSampler(max_capacity, ...)."
        )


def check_writer(writer: Writer, insists: bool) -> None:
    """Refuses a writer that can't stamp as it must.

    Args:
        writer (Writer): the writer.
        insists (bool): whether the buffer was built with ``track_generations=True``.

    Raises:
        ValueError: for TorchRL's own writers that track, and for those that don't if they must.
    """
    ours = {cls.__name__: cls for cls in OUR_WRITERS}
    name = type(writer).__name__
    name = name if name in ours else RoundRobinWriter.__name__
    if (
        isinstance(writer, torchrl_buffers.RoundRobinWriter)
        and not isinstance(writer, RoundRobinWriter)
        and writer.tracks_generations
    ):
        raise ValueError(
            f"A buffer of this package needs a writer that stamps before the data: got TorchRL's "
            f"{type(writer).__name__}, which stamps after them. Pass "
            f"generations.{name}(track_generations=True)."
        )
    if insists and not writer.tracks_generations:
        raise ValueError(
            "track_generations=True needs a writer that tracks: got "
            f"{type(writer).__name__} that does not. Pass "
            f"generations.{name}(track_generations=True), or no writer."
        )


def default_writer(rb: ConditionalPriorityUpdates, compilable: bool, tracks: bool) -> Writer:
    """Makes the ring writer of a buffer's kind."""
    cls = TensorDictRoundRobinWriter if rb._is_tensordict else RoundRobinWriter
    return cls(compilable=compilable, track_generations=tracks)


def check_together(storage: Storage, sampler: Sampler, learner: Any, writer: Writer) -> None:
    """Refuses parts that a tracked storage can't have together; an untracked one takes any.

    Args:
        storage (Storage): the storage.
        sampler (Sampler): the sampler that a buffer would have.
        learner (Sampler or None): the private one of an asynchronous learner.
        writer (Writer): the writer.

    Raises:
        ValueError: for a tree without a leaf for every slot, or parts that do not know the
            dimensions of the storage.
        RuntimeError: for a tree that would not hear of the writes of other processes.
    """
    if not (writer.tracks_generations or hasattr(storage, TABLE_ATTRIBUTE)):
        return
    Trees(storage).check(learner or sampler)
    check_processes(storage, sampler)
    check_dimensions(storage, learner or sampler, writer)


def check_processes(storage: Storage, sampler: Sampler) -> None:
    """Refuses a tree that would not hear of the writes of other processes.

    Raises:
        RuntimeError: if it is one.
    """
    table: SlotGenerations | None = getattr(storage, TABLE_ATTRIBUTE, None)
    if isinstance(sampler, PrioritizedSampler) and table is not None and table.lock.is_engaged:
        raise RuntimeError(
            "A storage that other processes may be writing needs a learner that catches up: "
            "got a sync=True priority sampler. Build the buffer with sync=False."
        )


def leave_storage(rb: ConditionalPriorityUpdates, forget_table: bool) -> None:
    """Takes a buffer off its storage, which may be a user's."""
    storage = rb.__dict__.get("_storage")
    if storage is not None:
        attached = storage._attached_entities
        attached[:] = [entity for entity in attached if entity is not rb]
        if forget_table:
            storage.__dict__.pop(TABLE_ATTRIBUTE, None)
            storage.__dict__.pop(STAMPS_ATTRIBUTE, None)


def change_storage(
    rb: ConditionalPriorityUpdates, storage: Storage, torchrls: Callable[[], Storage]
) -> Storage:
    """Moves a tracking buffer to another storage, where it begins anew; returns the former one.

    Handles of the former storage are stale from then on, and so are those that other buffers took
    of this one: their stamps could be equal.
    """
    if not isinstance(storage, Storage):
        raise TypeError(f"set_storage() needs a Storage: got {type(storage).__name__}.")
    if storage.ndim > 1 and rb._learner_sampler is not None:
        raise ValueError(
            f"An asynchronous learner (sync=False) needs a storage with ndim=1: got ndim="
            f"{storage.ndim}."
        )
    check_together(storage, rb._sampler, rb._learner_sampler, rb._writer)
    table = SlotGenerations.attach(storage)
    with rb._settled("set_storage()", table):
        # It may have got records meanwhile, and the buffer other parts.
        writer = rb._writer
        check_together(storage, rb._sampler, rb._learner_sampler, writer)
        retire(table)
        former, cursor = rb._storage, writer._cursor
        try:
            _bind(rb, storage, torchrls)
        except BaseException as error:
            with cleaning_up_after(error):
                _bind(rb, former, lambda: setattr(rb, "_storage", former))
                writer._cursor = cursor
            raise
        forget_priorities(rb)
    return former


def _bind(rb: ConditionalPriorityUpdates, storage: Storage, put: Callable[[], Any]) -> None:
    leave_storage(rb, forget_table=False)
    put()
    storage.attach(rb)
    rb._writer.register_storage(storage)
    rb._writer._cursor = 0


def change_writer(
    rb: ConditionalPriorityUpdates, writer: Writer, torchrls: Callable[[], Writer]
) -> Writer:
    """Gives a buffer another writer and returns the former one."""
    if not isinstance(writer, Writer):
        raise TypeError(f"set_writer() needs a Writer: got {type(writer).__name__}.")
    check_writer(writer, rb._track_generations)
    if rb._table is None and not writer.tracks_generations:
        return torchrls()
    with rb._settled("set_writer()"):
        check_together(rb._storage, rb._sampler, rb._learner_sampler, writer)
        former = torchrls()
        table = rb._table
        if table is not None:
            with table.lock:
                table.trees.limit()
        rb._sample_unit = stamped_unit(rb._sample_unit, writer.tracks_generations)
        return former


def change_sampler(
    rb: ConditionalPriorityUpdates, sampler: Sampler, torchrls: Callable[[], Sampler]
) -> Sampler:
    """Gives a tracked buffer another sampler and returns the former one.

    A priority sampler begins with the default priority for every record: the priorities that it
    may have are those of records that nobody has followed since.
    """
    if not isinstance(sampler, Sampler):
        raise TypeError(f"set_sampler() needs a Sampler: got {type(sampler).__name__}.")
    with rb._settled("set_sampler()"):
        check_dimensions(rb._storage, sampler, rb._writer)
        if rb._learner_sampler is None and not isinstance(rb._sampler, PrioritizedSampler):
            check_processes(rb._storage, sampler)
        Trees(rb._storage).check(sampler)
        if isinstance(sampler, PrioritizedSampler) and rb._learner_sampler is not None:
            former, rb._prioritized_sampler = rb._learner_sampler, sampler
        else:
            former = torchrls()
        forget_priorities(rb)
        return former


def forget_priorities(rb: ConditionalPriorityUpdates) -> None:
    """Empties the tree, and gives every record the default priority."""
    sampler = rb._priority_sampler
    if sampler is not None:
        sampler._empty()
    rb._learner.forget()
    rb._initialize_prioritized_sampler()
