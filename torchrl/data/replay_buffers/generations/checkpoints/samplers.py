"""The state of a priority sampler in tensors and plain values.

TorchRL's ``state_dict`` of such a sampler holds compiled trees, which ``torch.load`` refuses by
default. Here the leaves stand in their place.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler

# The keys of the leaves of a tree, and of the attribute of the sampler that the tree is like.
LEAVES = "leaves"
TREE = "tree"
TREES = ("_sum_tree", "_min_tree")


def sampler_state(sampler: Sampler) -> dict[str, Any]:
    """Returns the state of a priority sampler, of a user's own class, too. Under its lock.

    It is what ``state_dict`` gives, with a dict in place of each compiled tree: ``"leaves"``
    (``[max_size]``, of the dtype of the tree, on the CPU) and ``"tree"``, which of the two.
    """
    return _mapped(sampler.state_dict(), lambda value: _described(value, sampler))


def load_sampler_state(sampler: Sampler, state: dict[str, Any]) -> None:
    """Restores what :func:`sampler_state` gave, which is checked before and left as it is."""
    sampler.load_state_dict(_mapped(state, lambda value: _tree_of(value, sampler)))


@contextlib.contextmanager
def dumpable(*samplers: Sampler | None) -> Iterator[list[bool]]:
    """Lets TorchRL dump samplers that have no largest priority, as after ``empty()``.

    TorchRL's ``dumps`` fails on None. Inside of the block such a sampler has the default priority
    for its largest, which is what records would get. It yields for each sampler whether that is so:
    a load sets ``_max_priority`` to None again there. The locks of the samplers are held.
    """
    without = [
        isinstance(sampler, PrioritizedSampler) and sampler._max_priority[0] is None
        for sampler in samplers
    ]
    empty: list[Any] = list(itertools.compress(samplers, without))
    try:
        for sampler in empty:
            priority = torch.as_tensor(sampler.default_priority, dtype=sampler.dtype)
            sampler._max_priority = (priority, torch.tensor(0, device="cpu"))
        yield without
    finally:
        for sampler in empty:
            sampler._max_priority = None


def leaves_of(tree: Any) -> torch.Tensor:
    """The leaves of a compiled tree: ``[size]`` of its dtype, on the CPU."""
    slots = torch.arange(max(tree.size, 2), device=getattr(tree, "device", "cpu"))
    # A tree gives a single leaf as a float: a tree of one is asked for it twice.
    return tree[slots.clamp(max=tree.size - 1)][: tree.size].cpu()


def _mapped(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts with ``convert`` applied to each value; it may give a dict."""
    converted = convert(value)
    if converted is value and isinstance(value, dict):
        return {key: _mapped(part, convert) for key, part in value.items()}
    return converted


def _described(value: Any, sampler: Any) -> Any:
    for name in TREES:
        tree = getattr(sampler, name)
        if tree is not None and type(value) is type(tree):
            return {TREE: name, LEAVES: leaves_of(value)}
    return value


def _tree_of(value: Any, sampler: Any) -> Any:
    if not isinstance(value, dict) or TREE not in value:
        return value
    like, leaves = getattr(sampler, value[TREE]), value[LEAVES]
    # The compiled tree of the CPU takes no device.
    device = [like.device] if hasattr(like, "device") else []
    tree = type(like)(len(leaves), *device)
    tree[torch.arange(len(leaves), device="cpu")] = leaves
    return tree
