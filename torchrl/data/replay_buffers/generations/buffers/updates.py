"""Priority updates of a buffer: conditional ones, those by slot, and those of a whole sample."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torchrl.data.replay_buffers import PrioritizedSampler

from ..core.result import PriorityUpdateResult
from ..core.table import SlotGenerations
from ..core.trees import refuse_past_the_end
from ..core.update import Update, checked, write_live
from ..layout.flat import UPDATE
from ..writers.stamping import GENERATION_KEY
from . import background
from .sequence import ANCHOR_KEYS, StampedSequence, anchor_priorities
from .writes import ENABLE_TRACKING, write_brought

if TYPE_CHECKING:
    from .conditional import ConditionalPriorityUpdates

_OF_SAMPLE = "update_tensordict_priority_if_present"


def update_if_live(
    table: SlotGenerations,
    rb: ConditionalPriorityUpdates,
    index: Any,
    generation: Any,
    priority: Any,
) -> PriorityUpdateResult:
    """Validates an update and writes the priorities of its live handles; under the lock."""
    table.writing.refuse(UPDATE)
    sampler, update = check(table, rb, index, generation, priority)
    if rb._learner_sampler is not None:
        rb._learner.catch_up(table, sampler)
    with table.writing.marker:
        live, num_live = write_live(table, sampler, update)
    rb._tally.count(num_live, live.numel())
    return PriorityUpdateResult.of(live)


def check(
    table: SlotGenerations,
    rb: ConditionalPriorityUpdates,
    index: Any,
    generation: Any,
    priority: Any,
) -> tuple[PrioritizedSampler, Update]:
    """Raises what ``update_priority_if_present`` would; changes nothing."""
    _, sampler = needed_parts(rb, "update_priority_if_present")
    return sampler, checked(table, sampler, index, generation, priority, rb.dim_extend)


def are_possible(rb: ConditionalPriorityUpdates) -> bool:
    """Whether there are both stamps and priorities, so that an update can be conditional."""
    return (
        rb._table is not None and rb._priority_sampler is not None and rb._writer.tracks_generations
    )


def needed_parts(
    rb: ConditionalPriorityUpdates, name: str
) -> tuple[SlotGenerations, PrioritizedSampler]:
    """Returns the table and the sampler that a conditional update needs.

    Raises:
        RuntimeError: that says what enables it, if the buffer lacks one of them.
    """
    table, sampler = rb._table, rb._priority_sampler
    if table is None or not rb._writer.tracks_generations:
        raise RuntimeError(f"{name}() needs stamps. {ENABLE_TRACKING}")
    if sampler is None and not rb._sync:
        raise RuntimeError(
            f"{name}() needs priorities: they are private to the learner, the process that "
            "built the buffer, and this process only writes records."
        )
    if sampler is None:
        raise RuntimeError(
            f"{name}() needs priorities: got a {type(rb._sampler).__name__}. Build the "
            "buffer with sampler=PrioritizedSampler(...), or as a prioritized buffer."
        )
    return table, sampler


def update_by_slot(
    table: SlotGenerations,
    rb: ConditionalPriorityUpdates,
    index: Any,
    priority: Any,
    torchrls: Callable[[Any, Any], None],
) -> None:
    """Writes priorities by slot; inside of a write, those that its records bring."""
    of_write = rb._in_write._is_owned()
    table.writing.refuse("update_priority()", by_writer=of_write)
    is_tensor = isinstance(index, torch.Tensor)
    if of_write and is_tensor and isinstance(rb._sampler, PrioritizedSampler):
        write_brought(table, rb, index, priority)
        return
    parts = index if isinstance(index, tuple) else (index,)
    slots = torch.stack([torch.as_tensor(part) for part in parts], -1)
    slots = slots if isinstance(index, tuple) else slots[..., 0]
    leaves = table.layout.rows(slots)
    if table.layout.ndim > 1 and slots.ndim > 1 and bool((leaves < 0).any()):
        raise ValueError(f"update_priority() needs cells inside of the storage: got {index!r}.")
    refuse_past_the_end(rb._priority_sampler, leaves)
    with table.writing.marker:
        torchrls(index, priority)


def update_sample(rb: ConditionalPriorityUpdates, data: TensorDictBase) -> PriorityUpdateResult:
    """Writes the priorities of a sample's records that are still in their slots."""
    if not rb._is_tensordict:
        raise RuntimeError(
            f"{_OF_SAMPLE}() needs a tensordict buffer: got {type(rb).__name__}. Use "
            "update_priority_if_present()."
        )
    _, sampler = needed_parts(rb, _OF_SAMPLE)
    if not is_tensor_collection(data):
        raise TypeError(f"{_OF_SAMPLE}() needs a tensordict: got {type(data).__name__}.")
    of_anchors = isinstance(rb._sample_unit, StampedSequence)
    keys = ANCHOR_KEYS if of_anchors else ("index", GENERATION_KEY)
    entries = [data.get(key, None) for key in keys]
    for key, entry in zip(keys, entries, strict=True):
        if entry is None:
            raise KeyError(
                f"{_OF_SAMPLE}() needs {key!r} in the sample: got "
                f"{sorted(map(str, data.keys()))}. Either it was sampled while the writer did not "
                "track, or a transform or a select() dropped the key."
            )
    priority = data.get(rb.priority_key, None)
    if of_anchors:
        return _update_anchors(rb, sampler, data, priority)
    index, generation = entries
    if rb._storage.ndim > 1:
        index = index.unbind(-1)
        priority = sampler.default_priority if priority is None else priority
    elif priority is None or not data.ndim or priority.ndim != 1:
        priority = rb._get_priority_vector(data) if data.ndim else rb._get_priority_item(data)
    return rb.update_priority_if_present(index=index, generation=generation, priority=priority)


def _update_anchors(
    rb: ConditionalPriorityUpdates, sampler: PrioritizedSampler, data: TensorDictBase, priority: Any
) -> PriorityUpdateResult:
    """Writes the priorities of a Sequence sample's anchors that are still in their slots."""
    if priority is None:
        priority = torch.full((data.numel(),), float(sampler.default_priority))
    index, generation, priority, which = anchor_priorities(data, priority, sampler.reduction)
    result = rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    mask = result.updated_mask[which]
    return PriorityUpdateResult.of(mask.flatten(1).all(1) if mask.ndim > 1 else mask)


def submit(
    rb: ConditionalPriorityUpdates, index: Any, generation: Any, priority: Any
) -> Future[PriorityUpdateResult]:
    """Queues a conditional update; see :mod:`.background`."""
    name = "submit_update_priority_if_present"
    rb._check_updatable(name)
    table = rb._table  # None in an ensemble, as is the sampler
    handles_and_priority, arrive = background.copy_to_host(index, generation, priority)

    def update() -> PriorityUpdateResult:
        arrive()
        slots, taken, values = handles_and_priority
        return rb.update_priority_if_present(index=slots, generation=taken, priority=values)

    sampler = rb._priority_sampler
    on_cpu = sampler is not None and sampler.device.type == "cpu"
    is_free = table is not None and not table.writing.is_under_way  # else in a signal handler
    small = on_cpu and is_free and background.is_small(index, generation, priority)
    return background.submit(rb, name, update, small)
