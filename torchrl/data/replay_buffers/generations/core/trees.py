"""The priority trees over a storage: their sizes, and writes of rows that were validated before.

TorchRL's ``update_priority`` looks through the rows again, one small operation after the other,
which takes three times as long as the two writes. Where a sampler does something of its own, or
its tree is not the compiled one, it is called all the same. The compiled tree checks no bounds: an
index past its end corrupts memory. The lock of the storage's table guards the trees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, Storage

# By sampler: its largest priority, eps and alpha, and the leaf that they make.
_defaults: WeakKeyDictionary[PrioritizedSampler, tuple[float, float, float, float]] = (
    WeakKeyDictionary()
)
_TORCHRLS_SAMPLE = PrioritizedSampler.sample


class Trees:
    """The priority trees over a storage: of its buffers, and of asynchronous learners.

    Args:
        storage (Storage): the storage.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        # The leaves of the smallest tree over a storage with ndim=1. Guarded by the table's lock.
        self._leaves: int | None = None

    def samplers(self) -> Iterator[PrioritizedSampler]:
        """Yields the priority samplers of the buffers on the storage."""
        for entity in self._storage._attached_entities:
            for name in ("_sampler", "_prioritized_sampler"):
                sampler = vars(entity).get(name)
                if isinstance(sampler, PrioritizedSampler):
                    yield sampler

    def check(self, *samplers: Sampler | None) -> None:
        """Refuses a tree without a leaf for every slot.

        Args:
            samplers (Sampler or None): any, beside those of the buffers on the storage.

        Raises:
            ValueError: for a tree smaller than the storage, or than the records of a list without
                end.
        """
        slots = self._storage.max_size
        if slots == torch.iinfo(torch.int64).max:  # it may grow up to the end of the tree
            slots = len(self._storage)
        for sampler in (*samplers, *self.samplers()):
            if isinstance(sampler, PrioritizedSampler) and sampler.max_size < slots:
                raise ValueError(
                    "A tracking buffer needs a priority sampler with a leaf for every slot: got "
                    f"max_capacity={sampler.max_size} for a storage of {slots} slots."
                )

    def limit(self) -> None:
        """Refuses from now on records past the end of a tree; see :meth:`check_slots`.

        Raises:
            ValueError: if a tree is too small already. Nothing has changed then.
        """
        self.check()
        self._leaves = self.smallest() if self._storage.ndim == 1 else None

    def smallest(self) -> int | None:
        """How many leaves the smallest tree has; None if there is none."""
        return min((sampler.max_size for sampler in self.samplers()), default=None)

    def check_slots(self, stop: int) -> None:
        """Refuses records in slots up to ``stop`` if there is a tree without leaves for them.

        With ``ndim > 1``, where a tree has a leaf per cell, :meth:`Grid.fit` does it.
        """
        if self._leaves is not None and stop > self._leaves:
            raise past_the_end(self._leaves, stop - 1)


def past_the_end(leaves: int, slot: int) -> ValueError:
    """Returns the error for a record that has no leaf, in a tree of ``leaves``."""
    return ValueError(
        f"A priority sampler over this storage holds {leaves} slots: got a record for slot {slot}. "
        f"Give the sampler a larger max_capacity, or the storage a max_size of {leaves}."
    )


def draw(sampler: Sampler, storage: Storage, size: int) -> tuple[Any, dict[Any, Any]]:
    """Draws ``size`` slots and their weights as ``sampler.sample`` does, to the bit, on arrays."""
    length = len(storage)
    if not _draws_plainly(sampler) or storage.ndim > 1 or not length:
        return sampler.sample(storage, size)
    tree = sampler._sum_tree
    total, smallest = tree.query(0, length), sampler._min_tree.query(0, length)
    if total <= 0 or smallest <= 0:
        return sampler.sample(storage, size)  # which says so
    slots = tree.scan_lower_bound(np.random.uniform(0.0, total, size=size))
    np.minimum(slots, length - 1, out=slots)
    leaves = tree[slots]
    while not leaves.all():  # the rounding of a sum may lead past the last record
        slots -= leaves == 0
        if slots.min() < 0:
            raise RuntimeError("sample() found no record with a priority.")
        leaves = tree[slots]
    weights = torch.from_numpy(leaves).div_(smallest).pow_(-sampler._beta)
    return torch.from_numpy(slots), {"priority_weight": weights}


def write_priority(
    sampler: PrioritizedSampler,
    leaves: torch.Tensor,
    priority: torch.Tensor,
    highest: float,
    storage: Storage,
) -> None:
    """Writes priorities that :func:`~.update.checked_priority` returned, or some of them.

    Args:
        sampler (PrioritizedSampler): the sampler that owns the tree.
        leaves (torch.Tensor): int64 ``[rows]``, at least one, each below the tree's capacity.
        priority (torch.Tensor): ``[rows]`` or ``[]``, of the sampler's dtype.
        highest (float): no less than any of them.
        storage (Storage): the storage of the records.
    """
    if not _is_plain(sampler):
        sampler.update_priority(leaves, priority, storage=storage)
        return
    values = _values(sampler, priority)
    _set(sampler, leaves, values if values.ndim else values.item())
    known = _highest(sampler)
    # The highest of all may not be among those that were written.
    if highest > known and priority.max().item() > known:
        top, row = priority.max(dim=0)
        sampler._max_priority = (top, leaves[row])


def write_default(
    sampler: Sampler, leaves: Any, storage: Storage, *, are_leaves: bool = False
) -> None:
    """Gives records the default priority, the largest that there has been.

    Args:
        sampler (Sampler): any sampler; one without priorities takes no notice.
        leaves: what ``mark_update`` takes: int, ``[rows]``, or coordinates ``[rows, ndim]``.
        storage (Storage): the storage of the records.

    Keyword Args:
        are_leaves (bool, optional): whether ``leaves`` is known to be int64 ``[rows]``, at least
            one, each below the capacity of the tree, on the CPU. Defaults to False.
    """
    if (
        isinstance(sampler, PrioritizedSampler)
        and _is_plain(sampler)
        and (are_leaves or _are_leaves(leaves, sampler.max_size))
    ):
        if sampler._max_priority[0] is None:
            priority = torch.as_tensor(sampler.default_priority, dtype=sampler.dtype)
            sampler._max_priority = (priority, torch.as_tensor(leaves).reshape(-1)[0])
        _set(sampler, leaves, _default(sampler)[0])
    else:
        refuse_past_the_end(sampler, leaves)
        sampler.mark_update(leaves, storage=storage)


def _highest(sampler: PrioritizedSampler) -> float:
    """The largest priority that there has been; below all numbers if there is none yet."""
    if sampler._max_priority[0] is None:
        return -math.inf
    return _default(sampler)[1]


def _default(sampler: PrioritizedSampler) -> tuple[float, float]:
    """The leaf of the default priority, and this priority: they stay for long, and are kept."""
    # TorchRL's loads() writes another number into the same tensor.
    highest = float(sampler._max_priority[0])
    eps, alpha = float(sampler._eps), float(sampler._alpha)
    known = _defaults.get(sampler)
    if known is None or known[:3] != (highest, eps, alpha):
        priority = torch.as_tensor(sampler.default_priority, dtype=sampler.dtype)
        known = (highest, eps, alpha, _values(sampler, priority).item())
        _defaults[sampler] = known
    return known[3], highest


def _set(sampler: PrioritizedSampler, leaves: Any, values: Any) -> None:
    # The trees take arrays in half the time of tensors, but look at neither strides nor length.
    if isinstance(leaves, torch.Tensor):
        leaves = leaves.contiguous().numpy()
    if isinstance(values, torch.Tensor):
        values = values.detach().contiguous().numpy()
    sampler._sum_tree[leaves] = values
    sampler._min_tree[leaves] = values


def _values(sampler: PrioritizedSampler, priority: torch.Tensor) -> torch.Tensor:
    """``(p + eps) ** alpha`` (Schaul et al. 2015)."""
    return (priority + sampler._eps).pow_(sampler._alpha)


def _draws_plainly(sampler: Sampler) -> TypeGuard[PrioritizedSampler]:
    """Whether its ``sample`` is TorchRL's, on the compiled tree, with NumPy's random numbers."""
    return (
        type(sampler).sample is _TORCHRLS_SAMPLE
        and "sample" not in vars(sampler)
        and sampler._rng is None
        and not hasattr(sampler._sum_tree, "device")
    )


def _is_plain(sampler: PrioritizedSampler) -> bool:
    """Whether a write of the two trees is all that its ``update_priority`` comes to."""
    cls, tree = type(sampler), sampler._sum_tree
    return (
        cls.update_priority is PrioritizedSampler.update_priority
        and cls.mark_update is PrioritizedSampler.mark_update
        and cls.default_priority is PrioritizedSampler.default_priority
        and vars(sampler).keys().isdisjoint(("update_priority", "mark_update"))
        and not sampler._max_priority_within_buffer
        and tree is not None
        and not hasattr(tree, "device")  # the compiled tree is on the CPU and does not say so
    )


def refuse_past_the_end(sampler: Sampler | None, leaves: Any) -> None:
    """Refuses leaves past the end of the compiled tree, which checks no bounds.

    Args:
        sampler (Sampler or None): any; one without priorities has no tree.
        leaves: int, int64 ``[rows]``, or coordinates, which :meth:`Grid.fit` has seen to.

    Raises:
        ValueError: if there are some.
    """
    if not isinstance(sampler, PrioritizedSampler) or hasattr(sampler._sum_tree, "device"):
        return
    last = leaves
    if isinstance(leaves, torch.Tensor):
        if leaves.ndim != 1 or not leaves.numel():
            return
        last = int(leaves.max())
    if last >= sampler.max_size:
        raise past_the_end(sampler.max_size, last)


def _are_leaves(leaves: Any, size: int) -> bool:
    if isinstance(leaves, int):
        return 0 <= leaves < size
    if not isinstance(leaves, torch.Tensor) or leaves.ndim != 1 or not leaves.numel():
        return False
    if leaves.dtype is not torch.int64 or leaves.device.type != "cpu":
        return False
    low, high = torch.aminmax(leaves)
    return low.item() >= 0 and high.item() < size
