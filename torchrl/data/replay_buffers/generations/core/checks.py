"""What a conditional update and a restore take, checked before anything changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    Sampler,
    Storage,
    TensorStorageCheckpointer,
)
from torchrl.data.replay_buffers.utils import _reduce

from .index import integer_tensor, native_array, slot_index
from .layout import shape_of_records
from .priorities import samplers_on


def checked_handles(
    index: Any, generation: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Size, torch.device]:
    """Returns slots and stamps, int64 ``[N]`` each, and shape and device of the result's mask."""
    if (
        isinstance(index, torch.Tensor)
        and isinstance(generation, torch.Tensor)
        and index.ndim == 1
        and index.shape == generation.shape
        and index.dtype is generation.dtype is torch.int64
        and index.layout is generation.layout is torch.strided
    ):  # as samples give them
        return index, generation, index.shape, index.device
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
    if values.ndim == 1:
        return values
    if not values.ndim:
        return values.reshape(1)
    rows = values.reshape(values.shape[0], values[0].numel() if values.shape[0] else 1)
    if not rows.shape[1] or not bool((rows == rows[:, :1]).all()):
        raise ValueError(
            f"update_priority_if_present() needs one {name} per record: got shape "
            f"{tuple(values.shape)} whose trailing dimensions differ within a row. For a "
            "one-dimensional storage dim 0 enumerates the records."
        )
    return rows[:, 0]


def checked_priority(
    priority: Any, rows: int, sampler: PrioritizedSampler
) -> tuple[torch.Tensor, float]:
    """Returns priorities in the sampler's dtype and on its device, and the largest of them.

    A leaf of the tree is ``(p + eps) ** alpha``; every sum of leaves must stay a finite number.

    Args:
        priority: one number per record, or one for all.
        rows (int): how many records.
        sampler (PrioritizedSampler): the sampler that will hold them.

    Returns:
        ``[rows]``, or ``[]`` where one priority was given for all; and 0.0 for no rows.
    """
    given = values = numbers(priority)
    device = sampler.device
    if values.dtype is not sampler.dtype or values.requires_grad or values.device != device:
        values = values.detach().to(device=device, dtype=sampler.dtype)
    if values.numel() == 1:
        values = values.reshape(())
    elif values.ndim and values.shape[0] == rows and (values.numel() or not rows):
        if values.ndim > 1:
            values = values.reshape(rows, values[0].numel() if rows else 1)
            _refuse_first(given, values.isfinite().all(1), "finite")
            values = _reduce(values, sampler.reduction, dim=1) if rows else values[:, 0]
    else:
        raise ValueError(
            "update_priority_if_present() needs one priority per record, or one for all: got "
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
        _refuse_first(given, fits, rule)
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


def numbers(priority: Any) -> torch.Tensor:
    """Returns priorities as a tensor of their own dtype and shape, which is real."""
    is_tensor = isinstance(priority, torch.Tensor)
    if is_tensor and priority.layout is not torch.strided:
        raise TypeError(
            "update_priority_if_present(): priority must be a dense tensor: got layout "
            f"{priority.layout}."
        )
    if is_tensor and priority.is_floating_point():
        return priority
    try:
        given = torch.as_tensor(native_array(priority))
        if given.is_floating_point() and not hasattr(priority, "dtype"):  # Python's own floats
            given = torch.as_tensor(priority, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(
            f"update_priority_if_present(): priority must be numbers: got {priority!r}."
        ) from err
    if given.dtype is torch.bool or given.is_complex():
        raise TypeError(
            f"update_priority_if_present(): priority must be real numbers: got dtype {given.dtype}."
        )
    return given


def _refuse_first(given: torch.Tensor, fits: torch.Tensor, rule: str) -> None:
    """Raises for the first row that does not fit, with the value that came."""
    if bool(fits.all()):
        return
    row = int((~fits).reshape(-1).to(torch.uint8).argmax())
    where = f"priority[{row}]" if fits.ndim else "priority"
    came = given.reshape(fits.numel(), -1)[row].squeeze().tolist()
    raise ValueError(f"update_priority_if_present(): {where} must be {rule}: got {came}.")


def check_fits(storage: Storage, sampler: Sampler, state: dict[str, Any]) -> None:
    """Makes sure that a buffer's state is of the buffer's own capacity.

    Args:
        storage (Storage): of the buffer.
        sampler (Sampler): the one that will load the state of the sampler.
        state (dict): of a buffer; for what a learner keeps there see :func:`check_learner_fits`.

    Raises:
        ValueError: if not: TorchRL would fail halfway, or write past the end of its tree.
    """
    records = state["_storage"].get("_storage")
    shape = _shape_of(records)
    _check_capacity(storage, shape, _slots_of(state["_writer"].get("_generation"), storage))
    if isinstance(sampler, PrioritizedSampler):
        _check_tree(sampler, state["_sampler"])
    slots = min([storage.max_size, *(tree.max_size for tree in samplers_on(storage))])
    if isinstance(records, list) and len(records) > slots:
        raise ValueError(_OTHER_CAPACITY.format("records", len(records), slots))


def check_learner_fits(sampler: Sampler | None, state: dict[str, Any] | None) -> None:
    """The same for the private sampler of an asynchronous learner; with no state it begins anew."""
    if isinstance(sampler, PrioritizedSampler) and state:
        _check_tree(sampler, state["sampler"])


def _check_tree(sampler: PrioritizedSampler, saved: dict[str, Any]) -> None:
    """Compares the tree of a sampler's saved state with the sampler's own."""
    tree = saved.get("_sum_tree")
    if tree is not None:
        _check_tree_size(sampler, tree.size)
    elif _is_saved_by_torchrl(sampler):
        raise ValueError(_NO_PRIORITIES.format(type(sampler).__name__))


def _check_tree_size(sampler: PrioritizedSampler, leaves: int) -> None:
    if leaves != sampler.max_size:
        raise ValueError(_OTHER_CAPACITY.format("priorities", leaves, sampler.max_size))


def check_dump_fits(storage: Storage, sampler: Sampler, path: Path, member: str = "") -> None:
    """The same for a dump in the folder ``path``, or for the ``member`` of an ensemble there."""
    shape = None
    plain = type(storage.checkpointer) is TensorStorageCheckpointer  # others reshape the records
    if plain and (path / "storage" / member / "meta.json").exists():
        shape = json.loads((path / "storage" / member / "meta.json").read_text()).get("shape")
        shape = json.loads(shape) if isinstance(shape, str) else shape
    metadata = json.loads((path / "writer" / member / "metadata.json").read_text())
    saved = metadata.get("generation_shape", metadata.get("max_value_generation_shape"))
    _check_capacity(storage, shape, saved[0] if saved and storage.max_size <= 2**20 else None)
    tree = path / "sampler" / member / "sampler_metadata.json"
    if isinstance(sampler, PrioritizedSampler) and not tree.exists():
        if _is_saved_by_torchrl(sampler):
            raise ValueError(_NO_PRIORITIES.format(type(sampler).__name__))
    elif isinstance(sampler, PrioritizedSampler):
        leaves = json.loads(tree.read_text()).get("_max_capacity")
        if leaves is not None:
            _check_tree_size(sampler, int(leaves))


_OTHER_CAPACITY = (
    "The checkpoint has {} for {} slots: this buffer has {}. Build the buffer with the capacity of "
    "the checkpoint."
)

_NO_PRIORITIES = (
    "The checkpoint has no priorities for a sampler of the buffer's own: this buffer has a {}. "
    "Load it into a buffer that is built as the saved one was."
)


def _is_saved_by_torchrl(sampler: PrioritizedSampler) -> bool:
    """Whether its state is what TorchRL's samplers save; a user's may save anything, or nothing."""
    return type(sampler).load_state_dict in (
        PrioritizedSampler.load_state_dict,
        PrioritizedSliceSampler.load_state_dict,
    )


def _shape_of(records: Any) -> torch.Size | None:
    """The shape of the first of some saved records' tensors."""
    if isinstance(records, dict):
        return next(filter(None, map(_shape_of, records.values())), None)
    return records.shape if isinstance(records, torch.Tensor) else None


def _slots_of(saved: torch.Tensor | None, storage: Storage) -> int | None:
    # TorchRL's counters of more than 2**20 slots, and those of lists, grow with the records.
    if saved is None or (storage.max_size > 2**20 and saved.numel() <= storage.max_size):
        return None
    return saved.numel()


def _check_capacity(storage: Storage, shape: Any, stamps: int | None) -> None:
    """Compares the shape of saved records and the number of saved stamps with the storage."""
    capacity = storage.max_size
    if storage.ndim > 1:
        capacity = _check_grid(storage, shape)
    for what, slots in (("records", shape[0] if shape else None), ("stamps", stamps)):
        if slots is not None and slots != capacity:
            raise ValueError(_OTHER_CAPACITY.format(what, slots, capacity))


def _check_grid(storage: Any, shape: Any) -> int:
    """Compares the cells, and returns how many slots the storage has or will have."""
    if shape is None:
        if storage.initialized:
            raise ValueError(
                f"The checkpoint has no records: with ndim={storage.ndim} it can't be loaded into "
                "a buffer that has some. Call empty()."
            )
        return 0
    if len(shape) < storage.ndim:
        raise ValueError(
            f"The checkpoint has records of shape {tuple(shape)}: this buffer has ndim="
            f"{storage.ndim}. Load it into a buffer with ndim={len(shape)}."
        )
    cells = torch.Size(shape[: storage.ndim]).numel()
    if cells != storage.max_size:
        raise ValueError(_OTHER_CAPACITY.format("records", cells, storage.max_size))
    if storage.initialized and shape_of_records(storage) != torch.Size(shape[: storage.ndim]):
        raise ValueError(
            f"The checkpoint has records of shape {tuple(shape[: storage.ndim])}: this buffer has "
            f"{tuple(shape_of_records(storage))}. Load it into a new buffer."
        )
    return int(shape[0])
