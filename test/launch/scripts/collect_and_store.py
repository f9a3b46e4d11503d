"""Collects frames of CartPole into a prioritized buffer, and samples them as they come.

After TorchRL's introduction to collecting and storing data. It knows nothing of generation stamps.
"""

from __future__ import annotations

import argparse
import json

import numpy
import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, QValueActor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=400)
    frames = parser.parse_args().frames
    torch.manual_seed(0)
    numpy.random.seed(0)  # prioritized samplers draw from it
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    env.set_seed(0)
    policy = QValueActor(MLP(in_features=4, out_features=2, num_cells=[16]), spec=env.action_spec)
    collector = Collector(env, policy, frames_per_batch=50, total_frames=frames)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=PrioritizedSampler(max_capacity=200, alpha=0.7, beta=0.5),
        batch_size=32,
        priority_key="surprise",
    )
    longest, sampled = 0, 0.0
    for batch in collector:
        rb.extend(batch)
        sample = rb.sample()
        sample["surprise"] = sample["next", "step_count"].float()
        rb.update_tensordict_priority(sample)
        longest = max(longest, int(batch["next", "step_count"].max()))
        sampled += float(sample["observation"].sum())
    collector.shutdown()
    print(json.dumps({"records": len(rb), "longest": longest, "sampled": sampled}))


if __name__ == "__main__":
    main()
