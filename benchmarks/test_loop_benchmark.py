"""What a learner's loop costs: extend, add, sample and update in turn, each timed on its own.

Unlike calls in a row, the steps of a loop find in the caches what the step before left there. Three
sides take each step of a round before the next: ours, TorchRL without tracking, and TorchRL again
as the A/A control; which of them begins changes from round to round.
"""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from functools import partial
from time import perf_counter
from typing import Any

import pytest
import torch
import torchrl.data
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import generations

PER = {"alpha": 0.6, "beta": 0.4}
ROUNDS = {256: 300, 4096: 60}
STEPS = ("extend", "add", "sample", "sample_at_random", "update_all_live", "update_half_stale")
RECORDS = {
    "flat": lambda rows: {"obs": torch.rand(rows, 8), "reward": torch.rand(rows)},
    "ten nested leaves": lambda rows: {
        "obs": {f"part {i}": torch.rand(rows, 4) for i in range(4)},
        "next": {"obs": {f"part {i}": torch.rand(rows, 4) for i in range(4)}},
        "reward": torch.rand(rows),
        "id": torch.arange(rows),
    },
}


class Side:
    """One of the three, with a prioritized buffer and one that is sampled at random."""

    def __init__(self, module: Any, capacity: int, batch: int, kind: str) -> None:
        self.is_ours = module is generations
        tracks = {"track_generations": True} if self.is_ours else {}
        of = {"batch_size": batch, **tracks}
        storages = (LazyTensorStorage(capacity) for _ in range(2))
        self.rb = module.TensorDictPrioritizedReplayBuffer(**PER, storage=next(storages), **of)
        self.plain = module.TensorDictReplayBuffer(storage=next(storages), **of)
        for rb in (self.rb, self.plain):
            for _ in range(0, capacity, 10**4):
                rb.extend(records(kind, 10**4))
        self.sampled: Any = None

    def step(self, name: str, data: TensorDict) -> float:
        call = partial(*self.call(name, data))
        start = perf_counter()
        result = call()
        took = perf_counter() - start
        if name == "sample":
            self.sampled = result
        return took

    def call(self, name: str, data: TensorDict) -> tuple[Any, ...]:
        if name == "extend":
            return self.rb.extend, data.clone()
        if name == "add":
            return self.rb.add, data[0].clone()
        if name == "sample":
            return (self.rb.sample,)
        if name == "sample_at_random":
            return (self.plain.sample,)
        self.sampled["td_error"] = torch.rand(len(self.sampled))
        if not self.is_ours:
            return self.rb.update_tensordict_priority, self.sampled
        if name == "update_half_stale":
            self.sampled["index_generation"][::2] -= 1
        return self.rb.update_tensordict_priority_if_present, self.sampled


def records(kind: str, rows: int) -> TensorDict:
    return TensorDict(RECORDS[kind](rows), [rows])


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def medians(request):
    """Seconds per step of each side, by step."""
    capacity, batch, kind = request.param
    sides = [
        Side(module, capacity, batch, kind) for module in (generations, torchrl.data, torchrl.data)
    ]
    took: dict[str, list[list[float]]] = defaultdict(lambda: [[], [], []])
    for round in range(ROUNDS[batch]):
        data = records(kind, batch)
        for name in STEPS:
            for position in range(3):
                side = (position + round) % 3
                took[name][side].append(sides[side].step(name, data))
    warm_up = ROUNDS[batch] // 8
    yield {
        name: [statistics.median(series[warm_up:]) for series in of_sides]
        for name, of_sides in took.items()
    }
    sides.clear()
    gc.collect()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "medians",
    [(10**5, 256, "flat"), (10**6, 4096, "flat"), (10**5, 256, "ten nested leaves")],
    indirect=True,
    ids=["256 of 1e5", "4096 of 1e6", "256 of 1e5, ten nested leaves"],
)
def test_loop(medians, step, record_ratio):
    record_ratio(*medians[step])
