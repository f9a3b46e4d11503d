"""Processes that are killed in the middle of a write or of a restore, at every line of it."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import signal
import sys
import time
from functools import cache

import pytest
import torch
from common import CAPACITY, ids, leaves, td_buffer
from torchrl.data import LazyMemmapStorage, LazyTensorStorage
from torchrl.data.replay_buffers.generations import SlotGenerations
from torchrl.data.replay_buffers.generations.core import history, restore
from torchrl.data.replay_buffers.generations.writers import ring

OURS = os.path.dirname(os.path.dirname(history.__file__))
HIGHEST, OLD = 100.0, 7.0


def kill_here(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_line(number, files):
    """Kills this process at the ``number``-th line that it runs in ``files`` of the package."""
    left = [number]

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if os.path.basename(frame.f_code.co_filename) not in files:
            return trace if event == "call" else None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                kill_here()
        return trace

    sys.settrace(trace)


def in_a_child(run):
    """Forks a child for ``run``; returns whether it was killed on the way."""
    context = multiprocessing.get_context("fork")

    def target():
        torch.set_num_threads(1)
        run()
        sys.settrace(None)
        os._exit(0)

    process = context.Process(target=target, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL, -signal.SIGALRM), process.exitcode
    return process.exitcode != 0


def learner(storage=LazyTensorStorage, **kwargs):
    """A learner of records 0 to 7 with the priority 7, in memory that children share."""
    rb = td_buffer(0, storage=storage(CAPACITY), batch_size=64, sync=False, **kwargs)
    rb.share()
    rb.extend(ids(range(CAPACITY)))
    rb.sample()
    index = torch.arange(CAPACITY)
    for priority in (HIGHEST, OLD):
        taken = {"index": index, "generation": rb.writer.generations_of(index)}
        assert rb.update_priority_if_present(**taken, priority=priority).num_stale == 0
    return rb


class Held:
    """Handles with the records that they were taken of."""

    def __init__(self, rb):
        self.index = torch.arange(CAPACITY)
        self.generation = rb.writer.generations_of(self.index)
        self.records = rb[:]["id"].clone()

    def check(self, rb):
        """No handle lives on another record; returns which live."""
        assert rb._table.lock.acquire(timeout=20)
        rb._table.lock.release()
        live = rb._table.is_live(self.index, self.generation)
        there = rb[:]["id"]
        assert len(there) == CAPACITY
        assert there[live].equal(self.records[live])
        return live


def check_priorities(rb, held):
    """No slot has the priority of a record that is gone; the learner samples first."""
    live = held.check(rb)
    rb.sample()
    for is_live, leaf in zip(live.tolist(), leaves(rb), strict=True):
        assert leaf == (OLD if is_live else HIGHEST)


# ------------------------------------------------------------------ writes

WRITE_FILES = {"ring.py", "counters.py", "columns.py", "table.py", "trees.py", "recording.py"}
WRITES = {
    "extend": lambda rb: rb.extend(ids(range(100, 103))),
    "extend around the ring": lambda rb: rb.extend(ids(range(100, 105))),
    "add": lambda rb: rb.add(ids([100])[0]),
    "write_at": lambda rb: rb.writer.write_at(torch.tensor([1, 4]), ids([100, 101])),
    "rb[index] =": lambda rb: rb.__setitem__(torch.tensor([1, 4]), ids([100, 101])),
    "empty": lambda rb: rb.writer._empty(),
}


def killed_write(write, number):
    """Kills a writer at a line of its write; returns whether it came to that line."""
    rb = learner()
    if write == "extend around the ring":
        rb.extend(ids(range(8, 13)))
        rb.extend(ids(range(13, 14)))  # the cursor is at 6
        rb.sample()
        generation = rb.writer.generations_of(torch.arange(CAPACITY))
        rb.update_priority_if_present(
            index=torch.arange(CAPACITY), generation=generation, priority=OLD
        )
    held = Held(rb)

    def run():
        kill_at_line(number, WRITE_FILES)
        WRITES[write](rb)

    killed = in_a_child(run)
    check_priorities(rb, held)

    def goes_on():
        for record in range(300, 305):
            rb.extend(ids([record]))

    assert not in_a_child(goes_on)
    check_priorities(rb, held)
    rb.extend(ids(range(400, 408)))
    check_priorities(rb, held)
    assert rb[:]["id"].sort()[0].tolist() == list(range(400, 408))
    return killed


@pytest.mark.parametrize("write", list(WRITES))
def test_a_writer_killed_at_any_line_leaves_no_live_handle_and_no_gone_priority(write):
    number, step = 0, 3
    while killed_write(write, number):
        number += step
    assert number > 20 or write in ("rb[index] =", "empty")


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("write", list(WRITES))
def test_the_same_at_each_single_line(write):
    number = 0
    while killed_write(write, number):
        number += 1
    print(f"{write}: {number} lines")
    assert number > 20


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (ring, "copy_ring", False),  # after the stamps
        (ring, "copy_ring", True),  # after the data, before length and revision
        (ring.RoundRobinWriter, "_put_pairs", True),  # before the log's entry is finished
        (SlotGenerations, "advance_ring", True),
    ],
)
def test_a_learner_catches_up_with_a_write_whose_writer_was_killed(owner, name, after, monkeypatch):
    rb = learner()
    held = Held(rb)

    def run():
        inner = getattr(owner, name)

        def step(*args, **kwargs):
            if after:
                inner(*args, **kwargs)
            kill_here()

        setattr(owner, name, step)
        rb.extend(ids(range(100, 103)))

    assert in_a_child(run)
    rb.sample()
    assert leaves(rb) == [HIGHEST] * 3 + [OLD] * 5
    assert held.check(rb).tolist() == [False] * 3 + [True] * 5


# ------------------------------------------------------------------ restores

RESTORE_FILES = {
    "saving.py",
    "restore.py",
    "history.py",
    "stamping.py",
    "ring.py",
    "counters.py",
}


@cache
def foreign_state():
    """What another run saved, whose stamps are equal to those of the learner."""
    return copy.deepcopy(learner_of_other_records().state_dict())


def learner_of_other_records():
    other = td_buffer(0, batch_size=64, sync=False)
    other.extend(ids(range(1000, 1000 + CAPACITY)))
    return other


def earlier_state(rb):
    """A state of the same run, of which the second half has other records now."""
    state = copy.deepcopy(rb.state_dict())
    rb.extend(ids(range(20, 24)))
    rb.sample()
    index = torch.arange(CAPACITY)
    rb.update_priority_if_present(
        index=index, generation=rb.writer.generations_of(index), priority=OLD
    )
    return state


LOADS = ["load_state_dict of another run", "load_state_dict of this run", "loads"]


def killed_restore(how, arrange, tmp_path, storage=LazyTensorStorage):
    """Kills a process in a restore, where ``arrange(rb)`` has arranged for it."""
    rb = learner(storage)
    if how == "loads":
        place = tmp_path / "dump"
        if not place.exists():
            learner_of_other_records().dumps(place)

        def load():
            rb.loads(place)
    else:
        state = foreign_state() if "another" in how else earlier_state(rb)

        def load():
            rb.load_state_dict(state)

    held = Held(rb)

    def run():
        arrange(rb)
        load()

    killed = in_a_child(run)
    check_priorities_after_restore(rb, held)
    rb.extend(ids(range(400, 403)))
    check_priorities_after_restore(rb, held)
    return killed


def check_priorities_after_restore(rb, held):
    live = held.check(rb)
    rb.sample()
    for is_live, leaf in zip(live.tolist(), leaves(rb), strict=True):
        assert is_live or leaf == HIGHEST


HOOKS = {
    "before the records": lambda rb, name: hook(rb.storage, name, after=False),
    "after the records": lambda rb, name: hook(rb.storage, name, after=True),
    "after the sampler": lambda rb, name: hook(rb._sampler, name, after=True),
    "before the stamps": lambda rb, name: hook(history.History, "put_back", after=False),
    "in the stamps": lambda rb, name: hook(history.History, "_remember", after=False),
    "after the writer": lambda rb, name: hook(rb.writer, name, after=True),
}


def hook(owner, name, after):
    inner = getattr(owner, name)

    def step(*args, **kwargs):
        if after:
            inner(*args, **kwargs)
        kill_here()

    setattr(owner, name, step)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("moment", list(HOOKS))
@pytest.mark.parametrize("how", LOADS)
def test_a_process_killed_in_a_restore_leaves_no_handle_on_a_foreign_record(
    how, moment, storage, tmp_path
):
    name = "loads" if how == "loads" else "load_state_dict"
    assert killed_restore(how, lambda rb: HOOKS[moment](rb, name), tmp_path, storage)


@pytest.mark.parametrize("how", ["load_state_dict of another run", "loads"])
def test_a_restore_that_makes_no_handle_stale_first_leaves_them_there(how, tmp_path, monkeypatch):
    monkeypatch.setattr(restore, "begin_restore", lambda table: None)
    name = "loads" if how == "loads" else "load_state_dict"
    with pytest.raises(AssertionError):
        killed_restore(how, lambda rb: HOOKS["after the records"](rb, name), tmp_path)


@pytest.mark.parametrize("how", LOADS)
def test_the_same_at_any_line(how, tmp_path):
    number, killed = 0, True
    while killed:
        killed = killed_restore(how, lambda rb: kill_at_line(number, RESTORE_FILES), tmp_path)  # noqa: B023
        number += 7
    assert number > 70


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("how", "kills"), list(zip(LOADS, (600, 600, 1500), strict=True)))
def test_hundreds_of_processes_killed_in_a_restore_leave_no_handle_on_a_foreign_record(
    how, kills, tmp_path
):
    """At a line, at a call of TorchRL's, and at any moment, in turns."""
    chosen, done, began = random.Random(0), 0, time.monotonic()
    name = "loads" if how == "loads" else "load_state_dict"
    kinds = {"line": 0, "hook": 0, "moment": 0}
    while done < kills:
        kind = chosen.choice(list(kinds))

        def arrange(rb, kind=kind):
            if kind == "line":
                kill_at_line(chosen.randrange(180), RESTORE_FILES)
            elif kind == "hook":
                HOOKS[chosen.choice(list(HOOKS))](rb, name)
            else:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, chosen.uniform(0.0001, 0.008))

        storage = chosen.choice([LazyTensorStorage, LazyMemmapStorage])
        killed = killed_restore(how, arrange, tmp_path, storage)
        if killed:
            kinds[kind] += 1
            done += 1
    print(how, kinds, f"{time.monotonic() - began:.0f} s")
