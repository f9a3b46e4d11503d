"""Signal handlers in the middle of a call of their own thread: what they may do, and may not.

Each test raises the signal at a critical line: the handler runs there, inside of all locks.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import signal
import time

import pytest
import torch
from common import CAPACITY, handles, ids, leaves, td_buffer
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.generations import (
    ReplayBufferEnsemble,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.generations.buffers import writes
from torchrl.data.replay_buffers.generations.core import update
from torchrl.data.replay_buffers.generations.processes.writing import Writing
from torchrl.data.replay_buffers.generations.writers import ring
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, RandomSampler

UNDER_WAY = "a write of this thread is under way"


@contextlib.contextmanager
def signal_at(owner, name, handler, after=False):
    """Runs ``handler`` as a signal handler where ``owner.name`` is called first, or after that."""
    inner, ran = getattr(owner, name), []

    def step(*args, **kwargs):
        first = not ran
        ran.append(None)
        if first and not after:
            signal.raise_signal(signal.SIGUSR1)
        result = inner(*args, **kwargs)
        if first and after:
            signal.raise_signal(signal.SIGUSR1)
        return result

    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, step)
    try:
        yield
    finally:
        patch.undo()
        signal.signal(signal.SIGUSR1, before)
    assert ran, "nobody came to this line"


def made(joined=False):
    """A buffer of records 0 to 7 with the priorities 1 to 8, or a learner's among processes."""
    rb = td_buffer(batch_size=512, sync=not joined)
    if joined:
        rb.share()
        rb._table.lock.engage()
        rb.sample()
    rb.update_priority_if_present(**handles(rb), priority=torch.arange(1.0, 9))
    return rb


def seen_of(rb):
    """What a call leaves: records, leaves, cursor, length, and which slots have a live record."""
    if len(rb):
        rb.sample()  # a learner catches up
    return (
        rb[:]["id"].tolist() if rb.storage.initialized else None,
        leaves(rb),
        rb.writer._cursor,
        len(rb),
        (rb._table.of(torch.arange(CAPACITY)) >= 0).tolist(),
    )


# ------------------------------------------------------------------ the calls, and a line in each

STATES = {}


def state_of(joined):
    if joined not in STATES:
        STATES[joined] = copy.deepcopy(made(joined).state_dict())
    return STATES[joined]


CALLS = {
    "extend": lambda rb: rb.extend(ids(range(100, 103))),
    "extend that brings priorities": lambda rb: rb.extend(
        ids(range(100, 103), td_error=torch.tensor([2.0, 3.0, 4.0]))
    ),
    "add": lambda rb: rb.add(ids([100])[0]),
    "write_at": lambda rb: rb.writer.write_at(torch.tensor([1, 4]), ids([100, 101])),
    "rb[index] =": lambda rb: rb.__setitem__(torch.tensor([1, 4]), ids([100, 101])),
    "empty": lambda rb: rb.empty(),
    "update_priority_if_present": lambda rb: rb.update_priority_if_present(
        **handles(rb), priority=5.0
    ),
    "update_priority": lambda rb: rb.update_priority(torch.tensor([0, 1]), 5.0),
    "update_if_present": lambda rb: rb.update_if_present(
        **handles(rb), patch={"id": torch.arange(8) + 50}
    ),
    "load_state_dict": lambda rb: rb.load_state_dict(state_of(rb._learner_sampler is not None)),
    "state_dict": lambda rb: rb.state_dict(),
    "deepcopy": copy.deepcopy,
    "set_storage": lambda rb: rb.set_storage(LazyTensorStorage(CAPACITY)),
    "set_sampler": lambda rb: rb.set_sampler(PrioritizedSampler(CAPACITY, 1.0, 1.0, eps=0.0)),
}
# By call: where the signal comes, and whether after that line.
LINES = {
    "extend": [
        (lambda rb: ring, "copy_ring", False),
        (lambda rb: ring, "copy_ring", True),
        (lambda rb: rb.storage, "set", False),
        (lambda rb: rb.storage, "set", True),
        (lambda rb: rb._sampler, "extend", False),
    ],
    "extend that brings priorities": [(lambda rb: rb._sampler, "extend", True)],
    "add": [(lambda rb: ring, "copy_one", False), (lambda rb: rb.storage, "set", True)],
    "write_at": [(lambda rb: rb.storage, "set", False), (lambda rb: rb.storage, "set", True)],
    "rb[index] =": [(lambda rb: rb.storage, "set", False), (lambda rb: rb.storage, "set", True)],
    "empty": [(lambda rb: rb._sampler, "_empty", False), (lambda rb: rb.storage, "_empty", True)],
    "update_priority_if_present": [(lambda rb: update, "write_priority", False)],
    "update_priority": [(lambda rb: rb._priority_sampler, "update_priority", False)],
    "update_if_present": [(lambda rb: rb.storage, "_apply_conditional_patch", False)],
    "load_state_dict": [
        (lambda rb: rb.storage, "load_state_dict", False),
        (lambda rb: rb.storage, "load_state_dict", True),
        (lambda rb: rb.writer, "load_state_dict", True),
    ],
    "state_dict": [(lambda rb: rb.storage, "state_dict", True)],
    "deepcopy": [(lambda rb: rb.storage, "__getstate__", False)],
    "set_storage": [(lambda rb: rb.writer, "register_storage", False)],
    "set_sampler": [(lambda rb: rb, "_initialize_prioritized_sampler", False)],
}
# These only a synchronous buffer comes to.
SYNCHRONOUS = {"extend that brings priorities", "set_sampler"}
MOMENTS = [
    pytest.param(call, at, joined, id=f"{call}, {at[1]}{', joined' * joined}")
    for joined in (False, True)
    for call, lines in LINES.items()
    for at in lines
    if not (joined and call in SYNCHRONOUS)
]

REFUSED = {
    "extend": lambda rb, _: rb.extend(ids([200])),
    "add": lambda rb, _: rb.add(ids([200])[0]),
    "write_at": lambda rb, _: rb.writer.write_at(torch.tensor([2]), ids([200])),
    "rb[index] =": lambda rb, _: rb.__setitem__(2, ids([200])[0]),
    "empty": lambda rb, _: rb.empty(),
    "dumps": lambda rb, path: rb.dumps(path / "dump"),
    "state_dict": lambda rb, _: rb.state_dict(),
    "load_state_dict": lambda rb, _: rb.load_state_dict(state_of(rb._learner_sampler is not None)),
    "set_storage": lambda rb, _: rb.set_storage(LazyTensorStorage(CAPACITY)),
    "set_sampler": lambda rb, _: rb.set_sampler(RandomSampler()),
    "set_writer": lambda rb, _: rb.set_writer(RoundRobinWriter(track_generations=True)),
    "copy": lambda rb, _: copy.deepcopy(rb),
    "pickle": lambda rb, _: pickle.dumps(rb),
    "share": lambda rb, _: rb.share(),
    "update_priority": lambda rb, _: rb.update_priority(torch.tensor([0]), 3.0),
    "update_priority_if_present": lambda rb, _: rb.update_priority_if_present(
        **handles(rb), priority=3.0
    ),
    "update_if_present": lambda rb, _: rb.update_if_present(
        **handles(rb), patch={"id": torch.arange(8)}
    ),
}
# What is refused as a part of any writer's write is not told from one, outside of the writer's.
BETWEEN_WRITER_AND_PRIORITIES = {"write_at", "update_priority"}


@pytest.mark.parametrize(("call", "at", "joined"), MOMENTS)
def test_a_handler_is_refused_what_would_break_the_call_and_leaves_it_whole(
    call, at, joined, tmp_path
):
    owner, name, after = at
    plain, rb = made(joined), made(joined)
    CALLS[call](plain)
    told = {}

    def handler():
        for action, act in REFUSED.items():
            if name == "extend" and action in BETWEEN_WRITER_AND_PRIORITIES:
                continue
            try:
                act(rb, tmp_path)
                told[action] = "was made"
            except RuntimeError as error:
                told[action] = str(error)

    with signal_at(owner(rb), name, handler, after):
        CALLS[call](rb)
    assert told
    assert {action: told[action] for action in told if UNDER_WAY not in told[action]} == {}
    assert seen_of(rb) == seen_of(plain)
    assert not (tmp_path / "dump").exists()


@pytest.mark.parametrize(("call", "at", "joined"), MOMENTS)
def test_a_handler_may_look_and_sample_and_no_handle_of_it_lives_on_another_record(
    call, at, joined
):
    owner, name, after = at
    rb = made(joined)
    samples, looks = [], []

    def handler():
        held = handles(rb)
        looks.extend([rb.stats(), len(rb), rb._table.is_live(**held), rb.writer.tracks_generations])
        if call == "set_sampler":  # there are no priorities for a moment
            with pytest.raises(RuntimeError, match="non-positive p_sum"):
                rb.sample()
        elif len(rb):
            samples.append(rb.sample())

    with signal_at(owner(rb), name, handler, after):
        CALLS[call](rb)
    assert len(looks) == 4
    for sample in samples:
        live = rb._table.is_live(sample["index"], sample["index_generation"])
        there = (
            rb[:]["id"][sample["index"][live].clamp(max=max(len(rb) - 1, 0))] if live.any() else []
        )
        # A patch keeps a record's identity, and changes what it says.
        if call != "update_if_present":
            assert list(there) == sample["id"][live].tolist()
    assert rb.sample()["index_generation"].min() >= 0 if len(rb) else True


def test_without_the_refusal_a_nested_write_breaks_the_outer_one(monkeypatch):
    monkeypatch.setattr(Writing, "refuse", lambda *_, **__: None)
    rb = made()
    taken = []

    def handler():
        taken.append(rb.extend(ids([200]), return_generation=True))

    with signal_at(ring, "copy_ring", handler):
        index, _ = rb.extend(ids(range(100, 103)), return_generation=True)
    ((nested, generation),) = taken
    assert rb._table.is_live(nested, generation).tolist() == [True]
    assert rb[:]["id"][nested].tolist() != [200]
    assert int(nested[0]) in index.tolist()


def test_the_sample_of_a_handler_has_live_handles_of_the_slots_that_are_not_written():
    rb = made()
    samples = []
    with signal_at(ring, "copy_ring", lambda: samples.append(rb.sample())):
        rb.extend(ids(range(100, 103)))
    (sample,) = samples
    written = sample["index"] < 3
    assert sample["index"].unique().tolist() == list(range(CAPACITY))
    assert sample["index_generation"][written].unique().tolist() == [-1]
    assert sample["id"][written].max() < 3  # the records of before
    assert rb._table.is_live(sample["index"], sample["index_generation"]).equal(~written)


def test_a_handlers_write_between_a_write_and_its_stamps_is_refused():
    rb = made()
    errors = []

    def handler():
        with pytest.raises(RuntimeError, match=UNDER_WAY) as error:
            rb.extend(ids(range(200, 208)))
        errors.append(error)

    with signal_at(writes, "_stamps", handler):
        index, generation = rb.extend(ids([100, 101]), return_generation=True)
    assert len(errors) == 1
    assert rb._table.is_live(index, generation).tolist() == [True, True]
    assert rb[:]["id"][index].tolist() == [100, 101]


def test_a_writer_of_ranks_refuses_a_handlers_write_and_hides_the_slots_that_it_writes():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4),
        writer=TensorDictMaxValueWriter(rank_key="id", track_generations=True),
        batch_size=64,
    )
    rb.extend(ids([1, 2, 3, 4]))
    seen = []

    def handler():
        with pytest.raises(RuntimeError, match=UNDER_WAY):
            rb.add(ids([9])[0])
        with pytest.raises(RuntimeError, match=UNDER_WAY):
            rb.writer.add(ids([9])[0])
        seen.append(rb.sample())

    with signal_at(rb.storage, "set", handler):
        rb.extend(ids([7, 8]))
    (sample,) = seen
    written = sample["id"] < 3
    assert sample["index_generation"][written].unique().tolist() == [-1]
    assert sorted(rb[:]["id"].tolist()) == [3, 4, 7, 8]
    assert sorted(rank for rank, _ in rb.writer._current_top_values) == [3, 4, 7, 8]


def test_a_prefetching_buffer_refuses_the_sample_for_which_a_handler_would_wait_for_ever():
    rb = td_buffer(batch_size=4, prefetch=1)
    rb.sample()
    rb.synchronize()
    with signal_at(rb.storage, "set", lambda: None):
        rb.extend(ids([100]))

    def handler():
        with pytest.raises(RuntimeError, match=UNDER_WAY):
            rb.sample()
        refused.append(True)

    refused = []
    with signal_at(rb.storage, "set", handler):
        rb.extend(ids([101]))
    assert refused == [True]
    assert rb.sample()["index_generation"].min() >= 0
    rb.shutdown()


@pytest.mark.parametrize("kind", [list, torch.tensor])  # for another thread, or small
def test_a_dump_is_refused_before_it_waits_for_an_update_that_waits_for_the_write(kind, tmp_path):
    rb = made()
    refused, futures = [], []

    def handler():
        futures.append(
            rb.submit_update_priority_if_present(**held, priority=kind([3.0] * CAPACITY))
        )
        with pytest.raises(RuntimeError, match=UNDER_WAY):
            rb.dumps(tmp_path / "dump")
        refused.append(True)

    held = handles(rb)
    with signal_at(rb.storage, "set", handler):
        rb.extend(ids([100]))
    assert refused == [True]
    assert futures[0].result(20).updated_mask.tolist() == [False] + [True] * 7
    rb.shutdown()


def test_a_buffer_can_not_move_to_a_storage_that_its_thread_is_writing():
    rb, other = made(), made()
    refused = []

    def handler():
        with pytest.raises(RuntimeError, match=UNDER_WAY):
            rb.set_storage(other.storage)
        refused.append(True)

    with signal_at(other.storage, "set", handler):
        other.extend(ids([100]))
    assert refused == [True]
    assert seen_of(rb) == seen_of(made())
    assert other[:]["id"].tolist() == [100, *range(1, 8)]


ENSEMBLES = {
    "extend": lambda ens, _: ens.extend(routed([0, 1])),
    "empty": lambda ens, _: ens.empty(),
    "state_dict": lambda ens, _: ens.state_dict(),
    "dumps": lambda ens, path: ens.dumps(path / "dump"),
    "load_state_dict": lambda ens, _: ens.load_state_dict({}),
    "copy": lambda ens, _: copy.deepcopy(ens),
    "update_priority_if_present": lambda ens, _: ens.update_priority_if_present(
        index=TensorDict({"buffer_ids": torch.tensor([0]), "index": torch.tensor([7])}, [1]),
        generation=[0],
        priority=3.0,
    ),
}


def routed(members):
    return ids(range(300, 300 + len(members)), buffer_ids=torch.tensor(members))


@pytest.mark.parametrize("outer", ["a member", "the ensemble"])
def test_the_same_of_an_ensemble_and_no_member_changes(outer, tmp_path):
    def members():
        return [made(), made()]

    rbs = members()
    ens = ReplayBufferEnsemble(*rbs, batch_size=4, routing_key="buffer_ids")
    told = {}

    def handler():
        for action, act in ENSEMBLES.items():
            try:
                act(ens, tmp_path)
                told[action] = "was made"
            except RuntimeError as error:
                told[action] = str(error)

    with signal_at(rbs[1].storage, "set", handler):
        if outer == "a member":
            rbs[1].extend(ids([100]))
        else:
            ens.extend(ids([100], buffer_ids=torch.tensor([1])))
    assert told.keys() == ENSEMBLES.keys()
    assert {action: error for action, error in told.items() if UNDER_WAY not in error} == {}
    assert seen_of(rbs[0]) == seen_of(made())
    assert rbs[1][:]["id"].tolist() == [100, *range(1, 8)]


def test_an_exception_of_a_handler_anywhere_in_a_write_leaves_no_mark_behind():
    class FromOutside(BaseException):
        pass

    def handler():
        raise FromOutside

    for call, lines in LINES.items():
        for owner, name, after in lines:
            rb = made()
            with pytest.raises(FromOutside), signal_at(owner(rb), name, handler, after):
                CALLS[call](rb)
            assert not rb._table.writing.is_under_way, (call, name)
            assert not rb._table.lock.is_held()
            assert rb.storage is rb.writer._storage
            rb.extend(ids(range(200, 208)))
            assert len(rb) == CAPACITY, (call, name)
            assert rb.sample()["index_generation"].min() >= 0
            assert set(rb[:]["id"].tolist()) == set(range(200, 208))


def test_ctrl_c_while_a_learner_catches_up_lets_it_catch_up_the_next_time():
    class FromOutside(BaseException):
        pass

    def handler():
        raise FromOutside

    from torchrl.data.replay_buffers.generations.core import learner

    rb = made(joined=True)
    rb.extend(ids([100, 101]))
    with pytest.raises(FromOutside), signal_at(learner, "write_default", handler):
        rb.sample()
    rb.sample()
    assert leaves(rb) == [8, 8, 3, 4, 5, 6, 7, 8]


def test_a_learner_that_a_handler_lets_catch_up_before_the_stamps_catches_up_again_after_them():
    rb = made(joined=True)
    table = rb._table
    with signal_at(table.counters, "log_unknown", rb.sample, after=True):
        table.advance([0, 1])
    rb.sample()
    assert leaves(rb) == [8, 8, 3, 4, 5, 6, 7, 8]


# ------------------------------------------------------------------ storms

HIGHEST = 4096.0


def own_priority(record):
    return 1.0 + record % 1000


class Storm:
    """One thread writes, updates, saves and restores; a timer's handler tries all that, too."""

    def __init__(self, joined, tmp_path):
        self.rb = td_buffer(0, batch_size=8, sync=not joined)
        self.path = tmp_path
        self.next_id = 0
        self.taken = {}
        self.counts = dict.fromkeys(["signals", "refused", "made", "dumps", "updated"], 0)
        self.random = random.Random(0)
        self.extend()
        if joined:
            self.rb.share()
            self.rb._table.lock.engage()
        self.rb.sample()
        held = handles(self.rb, [0])
        assert self.rb.update_priority_if_present(**held, priority=HIGHEST).num_updated == 1
        self.extend()
        self.extend()
        self.extend()  # nobody has the highest as its own
        self.state = copy.deepcopy(self.rb.state_dict())

    def extend(self):
        begin, rows = self.next_id, self.random.randint(1, 5)
        self.next_id += rows
        index, generation = self.rb.extend(ids(range(begin, begin + rows)), return_generation=True)
        for row in range(rows):
            self.taken[begin + row] = (int(index[row]), int(generation[row]))

    def update(self):
        sample = self.rb.sample()
        priority = own_priority(sample["id"].float())
        result = self.rb.update_priority_if_present(
            index=sample["index"], generation=sample["index_generation"], priority=priority
        )
        self.counts["updated"] += result.num_updated

    def save(self):
        # Moved in as a whole only if no signal came in between.
        self.state = copy.deepcopy(self.rb.state_dict())

    def dump(self):
        place = self.path / str(self.counts["dumps"])
        self.rb.dumps(place)
        self.counts["dumps"] += 1
        resumed = td_buffer(0, batch_size=8, sync=self.rb._sync)
        resumed.loads(place)
        self.judge(resumed)

    def restore(self):
        self.rb.load_state_dict(self.state)

    def choose(self):
        # Few restores: some 16,000 use the counters up.
        often = [self.extend, self.update, self.save] * 3
        return self.random.choice([*often, self.restore])

    def on_signal(self, *_):
        self.counts["signals"] += 1
        act = self.choose()
        if self.counts["signals"] % 15 == 0:
            act = self.dump
        try:
            act()
            self.counts["made"] += 1
        except RuntimeError as error:
            if UNDER_WAY not in str(error):
                raise
            self.counts["refused"] += 1

    def judge(self, rb):
        """No handle lives on another record, and no leaf has another record's priority."""
        rb.sample()
        records = rb[:]["id"].tolist()
        index, generation = zip(*list(self.taken.values())[-64:], strict=True)
        live = rb._table.is_live(list(index), list(generation)).tolist()
        for record, slot, is_live in zip(list(self.taken)[-64:], index, live, strict=True):
            assert not is_live or records[slot] == record
        for record, leaf in zip(records, leaves(rb), strict=False):
            assert leaf in (HIGHEST, own_priority(record)), (record, leaf)


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("joined", [False, True])
def test_eighteen_thousand_handlers_that_use_the_buffer_break_nothing(joined, tmp_path):
    storm = Storm(joined, tmp_path)
    before = signal.signal(signal.SIGALRM, storm.on_signal)
    began = time.monotonic()
    try:
        while storm.counts["signals"] < 18_000 and time.monotonic() - began < 600:
            signal.setitimer(signal.ITIMER_REAL, storm.random.uniform(0.00002, 0.0008))
            with contextlib.suppress(IndexError):
                storm.choose()()
            signal.setitimer(signal.ITIMER_REAL, 0)
            storm.judge(storm.rb)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    print(storm.counts)
    assert storm.counts["signals"] >= 18_000
    assert storm.counts["refused"] > 1_000
    assert storm.counts["made"] > 1_000
