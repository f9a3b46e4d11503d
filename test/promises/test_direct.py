"""The direct path gives what TorchRL's own gives, to the bit, and refuses what that refuses.

Random histories run on a tracked buffer of ours beside TorchRL's of the same name, with the same
seeds. After each step both must agree in every record, index, weight, leaf, cursor and counter.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data
from common import stamps
from tensordict import TensorDict, is_tensor_collection, lazy_stack, tensorclass
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorStorage
from torchrl.data.replay_buffers import generations
from torchrl.data.replay_buffers import samplers as torchrl_samplers
from torchrl.data.replay_buffers.generations.writers import ring
from torchrl.data.replay_buffers.generations.writers.columns import Columns, columns_of

# TorchRL's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
    pytest.mark.filterwarnings(r"ignore:Using `add\(\)` with a TensorDict"),
]

CAPACITY, BATCH, STEPS = 12, 6, 3
OURS_ALONE = {"index_generation", "_generation", "_lineage", "_live_generation"}
PER = {"alpha": 0.7, "beta": 0.5}


# ------------------------------------------------------------------ records


@tensorclass
class Step:
    obs: torch.Tensor
    done: torch.Tensor


def flags(lead: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(lead) < 0.5


def images(lead: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(256, (*lead, 2, 4, 4), dtype=torch.uint8)


def nested(lead: tuple[int, ...]) -> TensorDict:
    done = flags((*lead, 1))
    return TensorDict(
        {
            "obs": torch.randn(*lead, 3),
            "next": {
                "done": done,
                "half": torch.randn(*lead, 2).half(),
                "deep": {"wide": torch.randn(lead, dtype=torch.float64)},
            },
            "brain": torch.randn(*lead, 2).bfloat16(),
            "pixels": images(lead),
            "episode": torch.arange(lead[0]) // 3 if lead else torch.tensor(9),
        },
        lead,
    )


def rated(lead: tuple[int, ...]) -> TensorDict:
    return TensorDict({"obs": torch.randn(*lead, 3), "td_error": 3 * torch.rand(lead)}, lead)


def waves(lead: tuple[int, ...]) -> TensorDict:
    return TensorDict({"a": {"wave": torch.randn(*lead, 2, dtype=torch.complex64)}}, lead)


def trajectories(lead: tuple[int, ...]) -> TensorDict:
    shape = (*lead, STEPS)
    return TensorDict({"obs": torch.randn(*shape, 2), "next": {"done": flags((*shape, 1))}}, shape)


def classes(lead: tuple[int, ...]) -> Any:
    return Step(obs=torch.randn(*lead, 3), done=flags(lead), batch_size=lead)


def pytrees(lead: tuple[int, ...]) -> dict[str, Any]:
    return {"a": torch.randn(*lead, 2), "b": (images(lead), flags(lead))}


RECORDS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "nested": nested,
    "rated": rated,
    "waves": waves,
    "trajectories": trajectories,
    "classes": classes,
    "images": images,
    "pytrees": pytrees,
}
TENSORDICTS = ("nested", "rated", "waves", "trajectories")
STORAGES: dict[str, Callable[[Any, bool], Any]] = {
    "lazy": lambda make, slots: LazyTensorStorage(CAPACITY),
    "memmap": lambda make, slots: LazyMemmapStorage(CAPACITY),
    "tensor": lambda make, slots: TensorStorage(
        with_slots(make((CAPACITY,))) if slots else make((CAPACITY,))
    ),
    "list": lambda make, slots: ListStorage(CAPACITY),
}
# What TorchRL's storages don't take.
IMPOSSIBLE = {("waves", "memmap"), ("pytrees", "list")}


def with_slots(records: Any) -> Any:
    """Records as a tensordict buffer's writer makes them, which adds ``index``."""
    return records.set("index", torch.zeros(records.shape, dtype=torch.int64))


# ------------------------------------------------------------------ two buffers, side by side


def bits(value: Any) -> Any:
    """What is compared of a value, to the bit: of a tensor its type, dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return type(value), value.dtype, value.shape, raw.tolist()
    if is_tensor_collection(value):
        entries = [(key, bits(value.get(key))) for key in value.keys() if key not in OURS_ALONE]  # noqa: SIM118
        return type(value), value.batch_size, value.device, value.names, value.is_locked, entries
    if isinstance(value, dict):
        return type(value), [(k, bits(v)) for k, v in value.items() if k not in OURS_ALONE]
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    if hasattr(value, "scan_lower_bound") or hasattr(value, "query"):  # a tree
        return bits(torch.as_tensor(value[torch.arange(CAPACITY)]))
    return value


def state(rb: Any) -> dict[str, Any]:
    """All that a step may change, but what is ours alone."""
    storage, writer = rb.storage, rb.writer
    of_sampler = {key: bits(value) for key, value in rb.sampler.state_dict().items()}
    records = storage[:] if len(storage) else []
    return {
        "records": bits(records),
        "length": len(storage),
        "cursor": (writer._cursor, writer._write_count, rb.write_count),
        "last": bits(getattr(storage, "_last_cursor", None)),
        "last index": storage._last_cursor_index,
        # A lap that goes TorchRL's way is written in two parts.
        "revision": columns_of(storage) and storage._mutation_revision,
        "sampler": of_sampler,
        "writer": bits(writer.state_dict()),
    }


class Beside:
    """A tracked buffer of ours and one of TorchRL's, to which the same is done with equal seeds."""

    def __init__(self, cls: str, records: str, storage: str = "lazy", **parts: Any) -> None:
        self.make = RECORDS[records]
        self.steps = self.seed = 0
        generator = parts.pop("generator", False)
        self.sides = []
        for module, tracked in ((generations, {"track_generations": True}), (torchrl.data, {})):
            torch.manual_seed(0)
            made = {name: part() if callable(part) else part for name, part in parts.items()}
            stored = STORAGES[storage](self.make, cls.startswith("TensorDict"))
            rb = getattr(module, cls)(storage=stored, batch_size=BATCH, **tracked, **made)
            if generator:
                rb.set_rng(torch.Generator().manual_seed(7))
            self.sides.append(rb)

    @property
    def ours(self) -> Any:
        return self.sides[0]

    def do(self, step: Callable[[Any], Any]) -> Any:
        """Does a step to both, and compares what it returns and what it leaves behind."""
        self.seed += 1
        outcomes = []
        for rb in self.sides:
            torch.manual_seed(self.seed)
            np.random.seed(self.seed)
            outcomes.append(step(rb))
        self.steps += 1
        assert bits(outcomes[0]) == bits(outcomes[1])
        ours, theirs = map(state, self.sides)
        for name in theirs:
            assert ours[name] == theirs[name], name
        return outcomes[0]


def extend(rows: int, beside: Beside) -> Callable[[Any], Any]:
    def step(rb: Any) -> Any:
        data = beside.make((rows,))
        return rb.extend(data), data

    return step


def add(beside: Beside) -> Callable[[Any], Any]:
    def step(rb: Any) -> Any:
        data = beside.make(())
        return rb.add(data), data

    return step


def sample(rb: Any) -> Any:
    stored = rb.storage._storage
    if rb._is_tensordict and isinstance(stored, list):
        # TorchRL writes weights into the records of a list that it samples. That is no promise.
        rb.storage._storage = [record.copy() for record in stored]
    sampled = rb.sample(return_info=True)
    rb.storage._storage = stored
    return sampled


def update(rows: int) -> Callable[[Any], Any]:
    def step(rb: Any) -> Any:
        slots = torch.randint(len(rb), (rows,))
        return rb.update_priority(slots, torch.rand(rows) * 2)

    return step


def assign(beside: Beside) -> Callable[[Any], Any]:
    def step(rb: Any) -> Any:
        slots = torch.randperm(len(rb))[:2]
        data = beside.make((len(slots),))
        if rb._is_tensordict and isinstance(rb.storage, TensorStorage):
            data = with_slots(data)
        rb[slots] = data
        if rb is not beside.ours:  # ours gives records the default priority, whoever writes them
            rb.mark_update(slots)
        return data

    return step


def write_at(beside: Beside) -> Callable[[Any], Any]:
    def step(rb: Any) -> Any:
        slots = torch.randperm(len(rb))[:3]
        data = beside.make((len(slots),))
        return rb.writer.write_at(slots, data), data

    return step


def empty(rb: Any) -> Any:
    return rb.empty()


def history(beside: Beside, steps: int, choose: random.Random, priorities: bool) -> None:
    """A random history, which begins with a full storage and goes over its end several times."""
    beside.do(extend(CAPACITY, beside))
    # TorchRL lets a row that its own call overwrites count for the largest priority.
    laps = beside.make is not rated
    for _ in range(steps):
        kind = choose.choices(
            ["extend", "lap", "add", "sample", "update", "assign", "write_at", "empty"],
            [6, laps, 4, 8, 4 * priorities, 1, 1, 0.5],
        )[0]
        if kind == "extend":
            beside.do(extend(choose.randint(1, CAPACITY), beside))
        elif kind == "lap":
            beside.do(extend(choose.randint(CAPACITY + 1, 3 * CAPACITY), beside))
        elif kind == "add":
            beside.do(add(beside))
        elif kind == "sample":
            beside.do(sample)
        elif kind == "update":
            beside.do(update(choose.randint(1, BATCH)))
        elif kind == "assign":
            beside.do(assign(beside))
        elif kind == "write_at":
            beside.do(write_at(beside))
        else:
            beside.do(empty)
            beside.do(extend(choose.randint(1, CAPACITY), beside))


PRIORITIZED = [
    (cls, records, storage)
    for cls in ("PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer")
    for records in (TENSORDICTS if cls.startswith("Tensor") else RECORDS)
    for storage in STORAGES
    if (records, storage) not in IMPOSSIBLE
]
SLICES = {"num_slices": 2, "traj_key": "episode", "strict_length": False}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": torchrl_samplers.RandomSampler,
    "without replacement": torchrl_samplers.SamplerWithoutReplacement,
    "in order": lambda: torchrl_samplers.SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "plain priorities": lambda: torchrl_samplers.PrioritizedSampler(CAPACITY, 0.0, 0.0),
    "sharp priorities": lambda: torchrl_samplers.PrioritizedSampler(
        CAPACITY, alpha=1.3, beta=1.0, eps=0.1, reduction="mean"
    ),
    "more leaves": lambda: torchrl_samplers.PrioritizedSampler(CAPACITY + 3, **PER),
    "highest within": lambda: torchrl_samplers.PrioritizedSampler(
        CAPACITY, **PER, max_priority_within_buffer=True
    ),
    "slices": lambda: torchrl_samplers.SliceSampler(**SLICES),
    "slices once": lambda: torchrl_samplers.SliceSamplerWithoutReplacement(**SLICES),
    "prioritized slices": lambda: torchrl_samplers.PrioritizedSliceSampler(
        CAPACITY, **PER, **SLICES
    ),
    "consuming": lambda: torchrl_samplers.ConsumingSampler(3),
}
VARIANTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    **{str(case): (case, PER) for case in PRIORITIZED},
    **{
        f"{cls}, {name}": ((cls, "nested"), {"sampler": make})
        for cls in ("ReplayBuffer", "TensorDictReplayBuffer")
        for name, make in SAMPLERS.items()
    },
    "a generator": (PRIORITIZED[0], {**PER, "generator": True}),
    "a generator, random": (
        ("ReplayBuffer", "nested"),
        {"sampler": SAMPLERS["random"], "generator": True},
    ),
}


def run(variant: str, steps: int, seed: int) -> int:
    case, parts = VARIANTS[variant]
    beside = Beside(*case, **parts)
    with_priorities = hasattr(beside.ours.sampler, "_sum_tree")
    history(beside, steps, random.Random(seed), with_priorities)
    return beside.steps


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_history_is_torchrls(variant):
    run(variant, steps=12, seed=0)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_long_histories_are_torchrls():
    assert sum(run(variant, 200, seed=1) for variant in VARIANTS) > 10_000


# ------------------------------------------------------------------ the direct path is taken


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("make", [nested, trajectories, rated])
def test_the_histories_take_the_direct_path(make, storage, monkeypatch):
    rb = generations.TensorDictPrioritizedReplayBuffer(
        storage=storage(CAPACITY), batch_size=BATCH, **PER, track_generations=True
    )
    rb.extend(make((CAPACITY,)))
    calls = []
    for name in ("copy_ring", "copy_one"):
        copied = getattr(ring, name)
        monkeypatch.setattr(
            ring, name, lambda *args, name=name, copied=copied: (calls.append(name), copied(*args))
        )
    monkeypatch.setattr(storage, "_set_last_cursor", None)  # TorchRL's set() would fail here
    rb.extend(make((3,)))
    rb.extend(make((2 * CAPACITY + 1,)))
    if make is nested:
        rb.add(make(()))
        assert calls.pop() == "copy_one"
    assert calls == ["copy_ring"] * 2
    reads, columns_read = [], Columns.read
    monkeypatch.setattr(
        Columns, "read", lambda self, index: (reads.append(index), columns_read(self, index))[1]
    )
    assert rb.sample()["index"].reshape(BATCH, -1)[:, 0].tolist() == reads[0].tolist()


# ------------------------------------------------------------------ what differs


def other(lead: tuple[int, ...], **entries: Any) -> TensorDict:
    """Records with other entries than those that are stored; None takes one out."""
    rows = torch.arange(6.0).expand(*lead, 6)
    plain = {"a": rows[..., :2].clone(), "n": {"b": torch.ones(lead, dtype=torch.int64)}}
    data = TensorDict(plain, lead)
    for name, value in entries.items():
        key = ("n", "b") if name == "b" else name
        if value is None:
            data = data.exclude(key)
        else:
            data.set(key, value(rows))
    return data


class Labelled(torch.Tensor):
    """A user's kind of tensor."""


ODD: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "as stored": other,
    "no a": lambda lead: other(lead, a=None),
    "no b": lambda lead: other(lead, b=None),
    "no n": lambda lead: other(lead, n=None),
    "one more": lambda lead: other(lead, more=lambda rows: rows[..., 0]),
    "another order": lambda lead: TensorDict(dict(reversed(other(lead).items())), lead),
    "broadcast": lambda lead: other(lead, a=lambda rows: rows[..., :1]),
    "no rows": lambda lead: other(()),
    "wider": lambda lead: other(lead, a=lambda rows: rows[..., :3]),
    "deeper": lambda lead: other(lead, a=lambda rows: rows[..., :2, None]),
    "double": lambda lead: other(lead, a=lambda rows: rows[..., :2].double()),
    "half": lambda lead: other(lead, a=lambda rows: rows[..., :2].half()),
    "integer": lambda lead: other(lead, a=lambda rows: rows[..., :2].long()),
    "float for integer": lambda lead: other(lead, b=lambda rows: rows[..., 0] + 0.5),
    "grad": lambda lead: other(lead, a=lambda rows: rows[..., :2].clone().requires_grad_()),
    "strided": lambda lead: other(lead, a=lambda rows: rows[..., ::3]),
    "expanded": lambda lead: other(lead, a=lambda rows: rows[..., :1].expand(*lead, 2)),
    "negative": lambda lead: other(lead, a=lambda rows: torch._neg_view(rows[..., :2])),
    "subclass": lambda lead: other(lead, a=lambda rows: rows[..., :2].as_subclass(Labelled)),
    "parameter": lambda lead: other(lead, a=lambda rows: torch.nn.Parameter(rows[..., :2])),
    "sparse": lambda lead: other(lead, a=lambda rows: rows[..., :2].to_sparse()),
    "tensordict for a": lambda lead: other(lead, a=lambda rows: TensorDict({}, lead)),
    "text": lambda lead: other(lead).set_non_tensor("more", "text"),
    "locked": lambda lead: other(lead).lock_(),
    "shared": lambda lead: other(lead).share_memory_(),
    "memory-mapped": lambda lead: other(lead).memmap_(),
    "on a device": lambda lead: other(lead).to("cpu"),
    "named": lambda lead: other(lead).refine_names(*["rows"] * len(lead)),
    "stacked": lambda lead: lazy_stack([other(())] * lead[0]) if lead else other(lead),
    "stacked within": lambda lead: (
        other(lead, n=lambda rows: lazy_stack([other(())["n"]] * lead[0])) if lead else other(lead)
    ),
    "a tensor": lambda lead: torch.zeros(*lead, 2),
}
WRITES: dict[str, tuple[tuple[int, ...], Callable[[Any, Any], Any]]] = {
    "extend": ((3,), lambda rb, data: rb.extend(data)),
    "add": ((), lambda rb, data: rb.add(data)),
    "of the writer": ((3,), lambda rb, data: rb.writer.extend(data)),
    "write_at": ((3,), lambda rb, data: rb.writer.write_at(torch.tensor([0, 2, 4]), data)),
}


@pytest.mark.parametrize("cls", ["PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ODD)
def test_what_torchrl_takes_is_taken_and_what_it_refuses_changes_nothing(kind, write, cls):
    lead, put = WRITES[write]
    beside = Beside(cls, "nested", **PER)
    for rows in (CAPACITY, 5):
        beside.do(lambda rb, rows=rows: rb.extend(other((rows,))))
    ours, theirs = beside.sides
    try:
        put(theirs, ODD[kind](lead))
    except Exception:
        before = state(ours), stamps(ours).tolist()
        data = ODD[kind](lead)
        with pytest.raises((ValueError, RuntimeError)):
            put(ours, data)
        assert (state(ours), stamps(ours).tolist()) == before
    else:
        put(ours, ODD[kind](lead))
        assert state(ours) == state(theirs)


# ------------------------------------------------------------------ what a user overrides


def counted(calls: list[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    return count


def overriding(cls: type, names: tuple[str, ...], calls: list[str]) -> type:
    """A user's subclass that counts the calls of some methods."""
    return type(cls.__name__, (cls,), {n: counted(calls, n, getattr(cls, n)) for n in names})


def all_steps(rb: Any, seed: int) -> Any:
    """Two writes and a sample."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    extended, added = nested((3,)), nested(())
    index = rb.extend(extended), rb.add(added)
    return bits([index, extended, added, rb.sample()])


PARTS: dict[str, tuple[str, ...]] = {
    "buffer": (
        *("add", "extend", "sample", "_add", "_extend", "_sample", "mark_update"),
        *("update_tensordict_priority", "_get_priority_item", "_set_index_in_td"),
    ),
    "sampler": ("sample", "add", "extend", "mark_update"),
    "writer": ("add", "extend"),
    "storage": ("get", "set"),
}


@pytest.mark.parametrize("on", ["a subclass", "an instance"])
@pytest.mark.parametrize(("part", "name"), [(p, n) for p, names in PARTS.items() for n in names])
def test_a_step_that_a_user_overrides_is_taken_as_often_as_torchrl_takes_it(part, name, on):
    outcomes = []
    prefix = "" if name in ("_add", "_extend") else "TensorDict"  # whose methods call past these
    for module in (generations, torchrl.data):
        calls: list[str] = []
        made = {
            "buffer": getattr(module, f"{prefix}ReplayBuffer"),
            "sampler": torchrl_samplers.PrioritizedSampler,
            "writer": getattr(module, f"{prefix}RoundRobinWriter"),
            "storage": LazyTensorStorage,
        }
        if on == "a subclass":
            made[part] = overriding(made[part], (name,), calls)
        tracks = {"track_generations": True} if module is generations else {}
        rb = made["buffer"](
            storage=made["storage"](CAPACITY),
            sampler=made["sampler"](CAPACITY, **PER),
            writer=made["writer"](**tracks),
            batch_size=BATCH,
        )
        torch.manual_seed(0)
        rb.extend(nested((CAPACITY,)))
        if on == "an instance":
            whole = rb if part == "buffer" else getattr(rb, part)
            setattr(whole, name, counted(calls, name, getattr(whole, name)))
        calls.clear()
        outcomes.append((all_steps(rb, 1), calls.count(name), state(rb)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] >= 1


@pytest.mark.parametrize(
    "parts",
    [
        {"transform": lambda: lambda data: data.set("twice", data["obs"] * 2)},
        {"collate_fn": lambda: lambda data: data.set("seen", data["obs"] + 1)},
    ],
    ids=["transform", "collate_fn"],
)
def test_what_a_user_does_to_a_sample_is_done(parts):
    beside = Beside("TensorDictPrioritizedReplayBuffer", "nested", **PER, **parts)
    beside.do(extend(CAPACITY, beside))
    added = {"twice", "seen"} & set(beside.do(sample)[0].keys())
    assert len(added) == 1


@pytest.mark.parametrize("generator", [False, True])
def test_prefetched_samples_are_torchrls(generator):
    beside = Beside(
        "TensorDictPrioritizedReplayBuffer", "nested", prefetch=1, generator=generator, **PER
    )
    beside.do(extend(CAPACITY, beside))

    def samples(rb: Any) -> Any:
        drawn = [rb.sample() for _ in range(10)]
        for prefetched in rb._prefetch_queue:  # before the other side draws
            prefetched.result()
        return drawn

    assert beside.do(samples)[0]["index_generation"].tolist() == [0] * BATCH


# ------------------------------------------------------------------ what changes behind the back


def named(index: torch.Tensor) -> type:
    """A user's sampler that always names these slots."""

    def sample(self: Any, storage: Any, batch_size: int) -> Any:
        return index, {}

    return type("Named", (torchrl_samplers.RandomSampler,), {"sample": sample})


@pytest.mark.parametrize("storage", ["lazy", "memmap"])
@pytest.mark.parametrize("records", ["nested", "images", "classes"])
@pytest.mark.parametrize("rows", [CAPACITY, 7])
@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([0, -1, 3]),
        torch.tensor([0, 9]),
        torch.tensor([0, CAPACITY]),
        torch.tensor([-CAPACITY - 1]),
        torch.tensor([2, 1], dtype=torch.int32),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor(3),
    ],
    ids=str,
)
def test_any_index_of_a_users_sampler_reads_what_torchrl_reads(index, rows, records, storage):
    beside = Beside("ReplayBuffer", records, storage, sampler=named(index))
    beside.do(extend(rows, beside))
    try:
        beside.sides[1].sample()
    except IndexError:
        with pytest.raises(IndexError):
            beside.ours.sample()
    else:
        beside.do(sample)


def unlocked(rb: Any) -> TensorDict:
    return rb.storage._storage.unlock_()


def load_into_the_same_tensor(rb: Any) -> None:
    rb.update_priority(torch.tensor([0, 1]), torch.tensor([5.0, 3.0]))
    rb.extend(nested((1,)))
    rb.sampler._max_priority[0].fill_(2.0)


BEHIND: dict[str, Callable[[Any], Any]] = {
    "a leaf": lambda rb: unlocked(rb).set("obs", torch.ones(CAPACITY, 3)),
    "a nested leaf": lambda rb: unlocked(rb).set(("next", "done"), flags((CAPACITY, 1))),
    "a nested tensordict": lambda rb: unlocked(rb).set("next", unlocked(rb)["next"].clone()),
    "all": lambda rb: setattr(rb.storage, "_storage", unlocked(rb).clone()),
    "another name": lambda rb: unlocked(rb).rename_key_("obs", "seen"),
    "one less": lambda rb: unlocked(rb).del_("obs"),
    "one more": lambda rb: unlocked(rb).set("more", torch.ones(CAPACITY)),
    "text": lambda rb: unlocked(rb).set_non_tensor("more", "text"),
    "a lock": lambda rb: rb.storage._storage.lock_(),
    "no device": lambda rb: rb.storage._storage.clear_device_(),
    "names": lambda rb: setattr(unlocked(rb), "names", ["slot"]),
    "a smaller batch": lambda rb: setattr(unlocked(rb)["next"], "batch_size", [CAPACITY]),
    "shared memory": lambda rb: rb.storage._storage.share_memory_(),
    "numbers": lambda rb: rb.storage._storage["obs"].zero_(),
    "rb[key]": lambda rb: rb.__setitem__("obs", torch.ones(CAPACITY, 3)),
    "set_": lambda rb: rb.set_("obs", torch.ones(CAPACITY, 3)),
    "exponents": lambda rb: (setattr(rb.sampler, "alpha", 0.4), setattr(rb.sampler, "beta", 0.9)),
    "the largest priority": lambda rb: setattr(rb.sampler, "_max_priority", (3.0, 1)),
    "the same tensor": load_into_the_same_tensor,
    "a state": lambda rb: rb.load_state_dict(copy.deepcopy(rb.state_dict())),
}


@pytest.mark.parametrize("change", BEHIND)
@pytest.mark.parametrize("storage", ["lazy", "memmap"])
def test_what_changes_behind_the_back_is_seen(storage, change):
    if storage == "memmap" and change in ("shared memory", "rb[key]"):
        pytest.skip("TorchRL's memory-mapped records refuse it")
    beside = Beside("TensorDictPrioritizedReplayBuffer", "nested", storage, **PER)
    beside.do(extend(CAPACITY, beside))
    beside.do(sample)
    beside.do(lambda rb: (BEHIND[change](rb), None)[1])
    for step in (sample, extend(5, beside), sample, add(beside), sample):
        beside.do(step)


@pytest.mark.parametrize("priorities", [(), (1,), (STEPS,), (STEPS, 2)], ids=str)
def test_a_record_that_brings_priorities_gets_the_leaf_that_torchrl_gives_it(priorities):
    beside = Beside("TensorDictPrioritizedReplayBuffer", "trajectories", **PER)
    shape = [STEPS] if priorities[:1] == (STEPS,) else []

    def step(rb: Any) -> Any:
        rated = {"obs": torch.randn(*shape, 2), "td_error": torch.rand(priorities)}
        return rb.add(TensorDict(rated, shape))

    for _ in range(3):
        beside.do(step)


def test_a_draw_past_the_last_record_goes_back_to_one_with_a_priority(monkeypatch):
    beside = Beside("PrioritizedReplayBuffer", "images", **PER)
    beside.do(extend(CAPACITY, beside))
    beside.do(lambda rb: rb.sampler._sum_tree.__setitem__(np.arange(9, CAPACITY), 0.0))
    monkeypatch.setattr(np.random, "uniform", lambda low, high, size: np.full(size, high + 1))
    _, info = beside.do(sample)
    assert info["index"].tolist() == [8] * BATCH


def test_a_patch_of_torchrls_draw_is_called(monkeypatch):
    beside = Beside("TensorDictPrioritizedReplayBuffer", "nested", **PER)
    beside.do(extend(CAPACITY, beside))
    cls, calls = torchrl_samplers.PrioritizedSampler, []
    monkeypatch.setattr(cls, "sample", counted(calls, "sample", cls.sample))
    beside.do(sample)
    assert calls == ["sample"] * 2
