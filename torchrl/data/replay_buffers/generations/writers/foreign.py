"""Writes through a writer that is not simply one of ours.

A user's writer may write slots by itself and stamp all, some or none of them, before the data or
after. The buffer watches which slots advance during the write, and stamps the rest of those that
the writer returns. Where such a write fails, nothing tells how far it came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import ImmutableDatasetWriter, Writer

from ..core.table import SlotGenerations
from ..processes.writing import cleaning_up_after
from .max_value import TensorDictMaxValueWriter
from .ring import RoundRobinWriter
from .stamping import give_default_priority
from .tensordict_ring import TensorDictRoundRobinWriter

# Their writes stamp every slot before its data: nothing to watch.
OUR_WRITERS = (RoundRobinWriter, TensorDictRoundRobinWriter, TensorDictMaxValueWriter)
# Those that stamp every slot by themselves in a compiled region, too.
RING_WRITERS = (
    *(RoundRobinWriter, TensorDictRoundRobinWriter),
    *(torchrl_buffers.RoundRobinWriter, torchrl_buffers.TensorDictRoundRobinWriter),
)


def watched(write: Callable[[], Any], table: SlotGenerations, writer: Writer) -> Any:
    """Makes a write through any other writer, under the lock of the table.

    Args:
        write (Callable[[], Any]): the write; what it returns is returned.
        table (SlotGenerations): the table of the storage.
        writer (Writer): the writer.
    """
    try:
        with table.writing.watched():
            index = write()
            if index is not None:
                stamp_rest(table, index)
            return index
    except BaseException as error:
        with cleaning_up_after(error):
            if not _stamps_first(writer):
                table.advance_written()
                give_default_priority(table, torch.arange(table.layout.length))
        raise


def stamp_rest(table: SlotGenerations, index: Any) -> None:
    """Stamps what a watched write left out, with the default priority; else nothing.

    Args:
        table (SlotGenerations): the table of the storage.
        index: the slots that the writer returned, or with ``ndim > 1`` the coordinates of their
            cells; -1 is a row that it rejected.
    """
    if table.writing.is_watched:
        slots = torch.as_tensor(index)
        slots = slots.reshape(-1) if slots.ndim < 2 else slots[..., 0].unique()
        rest = table.writing.unadvanced(slots[slots >= 0])
        if rest.numel():
            table.advance(rest)
            give_default_priority(table, rest)


def _stamps_first(writer: Writer) -> bool:
    """Whether what a failed write may have touched is stamped, or it touches nothing at all."""
    if isinstance(writer, ImmutableDatasetWriter):
        return True
    for name in ("add", "extend", "write_at"):
        owners = [cls for cls in type(writer).__mro__ if name in vars(cls)]
        if owners and owners[0] not in OUR_WRITERS:
            return False
    return True
