"""Prioritized DQN with a buffer in a Ray actor
============================================

Here every part is a process of its own, and nothing keeps them in step: a replay buffer in a Ray
actor, two actors that collect CartPole frames into it, and a learner that samples over the network
and sends its priorities back some steps late. Each call is a round trip, so there is always time
for a record to be replaced.

Ray makes this convenient and the fault likely. A batch of records overtakes a priority that is on
its way, and ``update_tensordict_priority`` writes to whatever is in the slot when it arrives.
``update_tensordict_priority_if_present`` travels with the stamps of the sample; the actor compares
and writes in one step, and answers which rows it wrote.

Run it with ``python ray_prioritized_dqn.py``. It takes the same learner steps with either call,
prints one table, writes ``ray_prioritized_dqn.png``, and exits with a non-zero status if the
conditional run put a priority on another record.
"""  # noqa: D205, D415 - the gallery wants a title

from __future__ import annotations

import argparse
import logging
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import ray
import torch
from matplotlib.figure import Figure
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.generations import (
    PriorityUpdateResult,
    RayReplayBuffer,
    SlotGenerations,
    TensorDictPrioritizedReplayBuffer,
)
from torchrl.envs import EnvBase, GymEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

CAPACITY = 512
BATCH_SIZE = 128
FRAMES_PER_BATCH = 64
WRITERS = 2
DELAY = 10  # learner steps that a priority comes late
PUBLISH_INTERVAL = 10  # learner steps between two publications of the weights

# %%
# An audit in the actor
# ---------------------
#
# Only the process of the buffer can see what a slot holds at the moment of an update. So the buffer
# in the actor is a subclass that looks: under the lock, it compares the id of each sampled record
# with the id in the slot, lets the update happen, and reports to an actor that keeps the tally.


@ray.remote(num_cpus=0)
class Audit:
    """What became of the priorities, one ``(stale, misapplied)`` for each update."""

    def __init__(self) -> None:
        self._booked: list[tuple[int, int]] = []

    def book(self, stale: int, misapplied: int) -> None:
        """One update."""
        self._booked.append((stale, misapplied))

    def booked(self) -> list[tuple[int, int]]:
        """All updates until now."""
        return self._booked


class AuditedBuffer(TensorDictPrioritizedReplayBuffer):
    """Compares ids, not stamps, to tell what its updates did."""

    def __init__(self, *, audit: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._audit = audit

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Writes every row; so each stale one is misapplied."""
        if data.get("td_error", None) is None:  # records on their way in
            super().update_tensordict_priority(data)
            return
        with SlotGenerations.attach(self.storage).lock:
            stale = int(self._gone(data).sum())
            super().update_tensordict_priority(data)
        self._audit.book.remote(stale, stale)

    def update_tensordict_priority_if_present(self, data: TensorDictBase) -> PriorityUpdateResult:
        """Writes the rows whose stamps agree."""
        with SlotGenerations.attach(self.storage).lock:
            gone = self._gone(data)
            result = super().update_tensordict_priority_if_present(data)
        self._audit.book.remote(int(gone.sum()), int((gone & result.updated_mask).sum()))
        return result

    def _gone(self, data: TensorDictBase) -> torch.Tensor:
        return self.storage.get(data["index"])["record_id"] != data["record_id"]


# %%
# The writers
# -----------
#
# An actor with an environment, a copy of the network, and a client of the buffer. One call collects
# one batch with the weights that it is given. The records go to the buffer's actor, not through the
# learner.


def make_q_network(env: EnvBase) -> QValueActor:
    """A network from an observation to the value of each action, and to the best action."""
    spec = env.action_spec_unbatched
    layers = MLP(in_features=4, out_features=int(spec.n), num_cells=[128])
    return QValueActor(layers, in_keys=["observation"], spec=spec)


def make_env() -> EnvBase:
    """CartPole."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@ray.remote(num_cpus=0)
class Writer:
    """Collects into the buffer of ``client``; ids of its records start at ``first_id``."""

    def __init__(self, client: Any, first_id: int) -> None:
        torch.set_num_threads(1)
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        self._client = client
        self._next_id = first_id
        env = make_env()
        network = make_q_network(env)
        self._weights = TensorDict.from_module(network).data
        explore = EGreedyModule(env.action_spec_unbatched, eps_init=0.1, eps_end=0.1)
        self._collector = Collector(
            env,
            TensorDictSequential(network, explore),
            frames_per_batch=FRAMES_PER_BATCH,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
        self._batches = iter(self._collector)

    def collect(self, weights: TensorDictBase) -> int:
        """Puts one batch of frames into the buffer; returns how many."""
        self._weights.update_(weights)
        frames = next(self._batches).reshape(-1)
        records = frames.select("observation", "action", "next")
        records["record_id"] = torch.arange(self._next_id, self._next_id + len(records))
        self._next_id += len(records)
        self._client.extend(records)
        return len(records)


# %%
# The learner
# -----------
#
# Whenever a writer is done, it gets the newest weights and goes on; the learner waits for nobody.
# Of a sample, only what the update needs goes back: the slots, their stamps and the TD errors, and
# here the ids for the audit.


def train(steps: int, *, conditional: bool) -> tuple[list[tuple[int, int]], int]:
    """One run: what the audit booked, and how many frames the writers collected."""
    torch.manual_seed(0)
    audit = Audit.remote()
    rb = RayReplayBuffer(
        replay_buffer_cls=AuditedBuffer,
        audit=audit,
        alpha=0.6,
        beta=0.4,
        storage=partial(LazyTensorStorage, CAPACITY),
        batch_size=BATCH_SIZE,
        priority_key="td_error",
        track_generations=True,
        remote_config={"num_cpus": 0},
    )
    network = make_q_network(make_env())
    loss_module = DQNLoss(network, action_space="categorical", loss_function="l2")
    loss_module.make_value_estimator(gamma=0.98)
    target = SoftUpdate(loss_module, tau=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    def published() -> Any:
        return ray.put(TensorDict.from_module(network).data.clone())

    weights = published()
    writers = [Writer.remote(rb.client(), first_id=number << 32) for number in range(WRITERS)]
    running = {writer.collect.remote(weights): writer for writer in writers}
    frames, late = 0, deque[TensorDictBase]()

    def restart_writers(wait: bool) -> int:
        done, _ = ray.wait(list(running), timeout=None if wait else 0)
        for batch in done:
            writer = running.pop(batch)
            running[writer.collect.remote(weights)] = writer
        return sum(ray.get(done))

    while frames < CAPACITY:
        frames += restart_writers(wait=True)
    for step in range(steps):
        frames += restart_writers(wait=False)
        sample = rb.sample()
        loss_module(sample)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
        if step % PUBLISH_INTERVAL == 0:
            weights = published()
        late.append(sample.select("index", "index_generation", "td_error", "record_id"))
        if len(late) > DELAY:
            if conditional:
                rb.update_tensordict_priority_if_present(late.popleft())
            else:
                rb.update_tensordict_priority(late.popleft())
    ray.get(list(running))
    booked = ray.get(audit.booked.remote())
    for writer in writers:
        ray.kill(writer)
    rb.shutdown()
    return booked, frames


# %%
# What came of it
# ---------------
#
# Both runs send the same number of priorities. How many come too late is up to the machine and to
# Ray, and differs from run to run. What does not differ is the last column.


def table(runs: dict[str, tuple[list[tuple[int, int]], int]]) -> str:
    """The audit, one line per run."""
    lines = [f"{'run':<12}{'frames':>9}{'sent':>9}{'stale':>9}{'misapplied':>12}"]
    for name, (booked, frames) in runs.items():
        stale, misapplied = (sum(column) for column in zip(*booked, strict=True))
        sent = len(booked) * BATCH_SIZE
        lines.append(f"{name:<12}{frames:>9,}{sent:>9,}{stale:>9,}{misapplied:>12,}")
    return "\n".join(lines)


def draw(runs: dict[str, tuple[list[tuple[int, int]], int]]) -> Figure:
    """Stale and misapplied priorities over the updates."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, (booked, _)), color in zip(runs.items(), ("tab:red", "tab:blue"), strict=True):
        stale, misapplied = torch.tensor(booked).cumsum(0).unbind(1)
        axes.plot(stale, color=color, alpha=0.3, linewidth=6, label=f"{name}: stale")
        axes.plot(misapplied, color=color, linewidth=1.6, label=f"{name}: misapplied")
    axes.set_title(
        f"{CAPACITY} slots in a Ray actor, {WRITERS} writers, {DELAY} learner steps late"
    )
    axes.set_xlabel("updates")
    axes.set_ylabel("priorities, cumulative")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    return figure


def main() -> int:
    """Both runs, the table and the figure. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Prioritized DQN with a buffer in a Ray actor.")
    parser.add_argument("--steps", type=int, default=300, help="learner steps of each run")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the figure")
    options = parser.parse_args()
    if options.steps <= DELAY:
        parser.error(f"--steps must be more than the delay of {DELAY}, got {options.steps}.")
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    runs = {
        "raw": train(options.steps, conditional=False),
        "conditional": train(options.steps, conditional=True),
    }
    ray.shutdown()
    print(table(runs))
    draw(runs).savefig(options.output / "ray_prioritized_dqn.png", dpi=120)
    misapplied = sum(count for _, count in runs["conditional"][0])
    if misapplied:
        print(f"{misapplied} priorities are on another record than their own.", file=sys.stderr)
    return 1 if misapplied else 0


if __name__ == "__main__" and (status := main()):
    sys.exit(status)
