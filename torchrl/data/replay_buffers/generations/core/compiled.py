"""A table in a region that ``torch.compile`` traces: it takes no lock, and nothing may branch.

The user sees to it that nobody else writes the storage meanwhile, as with TorchRL's own buffers.
After a restore, where the table grows, and with ``ndim > 1``, the graph breaks instead.
"""

from __future__ import annotations

import torch
from torchrl.data.replay_buffers import Storage

from .counters import Counters


def stamps_at(counters: Counters, storage: Storage, slots: torch.Tensor) -> torch.Tensor:
    """:meth:`SlotGenerations.of` for int64 slots."""
    stamps = counters.tensor
    inside = (slots >= 0) & (slots < storage._len)
    local = slots.clamp(0, storage.max_size - 1).to(stamps.device)
    return torch.where(inside, stamps[local].to(slots.device), -1)


def advance_ring(counters: Counters, capacity: int, start: int, count: int) -> None:
    """:meth:`SlotGenerations.advance_ring`, where a slice would make a graph for each wrap."""
    stamps = counters.tensor
    slots = torch.arange(start, start + count, device=stamps.device).remainder(capacity)
    stamps[slots] = torch.maximum(stamps[slots], counters.base_tensor - 1)
    stamps.index_add_(0, slots, torch.ones_like(slots))
