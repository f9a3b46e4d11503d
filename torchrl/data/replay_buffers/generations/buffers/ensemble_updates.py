"""Conditional updates of an ensemble: each priority goes to the member that its handle names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase, is_tensor_collection

from ..core.result import PriorityUpdateResult
from ..core.update import numbers
from ..layout.flat import UPDATE
from ..writers.stamping import GENERATION_KEY
from . import updates
from .ensemble_handles import Handles

if TYPE_CHECKING:
    from .ensemble import ReplayBufferEnsemble


def update_handles(
    ensemble: ReplayBufferEnsemble, index: Any, generation: Any, priority: Any
) -> PriorityUpdateResult:
    """Writes the priorities of handles whose records are still in their slots."""
    handles = Handles(index, generation, len(ensemble._rbs))
    values = handles.rows_of(numbers(priority))
    return _update(ensemble, handles, lambda _, rows: values[rows] if values.ndim else values)


def update_sample(ensemble: ReplayBufferEnsemble, data: TensorDictBase) -> PriorityUpdateResult:
    """Writes the priorities of a sample's records that are still in their slots."""
    name = "update_tensordict_priority_if_present()"
    if not is_tensor_collection(data):
        raise TypeError(f"{name} needs a tensordict: got {type(data).__name__}.")
    for key in ("index", GENERATION_KEY):
        if data.get(key, None) is None:
            raise KeyError(
                f"{name} needs {key!r} in the sample: got {sorted(map(str, data.keys()))}. "
                "Either it was sampled while a member did not track, or a select() dropped the "
                "key."
            )
    handles = Handles(data.get("index"), data.get(GENERATION_KEY), len(ensemble._rbs))

    def priority(rb: Any, rows: torch.Tensor) -> Any:
        if not rb._is_tensordict:
            raise RuntimeError(
                f"{name} needs tensordict buffers: member {ensemble._rbs.index(rb)} is a "
                f"{type(rb).__name__}. Use update_priority_if_present()."
            )
        given = data.get(rb.priority_key, None)
        if given is None:
            return rb._priority_sampler.default_priority
        values = handles.rows_of(given)
        return values[rows] if values.ndim else values

    return _update(ensemble, handles, priority)


def _update(
    ensemble: ReplayBufferEnsemble,
    handles: Handles,
    priority: Callable[[Any, torch.Tensor], Any],
) -> PriorityUpdateResult:
    """Validates the part of each member, and then updates all of them under their locks."""
    ensemble._refuse_in_a_write(UPDATE)
    mask = torch.zeros(handles.ids.numel(), dtype=torch.bool, device=handles.ids.device)
    with ensemble._replay_lock:
        parts = []
        for rb in ensemble._members:
            numbers_of = [i for i, other in enumerate(ensemble._rbs) if other is rb]
            named = torch.tensor(numbers_of, device=handles.ids.device)
            rows = torch.isin(handles.ids, named).nonzero()[:, 0]
            if rows.numel():
                part = {"index": handles.slots[rows], "generation": handles.stamps[rows]}
                part["priority"] = priority(rb, rows)
                _check(rb, numbers_of[0], rows, part)
                parts.append((rb, rows, part))
        for rb, rows, part in parts:
            mask[rows] = rb.update_priority_if_present(**part).updated_mask.to(mask.device)
    return PriorityUpdateResult(updated_mask=mask.reshape(handles.shape), batch_size=handles.shape)


def _check(rb: Any, number: int, rows: torch.Tensor, part: dict[str, Any]) -> None:
    updates.needed_parts(rb, f"update of member {number}: {UPDATE[:-2]}")
    try:
        updates.check(rb._table, rb, **part)
    except (TypeError, ValueError) as error:
        some = f"{rows[:8].tolist()}{' and more' if rows.numel() > 8 else ''}"
        raise type(error)(
            f"{error} (Rows as counted within the handles of member {number}, which are rows "
            f"{some} of the call.)"
        ) from error
