"""What tracking costs: extend, sample and update against the stock class without tracking.

Each figure is a ratio taken in one run: ours, stock, and stock again (the A/A control, which says
how far the machine can be trusted) take turns round by round, and medians are compared.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from time import perf_counter

import pytest
import torch
import torchrl.data
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import generations

CAPACITY = 100_000
ROUNDS = 400
PER = {"alpha": 0.6, "beta": 0.4}


@pytest.fixture(autouse=True)
def one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def alternate(*sides: Callable[[], object]) -> list[float]:
    """Median seconds per call of each side, the sides taking turns."""
    times: list[list[float]] = [[] for _ in sides]
    order = random.Random(0)
    for _ in range(ROUNDS + ROUNDS // 10):
        # Nobody always runs after the same neighbour, who leaves his data in the caches.
        for side in order.sample(range(len(sides)), len(sides)):
            start = perf_counter()
            sides[side]()
            times[side].append(perf_counter() - start)
    return [statistics.median(series[ROUNDS // 10 :]) for series in times]


def records(rows: int) -> TensorDict:
    return TensorDict({"obs": torch.rand(rows, 8), "reward": torch.rand(rows)}, [rows])


def buffers(batch: int) -> list[torchrl.data.TensorDictPrioritizedReplayBuffer]:
    """Ours with tracking, stock, stock; each full."""
    made = []
    for module, kwargs in (
        (generations, {"track_generations": True}),
        (torchrl.data, {}),
        (torchrl.data, {}),
    ):
        rb = module.TensorDictPrioritizedReplayBuffer(
            **PER, storage=LazyTensorStorage(CAPACITY), batch_size=batch, **kwargs
        )
        rb.extend(records(CAPACITY))
        made.append(rb)
    return made


@pytest.mark.parametrize("batch", [256, 4096])
def test_extend(batch, record_ratio):
    data = records(batch)
    record_ratio(*alternate(*(lambda rb=rb: rb.extend(data) for rb in buffers(batch))))


def test_add(record_ratio):
    data = records(1)[0]
    record_ratio(*alternate(*(lambda rb=rb: rb.add(data) for rb in buffers(1))))


@pytest.mark.parametrize("batch", [256, 4096])
def test_sample(batch, record_ratio):
    record_ratio(*alternate(*(rb.sample for rb in buffers(batch))))


@pytest.mark.parametrize("stale", ["none", "half", "all"])
@pytest.mark.parametrize("batch", [256, 4096])
def test_update_priority_if_present(batch, stale, record_ratio):
    ours, *stock = buffers(batch)
    index = torch.randint(0, CAPACITY, (batch,))
    generation = ours.writer.generations_of(index)
    if stale == "half":
        generation[::2] += 1
    elif stale == "all":
        generation += 1
    priority = torch.rand(batch) + 0.1
    record_ratio(
        *alternate(
            lambda: ours.update_priority_if_present(
                index=index, generation=generation, priority=priority
            ),
            *(lambda rb=rb: rb.update_priority(index, priority) for rb in stock),
        )
    )


def ensembles() -> list[torchrl.data.ReplayBufferEnsemble]:
    """Ours of two tracking members, stock, stock; each member full."""
    modules = generations, torchrl.data, torchrl.data
    return [
        module.ReplayBufferEnsemble(*members, batch_size=256)
        for module, *members in zip(modules, buffers(256), buffers(256), strict=True)
    ]


def test_ensemble_sample_of_two_members(record_ratio):
    record_ratio(*alternate(*(ensemble.sample for ensemble in ensembles())))


def test_ensemble_stamps_of_256_handles(record_ratio):
    """Against TorchRL's writers, which track, too."""
    index = TensorDict(
        {"buffer_ids": torch.arange(256) % 2, "index": torch.randint(0, CAPACITY, (256,))}, [256]
    )
    sides = []
    for module in (generations, torchrl.data, torchrl.data):
        members = [
            module.ReplayBuffer(
                storage=LazyTensorStorage(CAPACITY),
                writer=module.RoundRobinWriter(track_generations=True),
            )
            for _ in range(2)
        ]
        for member in members:
            member.extend(records(CAPACITY))
        sides.append(module.ReplayBufferEnsemble(*members).writer)
    record_ratio(*alternate(*(lambda w=writer: w.generations_of(index) for writer in sides)))
