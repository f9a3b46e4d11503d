"""A table through a restore, which is ordered like a write.

After :func:`prepare_restore` has looked at the stamps that will come, :func:`begin_restore` makes
every handle stale, then the records and priorities change, then :func:`restore` puts the stamps
back that came with them. A process that is killed anywhere in it
leaves no handle live on a record that is not its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrl.data.replay_buffers import CompressedListStorage, TensorStorage

from .table import SlotGenerations


def saved_stamps(table: SlotGenerations) -> dict[str, Any]:
    """Returns what a checkpoint needs: a copy of the stamps, the lineage and the live stamps.

    Some storages save their records as an alias, so that these may run on before they are loaded.
    ``_live_generation`` aliases the stamps in the same way: where it differs from the copy at load,
    the record is no longer the one that the copy speaks of.
    """
    with table.lock:
        stamps = table.stamps
        if not table.is_settled:
            stamps = stamps[:0]  # never written
        state = {"_generation": stamps.clone(), "_lineage": table.history.lineage}
        if isinstance(table.storage, (TensorStorage, CompressedListStorage)):
            state["_live_generation"] = stamps
    return state


def prepare_restore(table: SlotGenerations, state: Mapping[str, Any]) -> None:
    """Makes sure that the stamps of a checkpoint can come, and finds the records that ran on.

    The caller holds the lock until :func:`restore` has taken over the stamps.

    Args:
        table (SlotGenerations): the table.
        state (Mapping): what :func:`saved_stamps` gave.

    Raises:
        ValueError: if the stamps do not fit the table.
        OverflowError: if the counters are used up.
    """
    _compare(table, state)
    table.history.check_room(_fitted(table, state.get("_generation")))


def begin_restore(table: SlotGenerations) -> None:
    """Makes every handle stale before the records of a checkpoint come.

    So a process that is killed while they come leaves no handle live on a foreign record.
    """
    if bool((table.stamps >= 0).any()):
        retire(table)
    table.history.is_restoring = True


def restore(table: SlotGenerations, state: Mapping[str, Any]) -> None:
    """Takes over the stamps of a checkpoint whose records the storage has just loaded.

    - A table that was never written takes stamps and lineage: handles from before the checkpoint
      work.
    - The same lineage: takes the stamps. Records that came back bring their handles back.
    - Another lineage, or no stamps: written slots jump to the base; all handles are stale.

    In each case a new base is drawn, so that no later write repeats a stamp of another branch.

    Args:
        table (SlotGenerations): the table.
        state (Mapping): what :func:`saved_stamps` gave; ``_generation`` alone (TorchRL's own
            checkpoints) or nothing at all are another lineage.

    Raises:
        ValueError: if the stamps do not fit the table. Nothing has changed then.
    """
    with table.lock:
        history = table.history
        if not history.is_restoring:
            _compare(table, state)
        history.is_restoring = False
        table.reach(table.layout.length)
        saved = _fitted(table, state.get("_generation"))
        history.put_back(saved, state.get("_lineage"), table.layout.length)


def _compare(table: SlotGenerations, state: Mapping[str, Any]) -> None:
    """Finds the records that ran on since a state was taken, by the stamps that it aliases.

    They may be the stamps of this very table, which are about to change.
    """
    saved, live = (_fitted(table, state.get(key)) for key in ("_generation", "_live_generation"))
    table.history.ran_on = None if live is None or saved is None else live != saved


def _fitted(table: SlotGenerations, saved: torch.Tensor | None) -> torch.Tensor | None:
    return None if saved is None else table.counters.fitted(saved, table.layout.slots)


def retire(table: SlotGenerations) -> None:
    """Makes every handle stale that was ever taken, of this table or another.

    Raises:
        OverflowError: if the counters are used up. Nothing has changed then.
    """
    with table.lock:
        table.reach(0)
        table.history.retire()
