"""Prioritized DQN with a concurrent collector
==============================================

A prioritized learner samples a batch, computes TD errors, and writes them back as the priorities
of the slots that it sampled. When a collector writes at the same time, a slot may hold another
record by then. TorchRL's ``update_priority`` cannot tell: it writes to the slot, and from then on
the error of a record that is gone decides how often its successor is replayed. Nothing fails and
nothing is logged.

This script makes the fault visible on a task that everybody knows, and then removes it. A DQN
learns CartPole while a collector, in a process of its own, fills a small ring buffer. The learner
sends its priorities some steps late, as learners do whose errors come back from another device or
process. The same schedule runs twice, and one call differs:

- **raw**: ``rb.update_tensordict_priority(sample)`` writes every row that it is given;
- **conditional**: ``rb.update_tensordict_priority_if_present(sample)`` compares the generation that
  each row was sampled with to the generation that its slot has now, and writes where they agree.

An audit judges both runs by one measure, which knows nothing of generations: each record carries
an id of its own, and the audit compares the id in the sample to the id stored in that slot.

Run it with ``python async_prioritized_dqn.py``; ``--help`` lists the options. It prints one table,
writes ``async_prioritized_dqn.png``, and exits with a non-zero status if the conditional run put a
single priority on the wrong record, or kept one from the right record.
"""  # noqa: D205, D415 - the gallery wants a title

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Condition as ProcessCondition
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, LazyTensorStorage
from torchrl.data.replay_buffers.generations import (
    SlotGenerations,
    TensorDictPrioritizedReplayBuffer,
)
from torchrl.envs import EnvBase, GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from tqdm import tqdm

SPAWN = multiprocessing.get_context("spawn")
Condition = threading.Condition | ProcessCondition

# %%
# Settings
# --------
#
# Three numbers decide how often a priority comes too late. Each learner step lets
# ``frames_per_step`` new frames in, so between the sampling of a record and the writing of its
# priority ``delay * frames_per_step`` of the ``capacity`` slots get a new record: with the defaults
# 304 of 512. After 32 learner steps nothing in the buffer is what it was.
#
# So small a buffer forgets what failure looks like as soon as the policy is good. One wide layer, a
# discount of 0.98, a target network that follows slowly and a learning rate that falls to zero
# mostly keep the training from collapsing.


@dataclass(frozen=True)
class Settings:
    """One experiment: the first seven are options of the command line."""

    env: str = "CartPole-v1"
    frames: int = 40_000
    capacity: int = 512
    delay: int = 19
    seed: int = 0
    output: Path = Path()
    collector: str = "process"

    num_envs: int = 8
    frames_per_batch: int = 64
    frames_per_step: int = 16
    batch_size: int = 128
    alpha: float = 0.6
    beta: float = 0.4
    gamma: float = 0.98
    learning_rate: float = 2e-3
    target_rate: float = 0.01
    publish_interval: int = 4
    epsilon_end: float = 0.02
    epsilon_frames: int = 12_000

    @property
    def steps(self) -> int:
        """Learner steps of a run: one when the buffer is full, then one per ``frames_per_step``."""
        return 1 + (self.frames - self.capacity) // self.frames_per_step


# %%
# One schedule for two sides
# --------------------------
#
# Two sides that run as fast as they can would make two runs incomparable: the one that the machine
# happens to favour decides how stale the buffer gets. So each keeps the other in step.
# Learner step ``k`` waits until ``capacity + k * frames_per_step`` frames are in, and the collector
# never gets further than one batch ahead of that line. Neither can starve and neither can run away;
# within those bounds both run at the same time, and which learner step a write falls into is up to
# the operating system.
#
# The number of learner steps, and with it the number of priorities sent, is thus the same in every
# run with the same options. How many of them come too late differs a little, and since the
# collected data differ too, so does the return.


class Pace:
    """Keeps a writer and a learner within ``lead`` frames of one schedule.

    The condition guards every field: that of :mod:`threading`, or of a multiprocessing context. A
    side that ends calls :meth:`close`, with its exception if it failed: the other side wakes up,
    the writer to stop, the learner to raise.
    """

    def __init__(
        self, changed: Condition, *, first_step_at: int, frames_per_step: int, lead: int
    ) -> None:
        self._changed = changed
        # Frames written, frames that the next step needs, whether a side has ended.
        self._numbers = torch.tensor([0, first_step_at, 0]).share_memory_()
        self._frames_per_step = frames_per_step
        self._lead = lead
        self.error: BaseException | None = None

    @property
    def written(self) -> int:
        """Frames that were written, those that were overwritten since included."""
        return int(self._numbers[0])

    @property
    def _due(self) -> int:
        return int(self._numbers[1])

    @property
    def _closed(self) -> bool:
        return bool(self._numbers[2])

    def wait_for_room(self, frames: int) -> bool:
        """Blocks the writer until ``frames`` more are welcome. False: stop writing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self.written + frames <= self._due + self._lead
            )
            return not self._closed

    def wrote(self, frames: int) -> None:
        """The writer has put ``frames`` more into the buffer."""
        with self._changed:
            self._numbers[0] += frames
            self._changed.notify_all()

    def wait_for_step(self, writer_lives: Callable[[], bool]) -> None:
        """Blocks the learner until its next step is due; raises if the writer failed or is gone."""
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._closed or self.written >= self._due, timeout=1
            ):
                if not writer_lives():
                    raise RuntimeError("The collector is gone.")
            if self._closed:
                raise RuntimeError("The collector failed.") from self.error

    def stepped(self) -> None:
        """The learner has made a step, which makes room for ``frames_per_step`` frames."""
        with self._changed:
            self._numbers[1] += self._frames_per_step
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """Wakes both sides for good. The first error is kept."""
        with self._changed:
            self._numbers[2] = 1
            self.error = self.error or error
            self._changed.notify_all()


# %%
# The environment and the Q network
# ---------------------------------
#
# Eight copies of the environment advance together, each at another point of its episode.


def make_env(settings: Settings) -> EnvBase:
    """Copies of the Gymnasium environment, stepped in turn; each keeps the sum of its rewards."""

    def make_one() -> EnvBase:
        return GymEnv(settings.env, categorical_action_encoding=True)

    env = TransformedEnv(SerialEnv(settings.num_envs, make_one), RewardSum())
    env.set_seed(settings.seed)
    return env


def make_q_network(env: EnvBase) -> QValueActor:
    """A network from an observation to the value of each action, and to the best action."""
    spec = env.action_spec_unbatched
    layers = MLP(
        in_features=env.observation_spec["observation"].shape[-1],
        out_features=int(spec.n),
        num_cells=[256],
        activation_class=torch.nn.Tanh,
    )
    return QValueActor(layers, in_keys=["observation"], spec=spec)


# %%
# The collector side
# ------------------
#
# Everything that writes to the buffer stands here. A TorchRL ``Collector`` that is given a buffer
# extends it itself; on the way there, each record gets its id from a counter that only goes up. It
# acts with a copy of the network, and takes over the weights that the learner published last before
# it collects the next batch.
#
# It works in a process of its own, or in a thread (``--collector thread``). ``Collector.start()``
# would make a thread as well, but one whose exceptions end it in silence, while the learner waits.
# Here they reach the learner through its next wait.

RECORD = (
    "observation",
    "action",
    ("next", "observation"),
    ("next", "reward"),
    ("next", "done"),
    ("next", "terminated"),
)


class Writer:
    """Collects into ``rb`` at the given pace, until that is closed, with the published weights.

    It calls ``finished((frames so far, return))`` at the end of each episode.
    """

    def __init__(
        self,
        settings: Settings,
        rb: TensorDictPrioritizedReplayBuffer,
        published: TensorDictBase,
        pace: Pace,
        finished: Callable[[tuple[int, float]], None],
    ) -> None:
        self._frames_per_batch = settings.frames_per_batch
        self._pace = pace
        self._finished = finished
        self._next_id = 0
        env = make_env(settings)
        actor = make_q_network(env)
        self._weights = TensorDict.from_module(actor).data
        self._published = published
        self._exploration = EGreedyModule(
            env.action_spec_unbatched,
            eps_end=settings.epsilon_end,
            annealing_num_steps=settings.epsilon_frames,
        )
        self._collector = Collector(
            env,
            TensorDictSequential(actor, self._exploration),
            frames_per_batch=settings.frames_per_batch,
            total_frames=-1,
            replay_buffer=rb,
            postproc=self._make_records,
            track_traj_ids=False,
            auto_register_policy_transforms=False,
        )

    def run(self) -> None:
        """Collects until the pace is closed."""
        try:
            batches = iter(self._collector)
            while self._pace.wait_for_room(self._frames_per_batch):
                self._weights.update_(self._published)
                next(batches)
                self._exploration.step(self._frames_per_batch)
                self._pace.wrote(self._frames_per_batch)
        except BaseException as error:
            self._pace.close(error)
        finally:
            self._collector.shutdown()

    def _make_records(self, rollout: TensorDictBase) -> TensorDictBase:
        """From ``[num_envs, T]`` to ``[num_envs * T]`` records by time, each with an id."""
        frames = rollout.transpose(0, 1).reshape(-1)
        for position in frames["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist():
            score = frames["next", "episode_reward"][position].item()
            self._finished((self._next_id + position + 1, score))
        records = frames.select(*RECORD)
        records["record_id"] = torch.arange(self._next_id, self._next_id + len(records))
        self._next_id += len(records)
        return records


def write_in_process(
    settings: Settings,
    rb: TensorDictPrioritizedReplayBuffer,
    published: TensorDictBase,
    pace: Pace,
    channel: Connection,
) -> None:
    """What the collector's process runs."""
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    Writer(settings, rb, published, pace, channel.send).run()
    if pace.error is not None:
        raise pace.error  # it does not reach the learner's process, but its trace is printed


class CollectorSide:
    """The learner's view of the collector: starts it, hands it weights, reads its episodes.

    ``episodes`` has ``(frames so far, return)`` of each finished episode.
    """

    def __init__(
        self,
        settings: Settings,
        rb: TensorDictPrioritizedReplayBuffer,
        network: QValueActor,
        pace: Pace,
    ) -> None:
        self.episodes: list[tuple[int, float]] = []
        self._published = TensorDict.from_module(network).data.clone().share_memory_()
        self._channel: Connection | None = None
        self._side: threading.Thread | BaseProcess
        if settings.collector == "thread":
            writer = Writer(settings, rb, self._published, pace, self.episodes.append)
            self._side = threading.Thread(target=writer.run, name="collector", daemon=True)
        else:
            self._channel, theirs = SPAWN.Pipe(duplex=False)
            self._side = SPAWN.Process(
                target=write_in_process,
                args=(settings, rb, self._published, pace, theirs),
                daemon=True,
            )

    def start(self) -> None:
        """Starts to collect."""
        self._side.start()

    def is_alive(self) -> bool:
        """Whether it still collects."""
        return self._side.is_alive()

    def publish(self, network: QValueActor) -> None:
        """Hands over the learner's weights, for the next batch to be collected."""
        self._published.update_(TensorDict.from_module(network).data)

    def read_episodes(self) -> None:
        """Takes in the episodes that a collector in another process has finished."""
        while self._channel is not None and self._channel.poll():
            try:
                self.episodes.append(self._channel.recv())
            except EOFError:
                return

    def join(self) -> None:
        """Waits for the collector to end; its pace must be closed by now."""
        if self._side.ident is not None:
            self._side.join(30)
        self.read_episodes()


# %%
# The audit
# ---------
#
# The audit must see the buffer exactly as the update sees it. So it takes the lock of the storage,
# reads the ids, and lets the update happen inside. Every write of the buffer needs that lock, and
# it is reentrant: the update takes it once more.
#
# A row whose slot holds another record by now is *stale*, and a stale row that is written all the
# same is *misapplied*. The raw call misapplies every stale row.


@dataclass
class Tally:
    """What became of the priorities of one run. The lists grow by one entry per batch sent."""

    sent: int = 0
    applied: int = 0
    stale: int = 0
    misapplied: int = 0
    withheld: int = 0  # live, yet not written: there is no good reason for one
    frames: list[int] = field(default_factory=list)
    stale_so_far: list[int] = field(default_factory=list)
    misapplied_so_far: list[int] = field(default_factory=list)

    def book(self, *, written: torch.Tensor, gone: torch.Tensor, frames: int) -> None:
        """Counts one batch: two boolean masks ``[N]``, and the frames collected until now."""
        self.sent += written.numel()
        self.applied += int(written.sum())
        self.stale += int(gone.sum())
        self.misapplied += int((written & gone).sum())
        self.withheld += int((~written & ~gone).sum())
        self.frames.append(frames)
        self.stale_so_far.append(self.stale)
        self.misapplied_so_far.append(self.misapplied)


def write_priorities(
    rb: TensorDictPrioritizedReplayBuffer, sample: TensorDictBase, *, conditional: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends the ``td_error`` of a sample; returns which rows were written and which were stale."""
    with SlotGenerations.attach(rb.storage).lock:
        stored = rb.storage.get(sample["index"])["record_id"]
        if conditional:
            written = rb.update_tensordict_priority_if_present(sample).updated_mask
        else:
            rb.update_tensordict_priority(sample)
            written = torch.ones(len(sample), dtype=torch.bool)
    return written, stored != sample["record_id"]


# %%
# The learner
# -----------
#
# An ordinary DQN, except that a batch waits ``delay`` steps in a queue before its errors are
# sent. Index and generations travel inside the batch, so there is nothing to keep beside it.


@dataclass
class Run:
    """One training run."""

    name: str
    episodes: list[tuple[int, float]]
    tally: Tally = field(default_factory=Tally)

    @property
    def recent_return(self) -> float:
        """Mean return of the last 20 episodes."""
        scores = [score for _, score in self.episodes[-20:]]
        return sum(scores) / len(scores) if scores else float("nan")


def train(name: str, settings: Settings, bar: tqdm, *, conditional: bool) -> Run:
    """Trains from scratch; ``conditional`` chooses the call that writes the priorities."""
    torch.manual_seed(settings.seed)
    env = make_env(settings)
    network = make_q_network(env)
    in_process = settings.collector == "process"
    # A learner beside other processes keeps the priorities to itself, and the records in files that
    # the collector, which writes first, makes.
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=settings.alpha,
        beta=settings.beta,
        storage=LazyMemmapStorage(settings.capacity, shared_init=True)
        if in_process
        else LazyTensorStorage(settings.capacity),
        sync=not in_process,
        batch_size=settings.batch_size,
        priority_key="td_error",
        track_generations=True,
    )
    loss_module = DQNLoss(network, action_space=env.action_spec_unbatched, loss_function="l2")
    loss_module.make_value_estimator(gamma=settings.gamma)
    target = SoftUpdate(loss_module, tau=settings.target_rate)
    weights = list(loss_module.parameters())
    optimizer = torch.optim.Adam(weights, lr=settings.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=settings.steps)

    pace = Pace(
        SPAWN.Condition() if in_process else threading.Condition(),
        first_step_at=settings.capacity,
        frames_per_step=settings.frames_per_step,
        lead=settings.frames_per_batch,
    )
    collector = CollectorSide(settings, rb, network, pace)
    run = Run(name, collector.episodes)
    queue: deque[TensorDictBase] = deque()

    def send_oldest() -> None:
        written, gone = write_priorities(rb, queue.popleft(), conditional=conditional)
        run.tally.book(written=written, gone=gone, frames=pace.written)

    try:
        collector.start()
        for step in range(settings.steps):
            pace.wait_for_step(collector.is_alive)
            sample = rb.sample()
            loss = loss_module(sample)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 10.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            target.step()
            if step % settings.publish_interval == 0:
                collector.publish(network)
            queue.append(sample)
            if len(queue) > settings.delay:
                send_oldest()
            pace.stepped()
            bar.update()
            if step % 100 == 0:
                collector.read_episodes()
                bar.set_postfix_str(f"{name}, return {run.recent_return:.0f}", refresh=False)
    finally:
        pace.close()
        collector.join()
    while queue:
        send_oldest()
    return run


# %%
# What came of it
# ---------------
#
# In the table, *sent* counts rows of batches and is the same for both runs. The conditional run
# accounts for each of them, ``sent = applied + stale``. The raw run applies all that it sends, so
# what is stale there is also misapplied.


def table(runs: Sequence[Run]) -> str:
    """The audit, one line per run."""
    header = ("run", "sent", "applied", "stale", "misapplied", "final return")
    rows = []
    for run in runs:
        counts = (run.tally.sent, run.tally.applied, run.tally.stale, run.tally.misapplied)
        rows.append((run.name, *(f"{n:,}" for n in counts), f"{run.recent_return:.1f}"))
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def draw(runs: Sequence[Run], settings: Settings) -> Figure:
    """Return, misapplied and stale priorities over the frames collected."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 7.5), sharex=True, layout="constrained", height_ratios=(1, 1)
    )
    for run, color in zip(runs, ("tab:red", "tab:blue"), strict=True):
        frames, scores = zip(*run.episodes, strict=True)
        smooth = [sum(scores[max(0, i - 19) : i + 1]) / min(20, i + 1) for i in range(len(scores))]
        top.scatter(frames, scores, s=5, color=color, alpha=0.2, linewidths=0)
        top.plot(frames, smooth, color=color, label=f"{run.name}: mean of 20 episodes")
        tally = run.tally
        # Stale lies under misapplied, broad and pale: in the raw run the two are the same numbers.
        bottom.plot(
            tally.frames,
            tally.stale_so_far,
            color=color,
            alpha=0.3,
            linewidth=6,
            label=f"{run.name}: stale ({tally.stale:,})",
        )
        bottom.plot(
            tally.frames,
            tally.misapplied_so_far,
            color=color,
            linewidth=1.6,
            label=f"{run.name}: misapplied ({tally.misapplied:,})",
        )
    top.set_title("Return of the episodes")
    top.set_ylabel("return")
    top.legend(loc="upper left")
    bottom.set_title(f"Priorities, of {runs[0].tally.sent:,} sent in each run")
    bottom.set_ylabel("rows, cumulative")
    bottom.set_xlabel("frames collected")
    bottom.yaxis.set_major_formatter("{x:,.0f}")
    bottom.xaxis.set_major_formatter("{x:,.0f}")
    bottom.legend(loc="upper left")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.suptitle(
        f"{settings.env}, {settings.capacity} slots, priorities {settings.delay} learner steps late"
    )
    return figure


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from the command line."""
    default = Settings()
    parser = argparse.ArgumentParser(
        description="Prioritized DQN with late priorities: update_priority, and if_present.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--env", default=default.env, help="Gymnasium environment with discrete actions")
    add("--frames", type=int, default=default.frames, help="frames to collect in each run")
    add("--capacity", type=int, default=default.capacity, help="slots of the buffer")
    add("--delay", type=int, default=default.delay, help="learner steps a priority comes late")
    add("--seed", type=int, default=default.seed, help="seed of the network and environments")
    add("--output", type=Path, default=default.output, help="folder for the figure")
    add(
        "--collector",
        choices=("process", "thread"),
        default=default.collector,
        help="where the collector works",
    )
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.capacity < settings.frames_per_batch:
        parser.error(
            f"--capacity must hold one batch of {settings.frames_per_batch} frames, "
            f"got {settings.capacity}."
        )
    if settings.frames < settings.capacity:
        parser.error(
            f"--frames must fill the buffer of {settings.capacity} slots, got {settings.frames}."
        )
    if settings.delay < 0:
        parser.error(f"--delay must not be negative, got {settings.delay}.")
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Both runs, the table and the figure. Returns the exit status."""
    settings = parse(arguments)
    settings.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # two sides, a core for each
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    with tqdm(total=2 * settings.steps, unit="step") as bar:
        raw = train("raw", settings, bar, conditional=False)
        guarded = train("conditional", settings, bar, conditional=True)

    print(table([raw, guarded]))
    path = settings.output / "async_prioritized_dqn.png"
    draw([raw, guarded], settings).savefig(path, dpi=120)
    print(f"figure: {path}")

    faults = []
    if guarded.tally.misapplied:
        faults.append(f"{guarded.tally.misapplied} priorities are on another record than their own")
    if guarded.tally.withheld:
        faults.append(f"{guarded.tally.withheld} priorities of live records were not written")
    for fault in faults:
        print(f"The conditional run is wrong: {fault}.", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__" and (status := main()):
    sys.exit(status)
