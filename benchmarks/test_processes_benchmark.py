"""Four writer processes and an asynchronous learner, ours against stock with ``shared=True``.

The sides take turns, half a second each, and medians are compared: learner steps (a sample and its
update) per second, ours conditional, stock raw.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time

import torch
import torchrl.data
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage
from torchrl.data.replay_buffers import generations

CAPACITY = 10_000
WRITERS = 4
ROUNDS = 30
TURN_SECONDS = 0.5


def records(rows: int) -> TensorDict:
    return TensorDict({"obs": torch.rand(rows, 8), "reward": torch.rand(rows)}, [rows])


def write(rb, go, stop, ready) -> None:
    torch.set_num_threads(1)
    data = records(32)
    ready.release()
    while not stop.is_set():
        if go.wait(0.1):
            rb.extend(data)
            time.sleep(0.002)  # the environment's own work


@contextlib.contextmanager
def writers(rb):
    """Starts the writer processes; yields, when all are ready, the event that lets them write."""
    context = multiprocessing.get_context("spawn")
    go, stop, ready = context.Event(), context.Event(), context.Semaphore(0)
    processes = [context.Process(target=write, args=(rb, go, stop, ready)) for _ in range(WRITERS)]
    for process in processes:
        process.start()
    try:
        for _ in processes:  # each imports torch first
            assert ready.acquire(timeout=120)
        yield go
    finally:
        stop.set()
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def learner_steps(rb, conditional: bool, seconds: float) -> float:
    """Learner steps per second."""
    steps, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        sample = rb.sample()
        priority = torch.rand(256) + 0.1
        if conditional:
            rb.update_priority_if_present(
                index=sample["index"], generation=sample["index_generation"], priority=priority
            )
        else:
            rb.update_priority(sample["index"], priority)
        steps += 1
    return steps / (time.perf_counter() - begun)


def test_learner_steps_with_four_writer_processes(record_ratio):
    torch.set_num_threads(1)
    sides = []
    with contextlib.ExitStack() as running:
        for module, kwargs in (
            (generations, {"track_generations": True}),
            (torchrl.data, {}),
            (torchrl.data, {}),
        ):
            rb = module.TensorDictPrioritizedReplayBuffer(
                alpha=0.6,
                beta=0.4,
                storage=LazyMemmapStorage(CAPACITY),
                batch_size=256,
                sync=False,
                shared=True,
                **kwargs,
            )
            rb.extend(records(CAPACITY))
            sides.append((rb, running.enter_context(writers(rb)), bool(kwargs), []))
        for round_ in range(ROUNDS + 1):
            for turn in range(len(sides)):
                rb, go, conditional, rates = sides[(turn + round_) % len(sides)]
                go.set()
                rate = learner_steps(rb, conditional, TURN_SECONDS)
                go.clear()
                if round_:
                    rates.append(rate)
    record_ratio(*(1 / statistics.median(rates) for _, _, _, rates in sides))
