"""Four writer processes and an asynchronous learner, ours against stock with ``shared=True``.

A turn is half a second of learner steps, a sample and its update each: ours conditional, stock raw.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from time import perf_counter

import torch
import torchrl.data
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage
from torchrl.data.replay_buffers import generations
from turns import take_turns

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


def learner(rb, go, conditional: bool) -> Callable[[], float]:
    """Returns a side: seconds per learner step while the writers write."""

    def turn() -> float:
        go.set()
        steps, begun = 0, perf_counter()
        while perf_counter() - begun < TURN_SECONDS:
            sample = rb.sample()
            priority = torch.rand(256) + 0.1
            if conditional:
                rb.update_priority_if_present(
                    index=sample["index"], generation=sample["index_generation"], priority=priority
                )
            else:
                rb.update_priority(sample["index"], priority)
            steps += 1
        seconds = perf_counter() - begun
        go.clear()
        return seconds / steps

    return turn


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
            sides.append(learner(rb, running.enter_context(writers(rb)), bool(kwargs)))
        record_ratio(*take_turns(*sides, rounds=ROUNDS))
