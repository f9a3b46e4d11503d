"""What a learner step takes with updates in the background, against one without any update.

All sides sample, learn and prefetch alike on our buffer with tracking; "stock" is no update. A turn
is some steps and a wait for what is under way, so that nothing runs during another side's turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter, thread_time

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.generations import TensorDictPrioritizedReplayBuffer
from turns import take_turns, timed

CAPACITY = 100_000
BATCH = 256
STEPS = 20
ROUNDS = 90
STEP_SECONDS = 0.005

cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    ],
)


@pytest.fixture(autouse=True)
def one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def learn_for(seconds: float, device: str) -> Callable[[], torch.Tensor]:
    """Trains a small network for about ``seconds``; returns the priorities of the last pass."""
    width = 256 if device == "cpu" else 4096
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)]
    network = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(network.parameters())
    observations = torch.rand(BATCH, width, device=device)

    def learn(passes: int) -> torch.Tensor:
        for _ in range(passes):
            td_error = network(observations)[:, 0]
            optimizer.zero_grad()
            td_error.square().mean().backward()
            optimizer.step()
        return td_error.detach().abs() + 0.1

    clock = thread_time if device == "cpu" else perf_counter  # the machine may be busy

    def timed(passes: int) -> float:
        start = clock()
        learn(passes).cpu()
        return clock() - start

    timed(10)
    passes = max(1, round(10 * seconds / min(timed(10) for _ in range(5))))
    return lambda: learn(passes)


def full_buffer() -> TensorDictPrioritizedReplayBuffer:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        storage=LazyTensorStorage(CAPACITY),
        batch_size=BATCH,
        prefetch=1,
        track_generations=True,
    )
    rb.extend(TensorDict({"obs": torch.rand(CAPACITY, 8)}, [CAPACITY]))
    return rb


@pytest.mark.parametrize("device", ["cpu", cuda])
def test_learner_step_of_5_ms(device, record_ratio):
    learn = learn_for(STEP_SECONDS, device)

    def steps(rb, update):
        for _ in range(STEPS):
            sample = rb.sample()
            priority = learn()
            if update:
                rb.submit_update_priority_if_present(
                    index=sample["index"], generation=sample["index_generation"], priority=priority
                )
        rb.synchronize()
        if device == "cuda":
            torch.cuda.synchronize()

    rb = full_buffer()
    sides = [timed(partial(steps, rb, update), 1) for update in (True, False, False)]
    record_ratio(*(seconds / STEPS for seconds in take_turns(*sides, rounds=ROUNDS)))
