"""Compiled extends, samples and comparisons, against the eager ones and TorchRL's own graphs."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torchrl.data
from common import stamps
from tensordict import TensorDict
from torch._dynamo.utils import counters
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import generations

CAPACITY = 10

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make(module, tensordict: bool, track: bool = True):
    prefix = "TensorDict" if tensordict else ""
    writer = getattr(module, prefix + "RoundRobinWriter")
    return getattr(module, prefix + "ReplayBuffer")(
        storage=LazyTensorStorage(CAPACITY, compilable=True),
        writer=writer(compilable=True, track_generations=track),
        batch_size=4,
        compilable=True,
    )


def records(tensordict: bool, first: int, rows: int):
    data = torch.arange(first, first + rows)
    return TensorDict({"id": data}, [rows]) if tensordict else data


def step(rb, tensordict: bool):
    def extend_and_sample(data):
        rb.extend(data)
        if tensordict:
            sample = rb.sample()
            return sample["id"], sample["index"], sample["index_generation"]
        data, info = rb.sample(return_info=True)
        return data, info["index"], info["index_generation"]

    return extend_and_sample


def break_reasons() -> set[str]:
    return {reason.split("\n")[0] for reason in counters["graph_break"]}


def reasons_to_break_torchrls_own(tensordict: bool) -> set[str]:
    compiled = torch.compile(step(make(torchrl.data, tensordict), tensordict), backend="eager")
    for call in range(5):
        compiled(records(tensordict, 3 * call, 3))
    return break_reasons()


@pytest.mark.parametrize("tensordict", [False, True])
def test_compiled_extends_and_samples_stamp_as_eager_ones_do_and_break_no_more_graphs(tensordict):
    rb, eager = make(generations, tensordict), make(generations, tensordict)
    compiled = torch.compile(step(rb, tensordict), backend="aot_eager")
    graphs = []
    for call in range(20):  # 3 rows each: the ring wraps in the fourth call
        ids, index, generation = compiled(records(tensordict, 3 * call, 3))
        eager.extend(records(tensordict, 3 * call, 3))
        graphs.append(counters["stats"]["unique_graphs"])
        assert stamps(rb).tolist() == stamps(eager).tolist()
        # The id of a record says in which slot it is, and which lap it is of.
        assert index.tolist() == (ids % CAPACITY).tolist()
        assert generation.tolist() == (ids // CAPACITY).tolist()
    assert graphs[2:] == [graphs[2]] * 18
    assert stamps(rb).tolist() == [5] * 10
    reasons = break_reasons()
    torch._dynamo.reset()
    counters.clear()
    assert reasons <= reasons_to_break_torchrls_own(tensordict)


def test_a_compiled_add_stamps_its_slot():
    rb = make(generations, tensordict=False)
    add = torch.compile(lambda data: rb.add(data), backend="eager")
    for call in range(12):
        add(torch.tensor(call))
    assert stamps(rb).tolist() == [1, 1] + [0] * 8
    assert rb[:].tolist() == [10, 11, *range(2, 10)]


def test_a_compiled_extend_gives_the_handles_of_its_rows():
    rb = make(generations, tensordict=False)
    extend = torch.compile(lambda data: rb.extend(data, return_generation=True), backend="eager")
    for call in range(5):
        index, generation = extend(torch.arange(4 * call, 4 * call + 4))
    assert index.tolist() == [6, 7, 8, 9]
    assert generation.tolist() == [1, 1, 1, 1]


def test_liveness_compiles_into_one_graph_that_does_not_branch():
    rb = make(generations, tensordict=False)
    table = rb.writer.table
    rb.extend(torch.arange(8))
    is_live = torch.compile(
        lambda index, generation: table.is_live(index, generation), backend="eager", fullgraph=True
    )
    index = torch.tensor([0, 3, 7, 8, -1, 12])
    assert is_live(index, torch.zeros(6, dtype=torch.int64)).tolist() == [True] * 3 + [False] * 3
    rb.extend(torch.arange(6))  # wraps over slots 0 to 3
    assert is_live(index, torch.zeros(6, dtype=torch.int64)).tolist() == [
        *(False, False, True),
        *(True, False, False),
    ]


def test_a_compiled_extend_after_a_restore_lands_at_the_base():
    rb = make(generations, tensordict=False)
    rb.extend(torch.arange(8))
    index = torch.arange(8)
    held = rb.writer.generations_of(index)
    rb.load_state_dict(rb.state_dict())
    base = rb.writer.table.counters.base
    assert base > 0
    extend = torch.compile(lambda data: rb.extend(data), backend="eager")
    extend(torch.arange(4))
    assert stamps(rb).tolist() == [base, base, *[0] * 6, base, base]
    live = rb.writer.table.is_live(index, held)
    assert live.tolist() == [False, False] + [True] * 6


def test_an_asynchronous_learner_sees_compiled_writes():
    storage = LazyTensorStorage(CAPACITY, compilable=True)
    learner = generations.TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        eps=0.0,
        storage=storage,
        sync=False,
        batch_size=4,
        writer=generations.TensorDictRoundRobinWriter(compilable=True, track_generations=True),
        compilable=True,
    )
    learner.extend(records(True, 0, 10))
    index = torch.arange(10)
    held = {"index": index, "generation": learner.writer.generations_of(index)}
    learner.update_priority_if_present(**held, priority=torch.arange(1.0, 11.0))
    extend = torch.compile(lambda data: learner.extend(data), backend="eager")
    extend(records(True, 0, 3))
    assert learner.update_priority_if_present(**held, priority=5.0).num_stale == 3
    learner.sample()
    assert learner._priority_sampler._sum_tree[index].tolist() == [10.0] * 3 + [5.0] * 7


@pytest.mark.stress
def test_inductors_code_stamps_as_eager_code_does():
    rb = make(generations, tensordict=True)
    compiled = torch.compile(step(rb, True))
    for call in range(20):
        ids, _, generation = compiled(records(True, 3 * call, 3))
        assert generation.tolist() == (ids // CAPACITY).tolist()
    assert stamps(rb).tolist() == [5] * 10


class WithoutStamps(generations.RoundRobinWriter):
    """A user's writer that stamps nothing."""

    def extend(self, data):
        index = torch.arange(len(data))
        self._storage.set(index, data)
        return index


def test_under_other_writers_a_compiled_extend_leaves_nothing_unstamped():
    """It breaks the graph and takes the lock, as only ring writers stamp by themselves."""

    def made(writer):
        storage = LazyTensorStorage(4, compilable=True)
        return generations.ReplayBuffer(storage=storage, writer=writer, compilable=True)

    def ids(*values):
        return TensorDict({"id": torch.tensor(values)}, [len(values)])

    rb = made(WithoutStamps(compilable=True, track_generations=True))
    best = made(generations.TensorDictMaxValueWriter("id", compilable=True, track_generations=True))
    rb.extend(ids(0, 1, 2, 3))
    best.extend(ids(0, 1, 2, 3))
    extend = torch.compile(lambda rb, data: rb.extend(data), backend="eager")
    extend(rb, ids(4, 5))
    assert stamps(rb).tolist() == [1, 1, 0, 0]
    assert extend(best, ids(4, 0, 5)).tolist() == [0, -1, 1]
    assert stamps(best).tolist() == [1, 1, 0, 0]
