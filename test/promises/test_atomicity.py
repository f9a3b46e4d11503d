"""Atomicity: comparing and writing is one step for every writer of the storage.

First each race by holding one side at the critical line, then all at once, beside a control.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial

import pytest
import torch
import torchrl.data
from common import CAPACITY, PER, Thread, buffer, handles, ids, leaves, td_buffer
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    TensorStorage,
)
from torchrl.data.replay_buffers.generations import (
    ReplayBuffer,
    SlotGenerations,
    TensorDictPrioritizedReplayBuffer,
)

# How long a thread that must wait is given to prove that it does not.
GRACE = 0.2


class Rival:
    """Another thread that is let loose while the first stands at its critical line."""

    def __init__(self, action):
        self.action = action
        self.done = threading.Event()
        self.thread = None
        self.ran_inside = None

    def _run(self):
        result = self.action()
        self.done.set()
        return result

    def let_loose(self):
        if self.thread is None:
            self.thread = Thread(self._run)
            self.ran_inside = self.done.wait(GRACE)


def hold_at(owner, name, rival, monkeypatch):
    """Lets the rival loose each time ``owner.name`` is about to run."""
    inner = getattr(owner, name)

    def held(*args, **kwargs):
        rival.let_loose()
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, held)


def own_buffer(storage):
    return ReplayBuffer(storage=storage)


def tracking_buffer(storage):
    return buffer(0, storage=storage)


def adopted_torchrl_buffer(storage):
    stock = torchrl.data.ReplayBuffer(storage=storage)
    SlotGenerations.attach(storage).adopt(stock)
    return stock


def torchrl_buffer(storage):
    return torchrl.data.ReplayBuffer(storage=storage)


@pytest.mark.parametrize("make_other", [tracking_buffer, own_buffer, adopted_torchrl_buffer])
def test_another_buffer_waits_while_an_update_stands_between_check_and_write(
    make_other, monkeypatch
):
    rb = buffer()
    held = handles(rb)
    other = make_other(rb.storage)
    rival = Rival(lambda: other.extend(torch.arange(100, 103)))
    hold_at(rb.sampler, "update_priority", rival, monkeypatch)
    result = rb.update_priority_if_present(**held, priority=torch.arange(1.0, 9.0))
    rival.thread.join()
    assert rival.ran_inside is False
    assert result.num_updated == 8
    assert rb[:].tolist() == [100, 101, 102, 3, 4, 5, 6, 7]
    assert leaves(rb) == [8, 8, 8, 4, 5, 6, 7, 8]  # the three new records have the default


@pytest.mark.parametrize("adopted", [True, False])
def test_an_update_waits_while_a_torchrl_buffer_that_adopted_the_lock_writes(adopted, monkeypatch):
    rb = buffer()
    held = handles(rb)
    other = (adopted_torchrl_buffer if adopted else torchrl_buffer)(rb.storage)
    rival = Rival(lambda: rb.update_priority_if_present(**held, priority=torch.arange(1.0, 9.0)))
    # TorchRL's writer stands between the data and the stamps here.
    hold_at(other.writer, "_bump_generation", rival, monkeypatch)
    other.extend(torch.arange(100, 103))
    rival.thread.join()
    assert rival.ran_inside is not adopted
    assert rb._table.is_live(**held).tolist() == [False] * 3 + [True] * 5
    if adopted:
        assert leaves(rb) == [1, 1, 1, 4, 5, 6, 7, 8]
    else:  # what adopt() is for: the update saw the old stamps beside the new records
        assert rival.thread.result.num_updated == 8


@pytest.mark.parametrize("method", ["add", "extend"])
def test_a_record_and_the_priority_that_it_carries_are_written_in_one_step(method, monkeypatch):
    rb = td_buffer(0)
    rival = Rival(lambda: rb.extend(ids(range(100, 108))))
    hold_at(rb, "update_priority", rival, monkeypatch)
    data = ids(range(8), td_error=torch.arange(1.0, 9.0))
    if method == "extend":
        rb.extend(data)
    else:
        rb.add(data[0])
    rival.thread.join()
    assert rival.ran_inside is False
    default = 8 if method == "extend" else 1
    assert leaves(rb) == [default] * 8
    assert set(rb[:]["id"].tolist()) == set(range(100, 108))


def test_the_same_line_of_torchrls_buffer_puts_the_priority_on_another_record(monkeypatch):
    rb = torchrl.data.TensorDictPrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(CAPACITY))
    rival = Rival(lambda: rb.extend(ids(range(100, 108))))
    hold_at(rb, "update_priority", rival, monkeypatch)
    rb.extend(ids(range(8), td_error=torch.arange(1.0, 9.0)))
    rival.thread.join()
    assert rival.ran_inside is True
    assert rb.sampler._sum_tree[torch.arange(8)].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rb[:]["id"].tolist() == list(range(100, 108))


def test_a_sample_reads_index_stamps_and_data_in_one_step(monkeypatch):
    rb = td_buffer(batch_size=8)
    rival = Rival(lambda: rb.extend(ids(range(100, 108))))
    hold_at(rb.storage, "get", rival, monkeypatch)
    sample = rb.sample()
    rival.thread.join()
    assert rival.ran_inside is False
    assert sample["id"].tolist() == sample["index"].tolist()
    assert sample["index_generation"].tolist() == [0] * 8


def test_a_handle_is_dead_from_the_moment_that_a_write_touches_its_record(monkeypatch):
    rb = buffer()
    held = handles(rb)
    seen = []
    inner = rb.storage.set

    def watched(*args, **kwargs):
        seen.append(rb._table.is_live(**held).tolist())
        return inner(*args, **kwargs)

    monkeypatch.setattr(rb.storage, "set", watched)
    rb.extend(torch.arange(3))
    rb.add(torch.tensor(3))
    assert seen == [[False] * 3 + [True] * 5, [False] * 4 + [True] * 4]


@pytest.mark.parametrize("action", ["empty", "setitem"])
def test_emptying_and_item_assignment_wait_for_an_update_too(action, monkeypatch):
    rb = buffer()
    held = handles(rb)

    def change():
        if action == "empty":
            rb.empty()
        else:
            rb[2:4] = torch.tensor([50, 51])

    rival = Rival(change)
    hold_at(rb.sampler, "update_priority", rival, monkeypatch)
    rb.update_priority_if_present(**held, priority=torch.arange(1.0, 9.0))
    rival.thread.join()
    assert rival.ran_inside is False
    if action == "setitem":
        assert leaves(rb) == [1, 2, 8, 8, 5, 6, 7, 8]
    else:
        assert rb._table.of(range(8)).tolist() == [-1] * 8


@pytest.mark.parametrize("adopted", [False, True])
def test_a_thread_that_holds_the_lock_may_call_the_buffer_while_others_wait_for_it(adopted):
    rb = td_buffer(batch_size=4)
    other = rb
    if adopted:
        other = torchrl.data.TensorDictReplayBuffer(storage=rb.storage, batch_size=4)
        rb._table.adopt(other)
    held = handles(rb)

    def from_inside():
        with rb._table.lock:
            writing = Thread(lambda: other.extend(ids(range(100, 108))))
            saving = Thread(rb.state_dict)
            writing.join_briefly(GRACE)  # both stand at the lock now
            result = rb.update_priority_if_present(**held, priority=5.0)
            rb.sample()
            other.sample()
            other.add(ids([1])[0])
        return result, writing, saving

    result, writing, saving = Thread(from_inside).join()
    writing.join()
    saving.join()
    assert result.num_updated == 8


# ------------------------------------------------------------------ parts replaced under a call


def during(rb, change, call):
    """Lets ``call`` wait at the buffer's first lock in a thread while the change is made."""
    with rb._table.lock:
        waiting = Thread(call)
        waiting.join_briefly(GRACE)  # it stands at the lock now
        change()
    return waiting.join()


def test_an_update_that_waited_for_set_storage_finds_its_handles_stale():
    rb = td_buffer()
    held = handles(rb)
    new = TensorStorage(ids(range(100, 108)))
    result = during(
        rb,
        lambda: rb.set_storage(new),
        lambda: rb.update_priority_if_present(**held, priority=50.0),
    )
    assert result.num_stale == 8
    assert leaves(rb) == [1] * 8


def test_an_update_that_waited_for_set_sampler_writes_the_tree_that_is_there_now():
    rb = td_buffer()
    held = handles(rb)
    sampler = PrioritizedSampler(CAPACITY, **PER)
    result = during(
        rb,
        lambda: rb.set_sampler(sampler),
        lambda: rb.update_priority_if_present(**held, priority=50.0),
    )
    assert result.num_updated == 8
    assert leaves(rb) == [50] * 8


def test_a_write_that_waited_for_set_storage_stamps_the_storage_that_it_writes():
    rb = td_buffer()
    former = rb.storage
    held = handles(rb)
    new = TensorStorage(ids(range(100, 108)))
    extend = lambda: rb.extend(ids(range(3)), return_generation=True)  # noqa: E731
    index, generation = during(rb, lambda: rb.set_storage(new), extend)
    assert rb._table.is_live(index, generation).all()
    assert SlotGenerations.attach(former).is_live(**held).all()


# ------------------------------------------------------------------ all at once

SLOTS = 64
DEFAULT = 5000.0  # above every record's own priority, so that the default never moves
LATE = 4  # batches between a sample and its update


def own_priority(record_ids):
    return (record_ids * 7919 % 4093 + 1).to(torch.float32)


def is_unfinished(deadline, counts):
    """On a busy machine the time may be over before there is something to judge."""
    nothing_yet = counts is not None and not (counts["updated"] and counts["stale"])
    return time.monotonic() < deadline or nothing_yet


def run_threads(storage, conditional, seconds):
    """Two writers, two learners that update four batches late.

    Returns the checks made, the (slot, check) pairs that held another record's priority
    (misapplied), and the rows updated and found stale.
    """
    rb = TensorDictPrioritizedReplayBuffer(
        **PER, storage=storage, batch_size=16, track_generations=True
    )
    next_id = iter(range(10**9))
    rb.extend(ids([next(next_id) for _ in range(SLOTS)]))
    rb.update_priority(torch.tensor([0]), torch.tensor([DEFAULT]))
    rb.extend(ids([next(next_id) for _ in range(SLOTS)]))
    deadline = time.monotonic() + seconds
    counts = {"misapplied": 0, "updated": 0, "stale": 0, "checks": 0}
    counting = threading.Lock()
    written = threading.Semaphore(0)

    goes_on = partial(is_unfinished, deadline, counts if conditional else None)

    def write():
        rows = 0
        while goes_on():
            rows = rows % 23 + 1
            rb.extend(ids([next(next_id) for _ in range(rows)]))
            written.release()

    def learn():
        batches: deque = deque()
        while goes_on():
            batches.append(rb.sample())
            written.acquire(timeout=1)
            if len(batches) <= LATE:
                continue
            late = batches.popleft()
            priority = own_priority(late["id"])
            if conditional:
                result = rb.update_priority_if_present(
                    index=late["index"], generation=late["index_generation"], priority=priority
                )
                with counting:
                    counts["updated"] += result.num_updated
                    counts["stale"] += result.num_stale
            else:
                rb.update_priority(late["index"], priority)

    def check():
        with rb._table.lock:
            held = torch.tensor(leaves(rb))
            own = own_priority(torch.stack([storage[slot]["id"] for slot in range(SLOTS)]))
        counts["misapplied"] += int(((held != own) & (held != DEFAULT)).sum())
        counts["checks"] += 1

    threads = [Thread(write), Thread(write), Thread(learn), Thread(learn)]
    for point in range(200):  # spread over the run, whatever the threads are doing
        time.sleep(max(0.0, deadline - time.monotonic() - seconds * (1 - point / 200)))
        check()
    for thread in threads:
        thread.join(seconds + 30)
    check()
    return counts


def assert_no_priority_on_another_record(storage, seconds):
    counts = run_threads(storage, conditional=True, seconds=seconds)
    assert counts["checks"] == 201
    assert counts["updated"] > 0
    assert counts["stale"] > 0
    assert counts["misapplied"] == 0


def test_threads_never_put_a_priority_on_another_record():
    assert_no_priority_on_another_record(LazyTensorStorage(SLOTS), seconds=1)


def test_the_same_threads_do_it_with_update_priority():
    counts = run_threads(LazyTensorStorage(SLOTS), conditional=False, seconds=1)
    assert counts["misapplied"] > 0


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_threads_never_put_a_priority_on_another_record_for_a_minute(storage):
    assert_no_priority_on_another_record(storage(SLOTS), seconds=60)
