"""A process writes into a buffer, and the process that made it learns from the records.

After TorchRL's documentation of buffers that processes share. It knows nothing of generation
stamps.
"""

from __future__ import annotations

import json

import numpy
import torch
from tensordict import TensorDict
from torch import multiprocessing
from torchrl.data import LazyMemmapStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer

RECORDS = 50


def write(rb: ReplayBuffer, writer: int) -> None:
    assert isinstance(rb, ReplayBuffer)
    steps = torch.arange(writer * RECORDS, (writer + 1) * RECORDS)
    rb.extend(TensorDict({"step": steps, "writer": torch.full_like(steps, writer)}, [RECORDS]))


def main() -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)  # prioritized samplers draw from it
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=LazyMemmapStorage(2 * RECORDS, shared_init=True),
        batch_size=16,
        sync=False,
    )
    write(rb, 0)
    process = multiprocessing.get_context("spawn").Process(target=write, args=(rb, 1))
    process.start()
    process.join()
    assert process.exitcode == 0
    for _ in range(10):
        sample = rb.sample()
        sample["td_error"] = sample["writer"] * 9.0 + 1.0
        rb.update_tensordict_priority(sample)
    sample = rb.sample(256)
    print(
        json.dumps(
            {
                "records": len(rb),
                "of_the_other": float(sample["writer"].float().mean()),
                "steps": int(sample["step"].sum()),
            }
        )
    )


if __name__ == "__main__":
    main()
