"""Identity and No resurrection, against an oracle in plain Python lists.

The oracle knows which record each slot holds, its leaf, and every handle that was ever taken. After
each random step no handle is live without its record, every handle with its record is live, and
every leaf is right.
"""

from __future__ import annotations

import copy

import pytest
import torch
from common import PER, ids
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage
from torchrl.data.replay_buffers.generations import (
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
)

STEPS, EXAMPLES = 50, 40
slot_numbers = st.integers(0, 7)


def rank(record):
    return record * 7919 % 13  # in no order, and often the same


def data_of(records):
    return ids(records, rank=torch.tensor([rank(record) for record in records]))


def leaves(rb):
    sampler = rb._priority_sampler
    return [float(sampler._sum_tree[slot]) for slot in range(sampler.max_size)]


class Model(RuleBasedStateMachine):
    """One buffer, now and then a second one on its storage."""

    make_storage = LazyTensorStorage
    sync = True
    keeps_best = False
    steps = 0

    def __init__(self):
        super().__init__()
        self.next_id = 0
        self.taken = []  # (slot, generation, record)
        self.saved = []

    def build(self, storage, writer=None):
        return TensorDictPrioritizedReplayBuffer(
            **PER,
            storage=storage,
            batch_size=4,
            track_generations=True,
            sync=self.sync,
            writer=writer,
        )

    @initialize(capacity=st.integers(1, 8))
    def start(self, capacity):
        self.capacity = capacity
        writer = TensorDictMaxValueWriter(rank_key="rank", track_generations=True)
        storage = type(self).make_storage(capacity)
        self.rb = self.build(storage, writer if self.keeps_best else None)
        self.ranked, self.next_slot = [], 0
        self.second = None
        self.length = 0
        self.record = [None] * capacity
        self.leaf = [0.0] * capacity
        self.default = 1.0

    # ---- the oracle

    def fresh(self, rows):
        self.next_id += rows
        return list(range(self.next_id - rows, self.next_id))

    def wrote(self, slots, records, length):
        for slot, record in zip(slots, records, strict=True):
            self.record[slot] = record
        for slot in range(self.length, length):
            if slot not in slots:
                self.record[slot] = None  # counted in without a record
                self.leaf[slot] = self.default
        self.length = length
        for slot in slots:
            if slot < length:
                self.leaf[slot] = self.default

    def is_live(self, handle):
        slot, _, record = handle
        return slot < self.length and self.record[slot] == record

    def take(self, index, generation):
        for slot, stamp in zip(index.tolist(), generation.tolist(), strict=True):
            if stamp >= 0 and slot < self.length and self.record[slot] is not None:
                self.taken.append((slot, stamp, self.record[slot]))

    # ---- steps

    def ring_write(self, rb, rows, add):
        start = rb.writer._cursor
        records = self.fresh(rows)
        data = data_of(records)
        write = rb.add if add else rb.extend
        index, generation = write(data[0] if add else data, return_generation=True)
        slots = [(start + row) % self.capacity for row in range(rows)]
        assert index == slots[0] if add else index.tolist() == slots
        length = min(self.capacity, self.length + rows)
        if rows > self.capacity:
            slots, records = slots[-self.capacity :], records[-self.capacity :]
        self.wrote(slots, records, length)
        self.take(torch.as_tensor(index).reshape(-1), generation.reshape(-1))

    def best_write(self, rb, rows, add):
        holder, index = {}, []
        records = self.fresh(rows)
        for row, record in enumerate(records):
            slot = -1
            if len(self.ranked) < self.capacity:
                slot, self.next_slot = self.next_slot, (self.next_slot + 1) % self.capacity
            elif rank(record) > min(self.ranked)[0]:
                slot = min(self.ranked)[1]
                self.ranked.remove(min(self.ranked))
            if slot >= 0:
                self.ranked.append((rank(record), slot))
                if slot in holder:
                    index[holder[slot]] = -1
                holder[slot] = row
            index.append(slot)
        data = data_of(records)
        write = rb.add if add else rb.extend
        written, generation = write(data[0] if add else data, return_generation=True)
        assert (written == index[0]) if add else (written.tolist() == index)
        length = min(self.capacity, self.length + len(holder))
        self.wrote(list(holder), [records[row] for row in holder.values()], length)
        self.take(torch.as_tensor(written).reshape(-1), generation.reshape(-1))

    def write(self, rows, add):
        (self.best_write if self.keeps_best else self.ring_write)(self.rb, rows, add)

    @rule(laps=st.floats(0.3, 3))
    def extend(self, laps):
        self.write(max(1, round(laps * self.capacity)), add=False)

    @rule()
    def add(self):
        self.write(1, add=True)

    @rule(laps=st.floats(0.3, 1.5))
    def extend_through_a_second_buffer(self, laps):
        if issubclass(type(self).make_storage, ListStorage) and self.length < self.capacity:
            return  # a list only grows at its end
        if self.second is None:
            self.second = self.build(self.rb.storage)
        self.ring_write(self.second, max(1, round(laps * self.capacity)), add=False)

    @precondition(lambda self: self.length and not self.keeps_best)
    @rule(slots=st.lists(slot_numbers, min_size=1, max_size=3, unique=True))
    def write_at(self, slots):
        slots = sorted({slot % self.capacity for slot in slots})
        if issubclass(type(self).make_storage, ListStorage):
            slots = [slot for slot in slots if slot < self.length] or [0]
        records = self.fresh(len(slots))
        self.rb.writer.write_at(torch.tensor(slots), data_of(records))
        self.wrote(slots, records, max(self.length, max(slots) + 1))

    @precondition(lambda self: self.length)
    @rule(slot=slot_numbers)
    def assign(self, slot):
        slot %= self.length
        records = self.fresh(1)
        self.rb[slot] = data_of(records)[0]
        self.wrote([slot], records, self.length)

    @precondition(lambda self: self.length and self.make_storage is not ListStorage)
    @rule()
    def patch_a_field(self):
        everything = self.rb.storage[:]["id"].clone()
        self.rb.set_("id", everything)

    @rule(count=st.booleans())
    def empty(self, count):
        self.rb.empty(empty_write_count=count)
        self.length = 0
        self.ranked, self.next_slot = [], 0
        self.leaf = [0.0] * self.capacity
        self.default = 1.0

    @precondition(lambda self: self.length)
    @rule()
    def sample(self):
        if sum(self.leaf[: self.length]):
            sample = self.rb.sample()
            self.take(sample["index"], sample["index_generation"])

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def update_late(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.taken), min_size=1, max_size=6))
        priority = [float(data.draw(st.integers(1, 50))) for _ in chosen]
        result = self.rb.update_priority_if_present(
            index=[slot for slot, _, _ in chosen],
            generation=[stamp for _, stamp, _ in chosen],
            priority=priority,
        )
        live = [self.is_live(handle) for handle in chosen]
        assert result.updated_mask.tolist() == live
        for (slot, _, _), alive, value in zip(chosen, live, priority, strict=True):
            if alive:
                self.leaf[slot] = value
                self.default = max(self.default, value)

    @precondition(lambda self: self.length)
    @rule()
    def checkpoint(self):
        self.settle()
        state = copy.deepcopy(self.rb.state_dict())
        ranks = self.ranked[:], self.next_slot
        self.saved.append((state, self.length, self.record[:], self.leaf[:], self.default, ranks))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 100))
    def restore(self, which):
        state, self.length, record, leaf, self.default, ranks = self.saved[which % len(self.saved)]
        self.ranked, self.next_slot = ranks[0][:], ranks[1]
        self.rb.load_state_dict(copy.deepcopy(state))
        self.record, self.leaf = record[:], leaf[:]

    @rule()
    def go_on_with_a_deep_copy(self):
        self.settle()
        self.rb = copy.deepcopy(self.rb)
        self.second = None

    # ---- what must hold after each step

    def settle(self):
        with self.rb._table.lock:
            self.rb._catch_up()  # of an asynchronous learner

    @invariant()
    def every_handle_and_every_leaf_is_right(self):
        if not hasattr(self, "rb"):
            return
        type(self).steps += 1
        self.settle()
        assert len(self.rb.storage) == self.length
        if self.length:
            stored = [int(self.rb.storage[slot]["id"]) for slot in range(self.length)]
            for slot, record in enumerate(self.record[: self.length]):
                assert record is None or record == stored[slot]
        assert leaves(self.rb)[: self.length] == self.leaf[: self.length]
        if self.taken:
            index, generation, _ = zip(*self.taken, strict=True)
            live = self.rb._table.is_live(index, generation).tolist()
            assert live == [self.is_live(handle) for handle in self.taken]


KINDS = {
    "tensor": {"make_storage": LazyTensorStorage},
    "memmap": {"make_storage": LazyMemmapStorage},
    "list": {"make_storage": ListStorage},
    "asynchronous": {"make_storage": LazyTensorStorage, "sync": False},
    "max value": {"make_storage": LazyTensorStorage, "keeps_best": True},
    "asynchronous max value": {"make_storage": ListStorage, "sync": False, "keeps_best": True},
}


def run(kind, examples, derandomize):
    machine = type(f"Model of {kind}", (Model,), {**KINDS[kind], "steps": 0})
    profile = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        derandomize=derandomize,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(machine, settings=profile)
    return machine.steps


@pytest.mark.parametrize("kind", KINDS)
def test_no_handle_lies_and_no_leaf_is_wrong(kind):
    assert run(kind, EXAMPLES, derandomize=True) >= 500  # six kinds: 3,000 steps


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_no_handle_lies_and_no_leaf_is_wrong_for_long(kind):
    run(kind, 300, derandomize=False)
