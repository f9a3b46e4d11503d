"""What a conditional update accepts: handles and priorities, checked before anything changes."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data.replay_buffers import PrioritizedSampler
from torchrl.data.replay_buffers.utils import _reduce

from .index import integer_tensor, native_array, slot_index


def checked_handles(
    index: Any, generation: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Size, torch.device]:
    """Returns slots and stamps, int64 ``[N]`` each, and shape and device of the result's mask."""
    name = "update_priority_if_present(): "
    index = slot_index(index, name + "index")
    mask_shape = index.shape[:1]
    slots = _first_of_row(index, "index")
    taken = _first_of_row(integer_tensor(generation, name + "generation"), "generation")
    if taken.numel() != slots.numel():
        raise ValueError(
            "update_priority_if_present() needs one generation per record: got "
            f"{taken.numel()} generations for {slots.numel()} records."
        )
    return slots, taken, mask_shape, index.device


def _first_of_row(values: torch.Tensor, name: str) -> torch.Tensor:
    """Drops trailing dimensions, along which a row must repeat one value: int64 ``[N]``."""
    if values.ndim < 2:
        return values.reshape(-1)
    rows = values.reshape(values.shape[0], values[0].numel() if values.shape[0] else 1)
    if not rows.shape[1] or not bool((rows == rows[:, :1]).all()):
        raise ValueError(
            f"update_priority_if_present() needs one {name} per record: got shape "
            f"{tuple(values.shape)} whose trailing dimensions differ within a row. For a "
            "one-dimensional storage dim 0 enumerates the records."
        )
    return rows[:, 0]


def checked_priority(priority: Any, rows: int, sampler: PrioritizedSampler) -> torch.Tensor:
    """Returns the priorities in the sampler's dtype and on its device: ``[N]``, or ``[]`` for all.

    A leaf of the tree is ``(p + eps) ** alpha``; every sum of leaves must stay a finite number.
    """
    given = _numbers(priority)
    values = given.detach().to(device=sampler.device, dtype=sampler.dtype)
    if values.numel() == 1:
        values = values.reshape(())
    elif values.ndim and values.shape[0] == rows:
        values = values.reshape(rows, values[0].numel() if rows else 1)
        if values.shape[1] == 1:
            values = values[:, 0]
        else:
            _refuse_first(given, values, values.isfinite().all(1), "finite")
            values = _reduce(values, sampler.reduction, dim=1)
    else:
        raise ValueError(
            "update_priority_if_present() needs one priority per record, or one for all: got "
            f"priority of shape {tuple(given.shape)} for {rows} records."
        )
    if not values.numel():
        return values
    # The weight grows with the priority, so the bounds of all rows are those of two. NaN gives NaN.
    largest = torch.finfo(sampler.dtype).max / sampler.max_size
    low, high = torch.aminmax(values)
    weights = torch.stack((low, high)).add_(sampler._eps).pow_(sampler._alpha)
    low_weight, high_weight = weights.tolist()
    if not (float(low) >= 0 and low_weight > 0 and high_weight <= largest and high < torch.inf):
        weights = (values + sampler._eps).pow(sampler._alpha)
        fits = (values >= 0) & (weights > 0) & (weights <= largest) & values.isfinite()
        rule = f"finite, not negative, and (p + eps) ** alpha above 0 and at most {largest:.4g}"
        _refuse_first(given, values, fits, rule)
    return values


def _numbers(priority: Any) -> torch.Tensor:
    try:
        given = torch.as_tensor(native_array(priority))
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(
            f"update_priority_if_present(): priority must be numbers: got {priority!r}."
        ) from err
    if given.dtype is torch.bool or given.is_complex():
        raise TypeError(
            f"update_priority_if_present(): priority must be real numbers: got dtype {given.dtype}."
        )
    return given


def _refuse_first(given: torch.Tensor, values: torch.Tensor, fits: torch.Tensor, rule: str) -> None:
    """Raises for the first row that does not fit, with the value that came."""
    if bool(fits.all()):
        return
    row = int((~fits).reshape(-1).to(torch.uint8).argmax())
    where = f"priority[{row}]" if fits.ndim else "priority"
    came = given.reshape(fits.numel(), -1)[row].squeeze().tolist()
    raise ValueError(f"update_priority_if_present(): {where} must be {rule}: got {came}.")
