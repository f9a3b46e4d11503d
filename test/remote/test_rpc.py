"""Buffers behind torch.distributed.rpc."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from functools import partial

import pytest
import torch
import torchrl.data
from common import CAPACITY, audited, ids, leaves
from torch.distributed import rpc
from torchrl.data import LazyTensorStorage, PrioritizedSampler
from torchrl.data.replay_buffers.generations import (
    PriorityUpdateResult,
    RemoteTensorDictReplayBuffer,
    TensorDictReplayBuffer,
)

PATIENCE = 60
SLOTS = 256
LATE = 3  # batches between a sample and its update

RPC = RemoteTensorDictReplayBuffer
OWNED: list[RPC] = []  # in the process of the buffers


def arguments(slots, batch_size):
    return {
        "storage": partial(LazyTensorStorage, slots),
        "sampler": partial(PrioritizedSampler, slots, 1.0, 1.0, eps=0.0),
        "batch_size": batch_size,
        "track_generations": True,
    }


def build(slots, batch_size):
    OWNED[:] = [RPC(**arguments(slots, batch_size))]


def owned():
    return rpc.RRef(OWNED[0])


def its_leaves(buffer):
    return leaves(buffer.local_value())


def serve(name, rank, world, store, pipe):
    """A process that takes part in RPC and runs what it is sent."""
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)
    while True:
        function, *args = pipe.recv()
        try:
            pipe.send((function(*args), None))
        except BaseException as error:
            pipe.send((None, error))


class Peer:
    """A process of that kind, seen from the test."""

    def __init__(self, name, rank, world, store):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(name, rank, world, store, theirs), daemon=True
        )
        self.process.start()

    def begin(self, function, *args):
        self.pipe.send((function, *args))

    def end(self):
        assert self.pipe.poll(PATIENCE), "no answer"
        result, error = self.pipe.recv()
        if error is not None:
            raise error
        return result

    def __call__(self, function, *args):
        self.begin(function, *args)
        return self.end()


def started_peers(store, *names):
    peers = [Peer(name, rank, len(names), store) for rank, name in enumerate(names)]
    for peer in peers:
        peer.begin(os.getpid)
    for peer in peers:
        peer.end()
    return peers


def kill(peers):
    for peer in peers:
        peer.process.kill()
        peer.process.join()


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    store = tmp_path_factory.mktemp("rpc") / "store"
    peers = started_peers(store, "buffer", "learner", "writer")
    yield peers
    kill(peers)


def call(method, *args, **kwargs):
    """Calls a method of the buffer from another process, in one round trip."""
    return rpc.rpc_sync("buffer", method, args=(REFERENCE[0], *args), kwargs=kwargs)


REFERENCE: list[rpc.RRef] = []  # to the buffer, in the other processes


def find_buffer():
    REFERENCE[:] = [rpc.rpc_sync("buffer", owned)]


def build_remotely(slots, batch_size):
    REFERENCE[:] = [rpc.remote("buffer", RPC, kwargs=arguments(slots, batch_size))]


@pytest.fixture
def learner(peers):
    """A process that refers to a buffer in another one, with the records 0 to 7."""
    _, learner, _ = peers
    learner(build_remotely, CAPACITY, 4)
    learner(call, RPC.extend, ids(range(8)))
    yield learner
    learner(REFERENCE.clear)


def test_stands_to_our_classes_as_torchrls_does_to_its_own():
    assert issubclass(RPC, TensorDictReplayBuffer)
    assert issubclass(RPC, torchrl.data.RemoteTensorDictReplayBuffer)


def update_after_three_were_overwritten():
    index, generation = call(RPC.extend, ids(range(8)), return_generation=True)
    added = call(RPC.add, ids([8])[0], return_generation=True)
    call(RPC.extend, ids(range(9, 11)))
    result = call(
        RPC.update_priority_if_present,
        index=index,
        generation=generation,
        priority=torch.arange(20.0, 28.0),
    )
    return index, generation, added, result, call(its_leaves)


def test_priorities_reach_the_records_that_are_still_there(learner):
    index, generation, added, result, found = learner(update_after_three_were_overwritten)
    assert index.tolist() == list(range(8))
    assert generation.tolist() == [1] * 8
    assert (int(added[0]), int(added[1])) == (0, 2)
    assert type(result) is PriorityUpdateResult
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
    assert found == [1, 1, 1, 23, 24, 25, 26, 27]


def update_a_sample():
    call(RPC.extend, ids(range(8)))
    sample = call(RPC.sample)
    call(RPC.extend, ids(range(8, 12)))
    sample["td_error"] = torch.full((4,), 5.0)
    mask = call(RPC.update_tensordict_priority_if_present, sample).updated_mask
    by_proxy = REFERENCE[0].rpc_sync().update_tensordict_priority_if_present(sample).updated_mask
    return sample["index"].tolist(), mask.tolist(), by_proxy.tolist(), call(its_leaves)


def test_a_sample_carries_its_stamps_back(learner):
    slots, mask, by_proxy, found = learner(update_a_sample)
    assert mask == by_proxy == [slot >= 4 for slot in slots]
    assert found == [5.0 if slot >= 4 and slot in slots else 1.0 for slot in range(8)]


def update_badly():
    index, generation = call(RPC.extend, ids(range(8)), return_generation=True)
    priority = [5.0, -1.0] + [5.0] * 6
    call(RPC.update_priority_if_present, index=index, generation=generation, priority=priority)


def submit_over_rpc():
    call(RPC.submit_update_priority_if_present, index=[0], generation=[0], priority=1.0)


def test_errors_reach_the_caller_and_change_nothing(learner):
    with pytest.raises(ValueError, match=r"priority\[1\] must be finite, not negative.* got -1\.0"):
        learner(update_badly)
    assert learner(call, its_leaves) == [1] * 8
    with pytest.raises(RuntimeError, match=r"needs a buffer in this process.*rpc_async\(\)"):
        learner(submit_over_rpc)


def write(first_id, seconds):
    deadline, rows = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        call(RPC.extend, ids(range(first_id + rows, first_id + rows + 32)))
        rows += 32
    return rows


def update_audited(buffer, late, priority, conditional):
    """In the buffer's process: makes the update, and counts what landed on another record."""
    applied, there = audited(buffer.local_value(), late, priority, conditional)
    return int(applied.sum()), int((applied & ~there).sum()), int((~applied).sum())


def learn(seconds, conditional):
    totals = [0, 0, 0]
    batches: deque = deque()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        batches.append(call(RPC.sample))
        if len(batches) > LATE:
            late = batches.popleft()
            counts = call(update_audited, late, (late["id"] + 1).float(), conditional)
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
    return totals


def run(peers, conditional):
    buffer, learner, writer = peers
    buffer(build, SLOTS, 64)
    for peer in (learner, writer):
        peer(find_buffer)
    learner(call, RPC.extend, ids(range(SLOTS)))
    writer.begin(write, 1_000, 1)
    counts = learner(learn, 1, conditional)
    assert writer.end() > 2 * SLOTS
    for peer in (learner, writer):
        peer(REFERENCE.clear)
    return counts


def test_writer_and_learner_misapply_nothing(peers):
    applied, misapplied, stale = run(peers, conditional=True)
    assert applied > 0
    assert stale > 0
    assert misapplied == 0


def test_the_same_run_puts_priorities_on_other_records_with_update_priority(peers):
    _, misapplied, _ = run(peers, conditional=False)
    assert misapplied > 0


def update_of_a_dead_buffer(pid):
    index, generation = call(RPC.extend, ids(range(8)), return_generation=True)
    priority = torch.arange(20.0, 28.0)
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    try:
        call(RPC.update_priority_if_present, index=index, generation=generation, priority=priority)
    except RuntimeError:
        return time.monotonic() - start, generation.tolist(), priority.tolist()
    raise AssertionError("the update came back")


def test_dead_process_raises_at_once_and_leaves_the_callers_data_alone(tmp_path):
    peers = buffer, learner = started_peers(tmp_path / "store", "buffer", "learner")
    try:
        buffer(build, CAPACITY, 4)
        learner(find_buffer)
        seconds, generation, priority = learner(update_of_a_dead_buffer, buffer.process.pid)
    finally:
        kill(peers)
    assert seconds < 5
    assert generation == [0] * 8
    assert priority == list(range(20, 28))
