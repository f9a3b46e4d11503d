"""A write through a buffer: records, their stamps and their priorities in one hold of the lock.

The writer stamps the slots before it touches the data, see ``writers``. What the buffer adds is
that the priorities follow in the same hold: the writer calls ``mark_update`` of every buffer on the
storage, which gives the records the default priority, and a tensordict buffer writes the priorities
that records bring under its ``priority_key``.

Where nothing but TorchRL's own code stands between a buffer and its ring writer, the few steps of
TorchRL's ``extend`` and ``add`` are taken here. A transform, a user's method, a consuming sampler
or another writer go TorchRL's way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection, unravel_key
from torch.compiler import is_compiling
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import ConsumingSampler, PrioritizedSampler

from ..core.table import SlotGenerations
from ..core.trees import write_priority
from ..core.update import checked_priority, last_rows
from ..processes.holding import locked
from ..processes.writing import cleaning_up_after
from ..writers.foreign import OUR_WRITERS, RING_WRITERS, stamp_rest, watched
from ..writers.records import check_records
from ..writers.ring import RoundRobinWriter
from ..writers.stamping import give_default_priority, row_generations, without_stamps
from ..writers.tensordict_ring import TensorDictRoundRobinWriter
from .torchrls import is_torchrls

if TYPE_CHECKING:
    from .conditional import ConditionalPriorityUpdates

_RING = (RoundRobinWriter, TensorDictRoundRobinWriter)

# The methods of a buffer that TorchRL's calls on the way to its writer, and after it.
_STEPS = {
    "add": ("add", "_add", "_set_index_in_td", "update_tensordict_priority", "_get_priority_item"),
    "extend": ("extend", "_extend", "_set_index_in_td"),
}

ENABLE_TRACKING = (
    "Build the buffer with track_generations=True, or pass "
    "writer=generations.RoundRobinWriter(track_generations=True)."
)


def write(
    rb: ConditionalPriorityUpdates,
    name: str,
    data: Any,
    torchrls: Callable[..., Any],
    return_generation: bool,
    **kwargs: Any,
) -> Any:
    """Runs ``add`` or ``extend`` as a single critical section.

    Args:
        rb (ConditionalPriorityUpdates): the buffer.
        name (str): which of both.
        data: the records.
        torchrls (Callable[..., Any]): TorchRL's own method.
        return_generation (bool): whether to return the records' stamps, too.
        kwargs: what TorchRL's method takes beside the records.
    """
    if return_generation and not rb._writer.tracks_generations:
        raise RuntimeError(f"{name}(return_generation=True) needs stamps. {ENABLE_TRACKING}")
    table = rb._table
    if table is None:
        return torchrls(data, **kwargs)
    if is_compiling() and type(rb._writer) in RING_WRITERS:  # takes no lock
        index = torchrls(data, **kwargs)
        return (index, _stamps(table, index)) if return_generation else index
    return locked(rb, _write, rb, name, data, torchrls, return_generation, kwargs)


def _write(
    table: SlotGenerations,
    rb: ConditionalPriorityUpdates,
    name: str,
    data: Any,
    torchrls: Callable[..., Any],
    return_generation: bool,
    kwargs: dict[str, Any],
) -> Any:
    table.writing.refuse(f"{name}()")
    brings = _brought(rb, data, kwargs)
    if brings is not None:
        checked_priority(brings.reshape(-1), brings.numel(), rb._sampler, f"{name}()")
    writer = rb._writer
    before = getattr(writer, "_write_count", 0)
    # A user's writer or transform may write within a write, and tell nobody.
    is_ours = type(writer) in OUR_WRITERS and not len(rb._transform)
    with table.writing.whole if is_ours else rb._in_write, rb._in_write:
        try:
            if _is_direct(rb, name, data, brings, kwargs):
                index = _take_steps(rb, name, data, brings)
            elif type(writer) in OUR_WRITERS:
                index = torchrls(data, **kwargs)
            else:
                index = watched(lambda: torchrls(data, **kwargs), table, writer)
        except BaseException as error:
            with cleaning_up_after(error):
                _forget_written(table, writer, before)
            raise
        if return_generation:
            index = -1 if index is None else index  # the writer rejected the record
            return index, _stamps(table, index)
        return index


def _brought(
    rb: ConditionalPriorityUpdates, data: Any, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """The priorities that records bring, if they are to be written and no transform comes first."""
    if (
        not rb._is_tensordict
        or kwargs.get("update_priority") is False
        or not isinstance(rb._sampler, PrioritizedSampler)
        or not isinstance(data, TensorDictBase)
    ):
        return None
    brings = data.get(rb.priority_key, None)
    return brings if isinstance(brings, torch.Tensor) and not len(rb._transform) else None


def _is_direct(
    rb: ConditionalPriorityUpdates,
    name: str,
    data: Any,
    brings: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> bool:
    """Whether the steps of TorchRL's method may be taken one by one."""
    given = kwargs.get("update_priority")
    if rb._is_tensordict:
        usual = isinstance(data, TensorDictBase) and (given is None or rb._sync)
        if name == "add":  # where TorchRL writes a priority twice, or one per step
            again = getattr(rb._sampler, "_max_priority_within_buffer", False)
            usual = usual and not again and (brings is None or not data.ndim)
    else:
        usual = given is None and not (is_tensor_collection(data) and name == "add")
    return (
        usual
        and data is not None
        and type(rb._writer) in _RING
        and name not in vars(rb._writer)
        and not len(rb._transform)
        and rb.dim_extend == 0
        and rb._storage.ndim == 1
        and not isinstance(rb._sampler, ConsumingSampler)
        and is_torchrls(rb, *_STEPS[name])
    )


def _take_steps(
    rb: ConditionalPriorityUpdates, name: str, data: Any, brings: torch.Tensor | None
) -> Any:
    """Writes the records, tells the sampler, and writes the priorities that they bring."""
    # A tensordict buffer leaves the records that it was given as they are.
    put = partial(rb._writer.put, name) if rb._is_tensordict else getattr(rb._writer, name)
    index = put(data)
    getattr(rb._sampler, name)(index)
    if brings is not None:
        slots = torch.as_tensor(index).reshape(-1)
        rb.update_priority(slots, brings.reshape(1, -1) if name == "add" else brings)
    return index


def _forget_written(table: SlotGenerations, writer: Any, before: int) -> None:
    """Makes the records of a call stale that failed after its ring writer had written them."""
    written = getattr(writer, "_write_count", 0) - before
    if isinstance(writer, torchrl_buffers.RoundRobinWriter) and written > 0:
        ring = table.layout.slots
        slots = (writer._cursor - 1 - torch.arange(min(written, ring))) % ring
        table.advance(slots)
        give_default_priority(table, slots)


def _stamps(table: SlotGenerations, index: Any) -> torch.Tensor:
    """The stamps of a write's rows, also where a transform held all rows back: ``[0]``."""
    index = torch.as_tensor(index)
    return row_generations(table, index if index.numel() else index.reshape(-1)[:0])


def write_brought(
    table: SlotGenerations, rb: ConditionalPriorityUpdates, index: torch.Tensor, priority: Any
) -> None:
    """Writes the priorities that the records of the write under way bring.

    Args:
        table (SlotGenerations): the table, whose lock the caller holds.
        rb (ConditionalPriorityUpdates): the buffer.
        index (torch.Tensor): what the write returned, ``[N]`` or coordinates ``[N, ndim]``. A
            row that the call itself overwrote, or that the writer rejected, has no record.
        priority: one per row, or several, which are reduced.
    """
    stamp_rest(table, index)
    sampler, layout = rb._sampler, table.layout
    leaves = layout.rows(index)
    priority = layout.paired(priority, leaves.shape, rb.dim_extend)
    values, highest = checked_priority(priority, leaves.numel(), sampler, "A write")
    stays = leaves >= 0
    if leaves.numel() > layout.slots * layout.width:
        stays &= last_rows(leaves)
    leaves, values = leaves[stays], values[stays.to(values.device)] if values.ndim else values
    if leaves.numel():
        write_priority(sampler, leaves.to(values.device), values, highest, table.storage)


def assign(
    table: SlotGenerations,
    rb: ConditionalPriorityUpdates,
    index: Any,
    value: Any,
    torchrls: Callable[[Any, Any], None],
) -> None:
    """Puts records into the slots of ``rb[index] = value``, with the default priority."""
    name = "rb[index] = records"
    table.writing.refuse(name)
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    slots = table.layout.assigned(index, value, rb.dim_extend)
    stored = without_stamps(value)
    is_range = isinstance(index, (int, slice))
    is_plain = is_range or isinstance(index, (torch.Tensor, np.ndarray, list))
    if is_plain and rb.dim_extend == 0 and not len(rb._transform):
        casts = is_range
        check_records(rb._storage, stored, slots.shape, name, casts=casts)
    with table.writing.marker:
        table.writing.slots = slots
        table.advance(slots)
        try:
            torchrls(index, stored)
        except BaseException as error:
            with cleaning_up_after(error):
                give_default_priority(table, slots)
            raise
        finally:
            table.writing.slots = None
        give_default_priority(table, slots)


def patch(table: SlotGenerations, index: Any, generation: Any, torchrls: Callable[..., Any]) -> Any:
    """Patches fields of the records that are still in their slots."""
    table.writing.refuse("update_if_present()")
    index, generation = table.layout.inside(index, generation)
    with table.writing.marker:
        return torchrls(index=index, generation=generation)


def names_field(index: Any) -> bool:
    """Whether ``rb[index] = ...`` patches a field of all records instead of writing records."""
    return isinstance(index, str) or (isinstance(index, tuple) and bool(unravel_key(index)))


def empty(
    table: SlotGenerations,
    rb: ConditionalPriorityUpdates,
    torchrls: Callable[..., None],
    empty_write_count: bool,
) -> None:
    """Empties a buffer."""
    table.writing.refuse("empty()")
    with table.writing.marker:
        if not isinstance(rb._writer, torchrl_buffers.RoundRobinWriter):
            table.advance_written()
        torchrls(empty_write_count=empty_write_count)
        rb._learner.forget()
