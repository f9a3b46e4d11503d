"""Writes of a sampler's priority tree, of rows that were validated before.

TorchRL's ``update_priority`` looks through the rows again, one small operation after the other,
which takes three times as long as the two writes. Where a sampler does something of its own, or its
tree is not the compiled one, it is called all the same. The lock of the table guards the tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, Storage

# By sampler: its largest priority, eps and alpha, the leaf that they make, the priority's value.
_defaults: WeakKeyDictionary[PrioritizedSampler, tuple[Any, tuple[float, float], float, float]] = (
    WeakKeyDictionary()
)


def samplers_on(storage: Storage) -> Iterator[PrioritizedSampler]:
    """Yields the priority samplers of the buffers on a storage, and of asynchronous learners."""
    for entity in storage._attached_entities:
        for name in ("_sampler", "_prioritized_sampler"):
            sampler = vars(entity).get(name)
            if isinstance(sampler, PrioritizedSampler):
                yield sampler


def check_leaves(storage: Storage, *samplers: Sampler | None) -> None:
    """Refuses a tree without a leaf for every slot: the compiled one checks no bounds.

    Args:
        storage (Storage): the storage.
        samplers (Sampler or None): any; those without priorities have no tree.

    Raises:
        ValueError: for a tree smaller than the storage, or than the records of a list without end.
    """
    slots = storage.max_size
    if slots == torch.iinfo(torch.int64).max:  # it may grow up to the end of the tree
        slots = len(storage)
    for sampler in samplers:
        if isinstance(sampler, PrioritizedSampler) and sampler.max_size < slots:
            raise ValueError(
                "A tracking buffer needs a priority sampler with a leaf for every slot: got "
                f"max_capacity={sampler.max_size} for a storage of {slots} slots."
            )


def past_the_end(leaves: int, slot: int) -> ValueError:
    """Returns the error for a record that has no leaf, in a tree of ``leaves``."""
    return ValueError(
        f"A priority sampler over this storage holds {leaves} slots: got a record for slot {slot}. "
        f"Give the sampler a larger max_capacity, or the storage a max_size of {leaves}."
    )


def write_priority(
    sampler: PrioritizedSampler,
    slots: torch.Tensor,
    priority: torch.Tensor,
    highest: float,
    storage: Storage,
) -> None:
    """Writes priorities that :func:`~.checks.checked_priority` returned, or some of them.

    Args:
        sampler (PrioritizedSampler): the sampler that owns the tree.
        slots (torch.Tensor): int64 ``[rows]``, at least one, each below the capacity of the tree.
        priority (torch.Tensor): ``[rows]`` or ``[]``, of the sampler's dtype.
        highest (float): no less than any of them.
        storage (Storage): the storage of the slots.
    """
    if not _is_plain(sampler):
        sampler.update_priority(slots, priority, storage=storage)
        return
    leaves = _leaves(sampler, priority)
    _set(sampler, slots, leaves if leaves.ndim else leaves.item())
    known = _highest(sampler)
    # The highest of all may not be among those that were written.
    if highest > known and priority.max().item() > known:
        top, row = priority.max(dim=0)
        sampler._max_priority = (top, slots[row])


def write_default(
    sampler: Sampler, slots: Any, storage: Storage, *, are_leaves: bool = False
) -> None:
    """Gives records the default priority, the largest that there has been.

    Args:
        sampler (Sampler): any sampler; one without priorities takes no notice.
        slots: what ``mark_update`` takes: int, ``[rows]``, or coordinates ``[rows, ndim]``.
        storage (Storage): the storage of the slots.

    Keyword Args:
        are_leaves (bool, optional): whether ``slots`` is known to be int64 ``[rows]``, at least
            one, each below the capacity of the tree, on the CPU. Defaults to False.
    """
    if (
        isinstance(sampler, PrioritizedSampler)
        and _is_plain(sampler)
        and (are_leaves or _are_leaves(slots, sampler._sum_tree.size))
    ):
        if sampler._max_priority[0] is None:
            priority = torch.as_tensor(sampler.default_priority, dtype=sampler.dtype)
            sampler._max_priority = (priority, torch.as_tensor(slots).reshape(-1)[0])
        leaf, _ = _default(sampler)
        _set(sampler, slots, leaf)
    else:
        _refuse_past_the_end(sampler, slots)
        sampler.mark_update(slots, storage=storage)


def keeps_default(sampler: PrioritizedSampler, highest: float) -> bool:
    """Whether priorities up to ``highest`` leave the default priority as it is."""
    return _is_plain(sampler) and highest <= _highest(sampler)


def _highest(sampler: PrioritizedSampler) -> float:
    """The largest priority that there has been; below all numbers if there is none yet."""
    if sampler._max_priority[0] is None:
        return -math.inf
    return _default(sampler)[1]


def _default(sampler: PrioritizedSampler) -> tuple[float, float]:
    """The leaf of the default priority, and this priority: they stay for long, and are kept."""
    highest, exponent = sampler._max_priority[0], (sampler._eps, sampler._alpha)
    known = _defaults.get(sampler)
    if known is None or known[0] is not highest or known[1] != exponent:
        priority = torch.as_tensor(sampler.default_priority, dtype=sampler.dtype)
        known = (highest, exponent, _leaves(sampler, priority).item(), float(highest))
        _defaults[sampler] = known
    return known[2:]


def _set(sampler: PrioritizedSampler, slots: Any, leaves: torch.Tensor | float) -> None:
    # The trees take arrays in half the time of tensors, but look at neither strides nor length.
    if isinstance(slots, torch.Tensor):
        slots = slots.contiguous().numpy()
    values: Any = leaves
    if isinstance(leaves, torch.Tensor):
        values = leaves.detach().contiguous().numpy()
    sampler._sum_tree[slots] = values
    sampler._min_tree[slots] = values


def _leaves(sampler: PrioritizedSampler, priority: torch.Tensor) -> torch.Tensor:
    """``(p + eps) ** alpha`` (Schaul et al. 2015)."""
    return (priority + sampler._eps).pow_(sampler._alpha)


def _is_plain(sampler: PrioritizedSampler) -> bool:
    """Whether a write of the two trees is all that its ``update_priority`` comes to."""
    cls, tree = type(sampler), sampler._sum_tree
    return (
        cls.update_priority is PrioritizedSampler.update_priority
        and cls.mark_update is PrioritizedSampler.mark_update
        and cls.default_priority is PrioritizedSampler.default_priority
        and "update_priority" not in sampler.__dict__
        and not sampler._max_priority_within_buffer
        and tree is not None
        and not hasattr(tree, "device")  # the compiled tree is on the CPU and does not say so
    )


def _refuse_past_the_end(sampler: Sampler, slots: Any) -> None:
    if not isinstance(sampler, PrioritizedSampler) or hasattr(sampler._sum_tree, "device"):
        return
    last = slots
    if isinstance(slots, torch.Tensor):
        if slots.ndim != 1 or not slots.numel():  # coordinates: Grid.fit() has seen to them
            return
        last = int(slots.max())
    if last >= sampler.max_size:
        raise past_the_end(sampler.max_size, last)


def _are_leaves(slots: Any, size: int) -> bool:
    if isinstance(slots, int):
        return 0 <= slots < size
    if not isinstance(slots, torch.Tensor) or slots.ndim != 1 or not slots.numel():
        return False
    if slots.dtype is not torch.int64 or slots.device.type != "cpu":
        return False
    low, high = torch.aminmax(slots)
    return low.item() >= 0 and high.item() < size
