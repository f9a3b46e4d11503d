"""What a tracking buffer needs to know about TorchRL's samplers."""

from __future__ import annotations

import torch
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    PromptGroupSampler,
    Sampler,
    StalenessAwareSampler,
    Storage,
    StreamingSliceSampler,
    TensorStorage,
    Writer,
)

from .writers import RoundRobinWriter

# Their samples name cells by one number, which a storage with ndim > 1 reads as a slot.
_ONE_DIMENSION_ONLY = (PromptGroupSampler, StalenessAwareSampler, StreamingSliceSampler)


def check_dimensions(storage: Storage, sampler: Sampler, writer: Writer) -> None:
    """Refuses a sampler or a writer that does not know the dimensions of a tracked storage.

    Raises:
        ValueError: with ``ndim > 1`` for a sampler of one dimension, or for priorities over a
            storage without records that a writer of TorchRL's may give more cells than they have
            leaves.
    """
    if storage.ndim == 1:
        return
    if isinstance(sampler, _ONE_DIMENSION_ONLY):
        raise ValueError(
            f"{type(sampler).__name__} needs a storage with ndim=1: got {type(storage).__name__} "
            f"with ndim={storage.ndim}. Flatten the records and give the storage ndim=1."
        )
    unshaped = isinstance(storage, TensorStorage) and not storage.initialized
    prioritized = isinstance(sampler, PrioritizedSampler)
    if unshaped and prioritized and not isinstance(writer, RoundRobinWriter):
        raise ValueError(
            f"A priority sampler over a {type(storage).__name__} with ndim={storage.ndim} that was "
            "never written needs a writer that makes sure of a leaf for every cell: got a "
            f"{type(writer).__name__} of TorchRL's. Use generations.RoundRobinWriter."
        )


def unmask_leaves(sampler: PrioritizedSampler) -> None:
    """Restores the leaves that a failed ``PrioritizedSliceSampler.sample`` has left at zero.

    It masks the ends of trajectories while it samples, in the sum tree alone; so the min tree still
    has every leaf, and that of an update that came in between.

    Args:
        sampler (PrioritizedSampler): the sampler; the caller holds the lock of the table.
    """
    slots = torch.arange(sampler.max_size)
    leaves = torch.as_tensor(sampler._min_tree[slots])
    written = leaves < torch.finfo(sampler.dtype).max
    sampler._sum_tree[slots[written]] = leaves[written]
