"""Two collector processes fill a tracked buffer while a learner updates four batches late.

Usage: collect_and_learn.py START_METHOD STORAGE SHARED_INIT SECONDS. Prints a line of JSON. It is a
program of its own, since a start method holds for a whole process.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections import deque

import torch
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyMemmapStorage, LazyTensorStorage
from torchrl.data.replay_buffers.generations import TensorDictPrioritizedReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import RandomPolicy

SLOTS = 2048  # more than fast collectors overwrite in four draws, so that some handles stay live
LATE = 4
PATIENCE = 30
STORAGES = {"memmap": LazyMemmapStorage, "tensor": LazyTensorStorage}


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1")


def main(method: str, storage: str, shared_init: str, seconds: str) -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method(method, force=True)
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=STORAGES[storage](SLOTS, shared_init=shared_init == "shared_init"),
        sync=False,
        batch_size=16,
        track_generations=True,
    )
    collector = MultiAsyncCollector(
        [make_env, make_env],
        policy=RandomPolicy(make_env().action_spec),
        replay_buffer=rb,
        frames_per_batch=32,
        total_frames=-1,
    )
    counts = {"applied": 0, "misapplied": 0, "stale": 0, "falsely_stale": 0}
    batches: deque = deque()
    collector.start()
    try:
        deadline = time.monotonic() + 60
        while rb.write_count < SLOTS and time.monotonic() < deadline:
            time.sleep(0.05)
        deadline = time.monotonic() + float(seconds)
        at_last = deadline + PATIENCE
        # On a busy machine a second may be too short for the collectors to come around.
        while time.monotonic() < deadline or (
            time.monotonic() < at_last and not (counts["applied"] and counts["stale"])
        ):
            batches.append(rb.sample())
            time.sleep(0.01)  # the learner's own work
            if len(batches) <= LATE:
                continue
            late = batches.popleft()
            with rb._table.lock:
                now = rb.storage[:][late["index"]]
                # Two steps of random play never begin and end in the same states.
                there = (now["observation"] == late["observation"]).all(-1) & (
                    now["next", "observation"] == late["next", "observation"]
                ).all(-1)
                applied = rb.update_priority_if_present(
                    index=late["index"],
                    generation=late["index_generation"],
                    priority=torch.rand(16) + 1,
                ).updated_mask
            counts["applied"] += int(applied.sum())
            counts["misapplied"] += int((applied & ~there).sum())
            counts["stale"] += int((~applied).sum())
            counts["falsely_stale"] += int((~applied & there).sum())
    finally:
        collector.shutdown()
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
