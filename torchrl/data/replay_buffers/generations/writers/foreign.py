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
from torchrl.data.replay_buffers import ImmutableDatasetWriter, Storage, Writer

from ..core.table import SlotGenerations
from .max_value import TensorDictMaxValueWriter
from .ring import (
    RoundRobinWriter,
    StampingWriter,
    TensorDictRoundRobinWriter,
    give_default_priority,
)

# Their writes stamp every slot before its data: nothing to watch.
OUR_WRITERS = (RoundRobinWriter, TensorDictRoundRobinWriter, TensorDictMaxValueWriter)
# Those that stamp every slot by themselves in a compiled region, too.
RING_WRITERS = (
    *(RoundRobinWriter, TensorDictRoundRobinWriter),
    *(torchrl_buffers.RoundRobinWriter, torchrl_buffers.TensorDictRoundRobinWriter),
)


def watched(
    write: Callable[[], Any], table: SlotGenerations, storage: Storage, writer: Writer
) -> Any:
    """Makes a write through any other writer, under the lock of the table.

    Args:
        write (Callable[[], Any]): the write; what it returns is returned.
        table (SlotGenerations): the table of the storage.
        storage (Storage): the storage.
        writer (Writer): the writer.
    """
    late = stamps_late(writer)
    if late:
        own, bump = vars(writer).get("_bump_generation"), writer._bump_generation

        def bump_and_note(index: Any, data: Any) -> None:
            bump(index, data)
            slots = torch.as_tensor(index).reshape(-1)
            table.of(slots)  # brings to the base what it has advanced to less
            table.note(slots)

        writer._bump_generation = bump_and_note
    try:
        with table.noting():
            index = write()
            if index is not None:
                stamp_rest(table, storage, index)
            return index
    except BaseException:
        if not _stamps_first(writer):
            table.advance_written()
            give_default_priority(storage, table.records())
        raise
    finally:
        if late:
            del writer._bump_generation
            if own is not None:  # a write within a write
                writer._bump_generation = own


def stamp_rest(table: SlotGenerations, storage: Storage, index: Any) -> None:
    """Stamps what a watched write left out, with the default priority; else nothing.

    Args:
        table (SlotGenerations): the table of the storage.
        storage (Storage): the storage.
        index: the slots that the writer returned, or with ``ndim > 1`` the coordinates of their
            cells; -1 is a row that it rejected.
    """
    if table.is_noting:
        slots = torch.as_tensor(index)
        slots = slots.reshape(-1) if table.grid is None else slots[..., 0].unique()
        rest = table.unnoted(slots[slots >= 0])
        if rest.numel():
            table.advance(rest)
            give_default_priority(storage, rest)


def stamps_late(writer: Writer) -> bool:
    """Whether this is one of TorchRL's ring writers, which stamp by themselves after the data."""
    return isinstance(writer, torchrl_buffers.RoundRobinWriter) and not isinstance(
        writer, StampingWriter
    )


def _stamps_first(writer: Writer) -> bool:
    """Whether what a failed write may have touched is stamped, or it touches nothing at all."""
    if isinstance(writer, ImmutableDatasetWriter):
        return True
    for name in ("add", "extend", "write_at"):
        owners = [cls for cls in type(writer).__mro__ if name in vars(cls)]
        if owners and owners[0] not in OUR_WRITERS:
            return False
    return True
