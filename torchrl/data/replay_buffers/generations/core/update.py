"""The conditional update: handles are checked, the live ones found, their priorities written.

:func:`checked` validates all that came, before anything changes. :func:`write_live` then compares
the stamps and writes the priorities of the handles that are live, in one hold of the table's lock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torchrl.data.replay_buffers import PrioritizedSampler
from torchrl.data.replay_buffers.utils import _reduce

from ..layout.flat import UPDATE, Handles
from ..layout.index import native_array
from .table import SlotGenerations
from .trees import write_priority


class Update(NamedTuple):
    """A conditional update that may be made: everything that came, validated."""

    handles: Handles
    priority: torch.Tensor
    """``[N]``, or ``[]`` if one is for all, in the sampler's dtype and on its device."""
    highest: float
    """The largest of them; 0.0 if there are none."""


def checked(
    table: SlotGenerations,
    sampler: PrioritizedSampler,
    index: Any,
    generation: Any,
    priority: Any,
    dim_extend: int,
) -> Update:
    """Validates an update; the caller holds the lock. Changes nothing.

    Raises:
        TypeError: see :meth:`~..buffers.ReplayBuffer.update_priority_if_present`.
        ValueError: see there.
    """
    handles = table.layout.handles(index, generation)
    priority = table.layout.paired(priority, handles.shape, dim_extend)
    values, highest = checked_priority(priority, handles.leaves.numel(), sampler)
    return Update(handles, values, highest)


def write_live(
    table: SlotGenerations, sampler: PrioritizedSampler, update: Update
) -> tuple[torch.Tensor, int | torch.Tensor]:
    """Writes the priorities of the handles that are live; the caller holds the lock.

    Of several rows with the same leaf, the last wins.

    Returns:
        The mask of the live handles, bool in the shape of the call, and how many they are, on
        the device of the trees if that is no CPU: to look at it would wait for it.
    """
    (leaves, taken, shape, device), priority, highest = update
    live, all_live = table.live(table.layout.slots_of(leaves), taken)
    num_live: int | torch.Tensor = live.numel()
    written = live
    if not priority.is_cpu:  # a parallel scatter has no last row
        written, all_live = live & last_rows(leaves.masked_fill(~live, -1)), False
        num_live = live.sum()
    if not all_live:
        rows = written.nonzero().view(-1)
        leaves = leaves.index_select(0, rows.to(leaves.device))
        if priority.ndim:
            priority = priority.index_select(0, rows.to(priority.device))
        if priority.is_cpu:
            num_live = rows.numel()
    if leaves.numel():
        leaves = leaves if leaves.is_cpu else leaves.to(priority.device)
        write_priority(sampler, leaves, priority, highest, table.storage)
    if live.shape != shape or live.device != device:
        live = live.reshape(shape).to(device)
    return live, num_live


def last_rows(values: torch.Tensor) -> torch.Tensor:
    """Returns which rows of ``values`` (``[N]``) no later row repeats: bool ``[N]``."""
    distinct, which = torch.unique(values, return_inverse=True)
    rows = torch.arange(values.numel(), device=values.device)
    last = torch.zeros_like(distinct).scatter_reduce_(0, which, rows, "amax")
    return last[which] == rows


def checked_priority(
    priority: Any, rows: int, sampler: PrioritizedSampler, name: str = UPDATE
) -> tuple[torch.Tensor, float]:
    """Returns priorities in the sampler's dtype and on its device, and the largest of them.

    A leaf of the tree is ``(p + eps) ** alpha``; every sum of leaves must stay a finite number.

    Args:
        priority: one number per record, or one for all.
        rows (int): how many records.
        sampler (PrioritizedSampler): the sampler that will hold them.
        name (str, optional): the method, in an error.

    Returns:
        ``[rows]``, or ``[]`` where one priority was given for all; and 0.0 for no rows.
    """
    given = values = numbers(priority, name)
    device = sampler.device
    if values.dtype is not sampler.dtype or values.requires_grad or values.device != device:
        values = values.detach().to(device=device, dtype=sampler.dtype)
    if values.numel() == 1:
        values = values.reshape(())
    elif values.ndim and values.shape[0] == rows and (values.numel() or not rows):
        if values.ndim > 1:
            values = values.reshape(rows, values[0].numel() if rows else 1)
            _refuse_first(given, values.isfinite().all(1), "finite", name)
            values = _reduce(values, sampler.reduction, dim=1) if rows else values[:, 0]
    else:
        raise ValueError(
            f"{name} needs one priority per record, or one for all: got "
            f"priority of shape {tuple(given.shape)} for {rows} records."
        )
    if not values.numel():
        return values, 0.0
    if not values.ndim:
        lowest = highest = values.item()
    else:
        low, high = torch.aminmax(values)
        lowest, highest = low.item(), high.item()
    # Any NaN gives NaN, for which no comparison holds.
    if not (lowest >= 0 and highest < torch.inf and _fits(lowest, highest, sampler)):
        largest = torch.finfo(sampler.dtype).max / sampler.max_size
        leaves = (values + sampler._eps).pow(sampler._alpha)
        fits = (values >= 0) & values.isfinite() & (leaves > 0) & (leaves <= largest)
        rule = f"finite, not negative, and (p + eps) ** alpha above 0 and at most {largest:.4g}"
        _refuse_first(given, fits, rule, name)
    return values, highest


# Of the dtypes that a tree can have: the largest number, and twice the smallest normal one.
_LIMITS = {
    dtype: (torch.finfo(dtype).max, 2 * torch.finfo(dtype).tiny)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}


def _fits(lowest: float, highest: float, sampler: PrioritizedSampler) -> bool:
    """Whether the leaves of these priorities, and so all between, are well inside of the range.

    Close to its ends the rounding of the sampler's dtype decides, so there they are computed.
    """
    largest, smallest = _LIMITS[sampler.dtype]
    eps, alpha = sampler._eps, sampler._alpha
    if not 0 < lowest + eps <= highest + eps < largest:
        return False
    try:
        low, high = (lowest + eps) ** alpha, (highest + eps) ** alpha
    except OverflowError:
        return False
    return low > smallest and high * sampler.max_size < 0.5 * largest


def numbers(priority: Any, name: str = UPDATE) -> torch.Tensor:
    """Returns priorities as a tensor of their own dtype and shape, which is real."""
    is_tensor = isinstance(priority, torch.Tensor)
    if is_tensor and priority.layout is not torch.strided:
        raise TypeError(f"{name}: priority must be a dense tensor: got layout {priority.layout}.")
    if is_tensor and priority.is_floating_point():
        return priority
    try:
        given = torch.as_tensor(native_array(priority))
        if given.is_floating_point() and not hasattr(priority, "dtype"):  # Python's own floats
            given = torch.as_tensor(priority, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(f"{name}: priority must be numbers: got {priority!r}.") from err
    if given.dtype is torch.bool or given.is_complex():
        raise TypeError(f"{name}: priority must be real numbers: got dtype {given.dtype}.")
    return given


def _refuse_first(given: torch.Tensor, fits: torch.Tensor, rule: str, name: str) -> None:
    """Raises for the first row that does not fit, with the value that came."""
    if bool(fits.all()):
        return
    row = int((~fits).reshape(-1).to(torch.uint8).argmax())
    where = f"priority[{row}]" if fits.ndim else "priority"
    came = given.reshape(fits.numel(), -1)[row].squeeze().tolist()
    raise ValueError(f"{name}: {where} must be {rule}: got {came}.")
