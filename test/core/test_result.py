from __future__ import annotations

import torch
from torchrl.data.replay_buffers.generations import PriorityUpdateResult


def test_counts_follow_the_mask():
    result = PriorityUpdateResult(updated_mask=torch.tensor([True, False, True, False, False]))
    assert (result.num_updated, result.num_stale) == (2, 3)
    assert isinstance(result.num_updated, int)
    assert isinstance(result.num_stale, int)


def test_an_empty_update_and_a_single_handle_count_too():
    empty = PriorityUpdateResult(updated_mask=torch.zeros(0, dtype=torch.bool))
    single = PriorityUpdateResult(updated_mask=torch.tensor(True))
    assert (empty.num_updated, empty.num_stale) == (0, 0)
    assert (single.num_updated, single.num_stale) == (1, 0)
