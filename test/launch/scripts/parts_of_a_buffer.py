"""A walk through the parts of a replay buffer: storages, samplers, priorities, trajectories.

After TorchRL's tutorial on replay buffers. It knows nothing of generation stamps.
"""

from __future__ import annotations

import json

import numpy
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import RoundRobinWriter, SamplerWithoutReplacement


def anything() -> list[str]:
    """A list takes whatever there is, and the oldest goes first."""
    rb = ReplayBuffer(storage=ListStorage(3), collate_fn=lambda words: words, batch_size=3)
    rb.extend(["a", "b"])
    rb.add("c")
    rb.add("d")
    return sorted(rb[:])


def epochs() -> list[int]:
    """Each record once, then from the start again."""
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(12),
        sampler=SamplerWithoutReplacement(),
        writer=RoundRobinWriter(),
        batch_size=4,
    )
    rb.extend(TensorDict({"step": torch.arange(12)}, [12]))
    seen = [int(step) for _ in range(3) for step in rb.sample()["step"]]
    return sorted(seen)


def by_slot() -> list[int]:
    """Priorities of records that are no tensordicts are written by slot."""
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=LazyTensorStorage(20), batch_size=64)
    rb.extend(torch.arange(20))
    _, info = rb.sample(return_info=True)
    rb.update_priority(info["index"], 1e-6)
    rb.update_priority(torch.tensor([3]), 100.0)
    return sorted(set(rb.sample().tolist()))


def by_error() -> dict[str, float]:
    """What was learned badly comes back more often."""
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.8, beta=1.1, storage=LazyTensorStorage(100), batch_size=32
    )
    rb.extend(TensorDict({"step": torch.arange(100)}, [100]))
    for _ in range(20):
        sample = rb.sample()
        sample["td_error"] = (sample["step"] % 10 == 0) * 10.0 + 0.1
        rb.update_tensordict_priority(sample)
    sample = rb.sample(512)
    return {
        "hard": float((sample["step"] % 10 == 0).float().mean()),
        "weights": float(sample["priority_weight"].sum()),
    }


def trajectories() -> list[int]:
    """Parts of episodes, none of which crosses the end of one."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60),
        sampler=SliceSampler(num_slices=4, traj_key="episode"),
        batch_size=20,
    )
    episode = torch.arange(60) // 15
    rb.extend(TensorDict({"episode": episode, "step": torch.arange(60)}, [60]))
    slices = rb.sample().reshape(4, 5)
    assert (slices["episode"] == slices["episode"][:, :1]).all()
    return slices["step"][:, 0].tolist()


def main() -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)  # prioritized samplers draw from it
    parts = (anything, epochs, by_slot, by_error, trajectories)
    print(json.dumps({part.__name__: part() for part in parts}))


if __name__ == "__main__":
    main()
