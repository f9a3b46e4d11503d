"""What tracking costs: extend, add, sample and update against TorchRL.

Each figure is a ratio taken in one run: ours, stock without tracking, stock again (the A/A control,
which says how far the machine can be trusted), and stock with its own tracking and a guard written
by hand.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrl.data
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler
from torchrl.data.replay_buffers import generations
from turns import take_turns, timed

CAPACITY = 100_000
CAPACITIES = [10**4, 10**5, 10**6, 10**7]
BATCHES = [1, 32, 256, 4096]
ROUNDS = 60
CALLS = 8
PER = {"alpha": 0.6, "beta": 0.4}


@pytest.fixture(autouse=True)
def one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.collect()  # the buffers of 10**7 slots


def alternate(*sides: Callable[[], object], calls: int = CALLS) -> list[float]:
    """Median seconds per call of each side, the sides taking turns of some calls each.

    A turn of one call would time caches: most sides run the same code of TorchRL, ours its own.
    """
    return take_turns(*(timed(side, calls) for side in sides), rounds=ROUNDS)


def records(rows: int) -> TensorDict:
    return TensorDict({"obs": torch.rand(rows, 8), "reward": torch.rand(rows)}, [rows])


def full(rb: Any, capacity: int) -> Any:
    for first in range(0, capacity, 10**6):
        rb.extend(records(min(10**6, capacity - first)))
    return rb


def buffers(
    batch: int,
    capacity: int = CAPACITY,
    storage: Callable[[int], Any] = LazyTensorStorage,
    kind: str = "TensorDict",
    prioritized: bool = True,
) -> list[Any]:
    """Ours with tracking, stock, stock, stock with its own tracking; each full."""
    made = []
    for module, track in (
        (generations, True),
        (torchrl.data, False),
        (torchrl.data, False),
        (torchrl.data, True),
    ):
        writer = getattr(module, f"{kind}RoundRobinWriter")(track_generations=track)
        sampler = {"sampler": PrioritizedSampler(capacity, **PER)} if prioritized else {}
        cls = getattr(module, f"{kind}ReplayBuffer")
        rb = cls(storage=storage(capacity), writer=writer, batch_size=batch, **sampler)
        made.append(full(rb, capacity))
    return made


def extends(rbs: list[Any], batch: int) -> list[float]:
    data = records(batch)
    return alternate(*(lambda rb=rb: rb.extend(data) for rb in rbs))


def samples(rbs: list[Any]) -> list[float]:
    return alternate(*(rb.sample for rb in rbs))


def updates(rbs: list[Any], capacity: int, batch: int, stale: str) -> list[float]:
    ours, stock, again, tracked = rbs
    index = torch.randint(0, capacity, (batch,))
    generation = ours.writer.generations_of(index)
    if stale == "half":
        generation[::2] += 1
    elif stale == "all":
        generation += 1
    priority = torch.rand(batch) + 0.1

    def guarded():
        live = tracked.writer.generations_of(index) == generation
        tracked.update_priority(index[live], priority[live])

    return alternate(
        lambda: ours.update_priority_if_present(
            index=index, generation=generation, priority=priority
        ),
        lambda: stock.update_priority(index, priority),
        lambda: again.update_priority(index, priority),
        guarded,
    )


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_extend(batch, capacity, record_ratio):
    record_ratio(*extends(buffers(batch, capacity), batch))


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_add(capacity, record_ratio):
    data = records(1)[0]
    record_ratio(*alternate(*(lambda rb=rb: rb.add(data) for rb in buffers(1, capacity))))


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_sample(batch, capacity, record_ratio):
    record_ratio(*samples(buffers(batch, capacity)))


@pytest.mark.parametrize("capacity", [10**5, 10**6])
@pytest.mark.parametrize("batch", [256, 4096])
def test_sample_at_random(batch, capacity, record_ratio):
    record_ratio(*samples(buffers(batch, capacity, prioritized=False)))


@pytest.mark.parametrize("stale", ["none", "half", "all"])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_update_priority_if_present(batch, capacity, stale, record_ratio):
    record_ratio(*updates(buffers(batch, capacity), capacity, batch, stale))


@pytest.mark.parametrize("kind", ["", "TensorDict"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("operation", ["extend", "sample", "update"])
def test_kinds_of_buffer_and_storage(operation, storage, kind, record_ratio):
    rbs = buffers(256, storage=storage, kind=kind)
    if operation == "extend":
        record_ratio(*extends(rbs, 256))
    elif operation == "sample":
        # A plain buffer gives index and stamps in the info alone.
        record_ratio(*alternate(*(lambda rb=rb: rb.sample(return_info=True) for rb in rbs)))
    else:
        record_ratio(*updates(rbs, CAPACITY, 256, "none"))


def test_rb_extend_generation_stamping(benchmark, record_ratio):
    """A ring that wraps in every other call."""
    data = records(400)
    rbs = buffers(400, capacity=512)
    record_ratio(*alternate(*(lambda rb=rb: rb.extend(data) for rb in rbs)))
    benchmark(rbs[0].extend, data)


def test_extend_with_the_process_half_of_the_lock(record_ratio):
    """What a writer pays once other processes may hold the lock, although none does."""
    rbs = buffers(256, storage=LazyMemmapStorage, prioritized=False)
    rbs[0]._table.lock.engage()
    record_ratio(*extends(rbs, 256))


def test_four_threads_each_with_a_buffer_of_its_own(record_ratio):
    sides = [buffers(256)[:3] for _ in range(4)]
    data = records(256)

    def in_threads(side: int) -> Callable[[], object]:
        def run():
            def work(rb):
                for _ in range(10):
                    rb.extend(data)
                    rb.sample()

            threads = [threading.Thread(target=work, args=(four[side],)) for four in sides]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return run

    record_ratio(*alternate(*(in_threads(side) for side in range(3)), calls=1))


def test_stamping_costs_the_same_at_any_capacity(record_ratio):
    """Ours: 10**7 slots; "stock" and its control: 10**4 slots. Advance a batch and read it."""
    tables = [
        generations.SlotGenerations.attach(full(rb, capacity).storage)
        for capacity in (10**7, 10**4, 10**4)
        for rb in [generations.TensorDictReplayBuffer(storage=LazyTensorStorage(capacity))]
    ]

    def stamp(table, slots):
        def run():
            with table.lock:
                table.advance_ring(1000, 256)
            table.of(slots)

        return run

    sides = [stamp(table, torch.randint(0, table.stamps.numel(), (256,))) for table in tables]
    record_ratio(*alternate(*sides))


def ensembles() -> list[torchrl.data.ReplayBufferEnsemble]:
    """Ours of two tracking members, stock, stock; each member full."""
    modules = generations, torchrl.data, torchrl.data
    return [
        module.ReplayBufferEnsemble(*members, batch_size=256)
        for module, *members in zip(modules, buffers(256)[:3], buffers(256)[:3], strict=True)
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
