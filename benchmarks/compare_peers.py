"""Late priorities and throughput, next to other prioritized replay buffers.

One task for all: a full ring of 100,000 records (8 float32, a float32 reward, an int64 id), batches
of 256, alpha 0.6.

*Late priorities.* Sample a batch, let a writer put 12,500 records in, and so on with 1, 2 and 4
batches in flight; then update all of them with one large priority. A record that is then drawn far
too often has got it: if it was never sampled, a priority landed on a *wrong* record; a sampled
record that is still stored and was not raised was *dropped*. Whether the caller *learns* which rows
were written is told by what the update returned. The draws are counted, nothing is read out of
anybody's tree.

*Throughput.* Medians of adding 256 records, sampling and updating 256, in microseconds.

Every peer runs in a process of its own, one after the other. Reverb gets a virtual environment of
its own, since its tensorflow and our torch can't share one. A peer that is not installed is a line
that says so.

    python benchmarks/compare_peers.py [--output FILE.json] [--only PEER ...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CAPACITY = 100_000
BATCH = 256
ALPHA = 0.6
WRITTEN_BETWEEN = 12_500
IN_FLIGHT = (1, 2, 4)
LARGE = 1e6
DRAWS = 400  # batches: a raised record is expected some hundred times, any other one 0.1 times
RAISED = 10
ROUNDS = 200
REVERB_ENVIRONMENT = Path(__file__).parent.parent / ".venv-reverb"
REVERB_PINS = ("dm-reverb==0.14.0", "tensorflow-cpu==2.15.1")


def records(first: int, rows: int) -> dict[str, np.ndarray]:
    """Records whose id is their place in the order of writes."""
    rng = np.random.default_rng(first)
    return {
        "obs": rng.random((rows, 8), dtype=np.float32),
        "rew": rng.random(rows, dtype=np.float32),
        "id": np.arange(first, first + rows),
    }


class Peer:
    """What every buffer has to do here."""

    name: str
    needs: str  # the module to look for
    chunk = 10_000  # rows per add while the ring is filled

    def add(self, rows: dict[str, np.ndarray]) -> None:
        raise NotImplementedError

    def sample(self) -> tuple[Any, np.ndarray]:
        """A batch: what update() needs of it, and the ids of its records."""
        raise NotImplementedError

    def update(self, handle: Any, priority: np.ndarray) -> np.ndarray | None:
        """Updates; a mask of the rows that were written if the caller is told."""
        raise NotImplementedError

    def prepare(self, rows: dict[str, np.ndarray]) -> Any:
        """Converts records outside of the timing into what add() takes."""
        return rows

    def close(self) -> None:
        """Ends what the peer started."""


class TorchRL(Peer):
    name = "TorchRL"
    needs = "torchrl"

    def __init__(self) -> None:
        self.rb = self.make()

    def make(self) -> Any:
        import torchrl.data

        return self.build(torchrl.data)

    def build(self, module: Any, **kwargs: Any) -> Any:
        import torch
        from torchrl.data import LazyTensorStorage

        torch.set_num_threads(1)
        return module.TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=0.4, storage=LazyTensorStorage(CAPACITY), batch_size=BATCH, **kwargs
        )

    def prepare(self, rows: dict[str, np.ndarray]) -> Any:
        import torch
        from tensordict import TensorDict

        return TensorDict({key: torch.from_numpy(rows[key]) for key in rows}, [len(rows["id"])])

    def add(self, rows: Any) -> None:
        self.rb.extend(rows)

    def sample(self) -> tuple[Any, np.ndarray]:
        sample = self.rb.sample()
        return sample, sample["id"].numpy()

    def update(self, handle: Any, priority: np.ndarray) -> np.ndarray | None:
        import torch

        self.rb.update_priority(handle["index"], torch.from_numpy(priority))
        return None


class Ours(TorchRL):
    name = "this project"

    def make(self) -> Any:
        from torchrl.data.replay_buffers import generations

        return self.build(generations, track_generations=True)

    def update(self, handle: Any, priority: np.ndarray) -> np.ndarray | None:
        import torch

        result = self.rb.update_priority_if_present(
            index=handle["index"],
            generation=handle["index_generation"],
            priority=torch.from_numpy(priority),
        )
        return result.updated_mask.numpy()


class GuardedTorchRL(TorchRL):
    """TorchRL's own stamps and a guard written by hand, right while nobody else writes."""

    name = "TorchRL, guarded by hand"

    def make(self) -> Any:
        import torchrl.data
        from torchrl.data import LazyTensorStorage, PrioritizedSampler

        return torchrl.data.TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY),
            sampler=PrioritizedSampler(CAPACITY, alpha=ALPHA, beta=0.4),
            writer=torchrl.data.TensorDictRoundRobinWriter(track_generations=True),
            batch_size=BATCH,
        )

    def update(self, handle: Any, priority: np.ndarray) -> np.ndarray | None:
        import torch

        index = handle["index"]
        live = self.rb.writer.generations_of(index) == handle["index_generation"]
        self.rb.update_priority(index[live], torch.from_numpy(priority)[live])
        return live.numpy()


class Cpprb(Peer):
    name = "cpprb"
    needs = "cpprb"

    def __init__(self) -> None:
        from cpprb import PrioritizedReplayBuffer

        fields = {"obs": {"shape": 8}, "rew": {}, "id": {"dtype": np.int64}}
        self.rb = PrioritizedReplayBuffer(
            CAPACITY, fields, alpha=ALPHA, eps=1e-6, check_for_update=True
        )

    def add(self, rows: dict[str, np.ndarray]) -> None:
        self.rb.add(**rows)

    def sample(self) -> tuple[Any, np.ndarray]:
        sample = self.rb.sample(BATCH, beta=0.4)
        return sample["indexes"], sample["id"].reshape(-1)

    def update(self, handle: Any, priority: np.ndarray) -> np.ndarray | None:
        self.rb.update_priorities(handle, priority)
        return None


class Reverb(Peer):
    name = "Reverb"
    needs = "reverb"
    chunk = BATCH

    def __init__(self) -> None:
        import reverb
        import tensorflow as tf

        self.signature = {
            "obs": tf.TensorSpec([8], tf.float32),
            "rew": tf.TensorSpec([], tf.float32),
            "id": tf.TensorSpec([], tf.int64),
        }
        table = reverb.Table(
            name="t",
            sampler=reverb.selectors.Prioritized(ALPHA),
            remover=reverb.selectors.Fifo(),
            max_size=CAPACITY,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=self.signature,
        )
        self.server = reverb.Server([table])
        self.client = reverb.Client(f"localhost:{self.server.port}")
        self.writer = self.client.trajectory_writer(num_keep_alive_refs=1)

    def add(self, rows: dict[str, np.ndarray]) -> None:
        for row in range(len(rows["id"])):
            self.writer.append({key: rows[key][row] for key in self.signature})
            item = {key: self.writer.history[key][-1] for key in self.signature}
            self.writer.create_item("t", 1.0, item)
        self.writer.flush()

    def sample(self) -> tuple[Any, np.ndarray]:
        samples = list(self.client.sample("t", BATCH, emit_timesteps=False))
        position = sorted(self.signature).index("id")  # data is flat, in the order of tf.nest
        ids = [int(sample.data[position]) for sample in samples]
        return [sample.info.key for sample in samples], np.asarray(ids)

    def update(self, handle: Any, priority: np.ndarray) -> np.ndarray | None:
        updates = dict(zip(handle, priority.tolist(), strict=True))
        return self.client.mutate_priorities("t", updates=updates)

    def close(self) -> None:
        self.server.stop()


class Flashbax(Peer):
    name = "flashbax"
    needs = "flashbax"
    chunk = BATCH

    def __init__(self) -> None:
        import flashbax
        import jax
        import jax.numpy as jnp

        self.jax, self.jnp = jax, jnp
        buffer = flashbax.make_prioritised_item_buffer(
            max_length=CAPACITY // BATCH * BATCH,
            min_length=1,
            sample_batch_size=BATCH,
            add_batches=True,
            priority_exponent=ALPHA,
            device="cpu",
        )
        item = {"obs": jnp.zeros(8), "rew": jnp.zeros(()), "id": jnp.zeros((), jnp.int32)}
        self.state = buffer.init(item)
        self.add_now = jax.jit(buffer.add, donate_argnums=0)
        self.sample_now = jax.jit(buffer.sample)
        self.update_now = jax.jit(buffer.set_priorities, donate_argnums=0)
        self.key = jax.random.PRNGKey(0)

    def prepare(self, rows: dict[str, np.ndarray]) -> Any:
        return {**rows, "id": rows["id"].astype(np.int32)}

    def add(self, rows: Any) -> None:
        self.state = self.jax.block_until_ready(self.add_now(self.state, rows))

    def sample(self) -> tuple[Any, np.ndarray]:
        self.key, key = self.jax.random.split(self.key)
        sample = self.jax.block_until_ready(self.sample_now(self.state, key))
        return sample.indices, np.asarray(sample.experience["id"]).reshape(-1)

    def update(self, handle: Any, priority: np.ndarray) -> np.ndarray | None:
        state = self.update_now(self.state, handle, self.jnp.asarray(priority))
        self.state = self.jax.block_until_ready(state)
        return None


class Tianshou(Peer):
    name = "Tianshou"
    needs = "tianshou"
    chunk = BATCH

    def __init__(self) -> None:
        from tianshou.data import Batch, PrioritizedVectorReplayBuffer

        self.batch = Batch
        self.rb = PrioritizedVectorReplayBuffer(
            CAPACITY // BATCH * BATCH, buffer_num=BATCH, alpha=ALPHA, beta=0.4
        )

    def prepare(self, rows: dict[str, np.ndarray]) -> Any:
        done = np.zeros(len(rows["id"]), dtype=bool)
        return self.batch(
            obs=rows["obs"],
            obs_next=rows["obs"],
            act=rows["id"],
            rew=rows["rew"],
            terminated=done,
            truncated=done,
            info=self.batch(),
        )

    def add(self, rows: Any) -> None:
        self.rb.add(rows)

    def sample(self) -> tuple[Any, np.ndarray]:
        batch, index = self.rb.sample(BATCH)
        return index, np.asarray(batch.act)

    def update(self, handle: Any, priority: np.ndarray) -> np.ndarray | None:
        self.rb.update_weight(handle, priority)
        return None


PEERS = {
    cls.name: cls for cls in (Ours, TorchRL, GuardedTorchRL, Cpprb, Reverb, Flashbax, Tianshou)
}


def fill(peer: Peer, first: int, rows: int) -> int:
    """Adds ``rows`` records, in whole chunks, and returns the id after the last one."""
    end = first + rows
    while first < end:
        count = peer.chunk if peer.chunk == BATCH else min(peer.chunk, end - first)
        peer.add(peer.prepare(records(first, count)))
        first += count
    return first


def late_priorities(peer: Peer, in_flight: int) -> dict[str, Any]:
    """What becomes of the priorities of some batches that the writer has overtaken."""
    written = fill(peer, 0, CAPACITY)
    batches = []
    for _ in range(in_flight):
        batches.append(peer.sample())
        written = fill(peer, written, WRITTEN_BETWEEN)
    capacity = CAPACITY // BATCH * BATCH if isinstance(peer, (Flashbax, Tianshou)) else CAPACITY
    oldest = written - capacity
    told = []
    for handle, ids in batches:
        mask = peer.update(handle, np.full(BATCH, LARGE, dtype=np.float32))
        told.append(mask is not None and bool((mask == (ids >= oldest)).all()))
    drawn = np.concatenate([peer.sample()[1] for _ in range(DRAWS)])
    values, counts = np.unique(drawn, return_counts=True)
    raised = values[counts >= RAISED]
    sampled = np.unique(np.concatenate([ids for _, ids in batches]))
    live = sampled[sampled >= oldest]
    return {
        "in_flight": in_flight,
        "sampled": len(sampled),
        "stale": len(sampled) - len(live),
        "wrong": int((~np.isin(raised, sampled)).sum()),
        "dropped": int((~np.isin(live, raised)).sum()),
        "caller_learns": all(told),
    }


def throughput(peer: Peer) -> dict[str, float]:
    """Median microseconds of adding, sampling and updating a batch."""
    written = fill(peer, 0, CAPACITY)
    times: dict[str, list[float]] = {"add": [], "sample": [], "update": []}
    priority = np.random.default_rng(0).random(BATCH).astype(np.float32) + 0.1
    for _ in range(ROUNDS):
        rows = peer.prepare(records(written, BATCH))
        written += BATCH
        start = time.perf_counter()
        peer.add(rows)
        added = time.perf_counter()
        handle, _ = peer.sample()
        sampled = time.perf_counter()
        peer.update(handle, priority)
        end = time.perf_counter()
        for name, begun, ended in (
            ("add", start, added),
            ("sample", added, sampled),
            ("update", sampled, end),
        ):
            times[name].append(ended - begun)
    return {name: statistics.median(series) * 1e6 for name, series in times.items()}


def measure(name: str) -> dict[str, Any]:
    """Everything about one peer; each part on a new buffer."""
    results: dict[str, Any] = {"peer": name, "late": []}
    for in_flight in (*IN_FLIGHT, None):
        peer = PEERS[name]()
        with contextlib.closing(peer):
            if in_flight is None:
                results["throughput"] = throughput(peer)
            else:
                results["late"].append(late_priorities(peer, in_flight))
    return results


def reverb_python() -> str:
    """The interpreter of Reverb's own environment, which is made at the first call."""
    python = REVERB_ENVIRONMENT / "bin" / "python"
    done = REVERB_ENVIRONMENT / ".installed"
    if not done.exists():
        print(f"Making {REVERB_ENVIRONMENT} for {' '.join(REVERB_PINS)} (1.3 GB) ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(REVERB_ENVIRONMENT)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *REVERB_PINS]
        subprocess.run(install, check=True)
        done.touch()
    return str(python)


def run(name: str) -> dict[str, Any]:
    """Measures a peer in a process of its own; says why where that is not possible."""
    try:
        python = reverb_python() if name == Reverb.name else sys.executable
    except (OSError, subprocess.CalledProcessError) as error:
        return {"peer": name, "missing": f"its environment could not be made: {error}"}
    if name != Reverb.name and importlib.util.find_spec(PEERS[name].needs) is None:
        return {"peer": name, "missing": f"{PEERS[name].needs} is not installed"}
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "RL_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [python, __file__, "--measure", name],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        return {"peer": name, "missing": f"it failed: {done.stderr.strip().splitlines()[-1]}"}
    return json.loads(done.stdout.splitlines()[-1])


def row(result: dict[str, Any]) -> str:
    """A line of the table."""
    if "missing" in result:
        return f"{result['peer']:26} not measured: {result['missing']}"
    late = "  ".join(f"{part['wrong']:4d} {part['dropped']:5d}" for part in result["late"])
    learns = "yes" if all(part["caller_learns"] for part in result["late"]) else "no"
    speed = " ".join(f"{result['throughput'][name]:9.0f}" for name in ("add", "sample", "update"))
    return f"{result['peer']:26} {late}   {learns:6} {speed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=PEERS, help="measure these peers only")
    parser.add_argument("--measure", choices=PEERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    flights = "  ".join(f"{f'{count} in flight':>10}" for count in IN_FLIGHT)
    print(f"{'':26} {flights}   caller  microseconds per batch of {BATCH}")
    heads = "  ".join("wrong dropd" for _ in IN_FLIGHT)
    print(f"{'':26} {heads}  learns       add    sample    update", flush=True)
    results = []
    for name in arguments.only or PEERS:
        results.append(run(name))
        print(row(results[-1]), flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
