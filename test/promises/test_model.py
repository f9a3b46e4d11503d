"""Identity and No resurrection, against an oracle in plain Python lists.

The oracle knows which record each slot holds, the leaf of each of its cells (with ``ndim=1`` there
is one), and every handle that was ever taken. After each random step no handle is live without its
record, every handle with its record is live, and every leaf is right.
"""

from __future__ import annotations

import contextlib
import copy
from functools import partial

import pytest
import torch
from common import PER
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
from tensordict import TensorDict
from torchrl.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
)
from torchrl.data import ReplayBuffer as StockReplayBuffer
from torchrl.data import RoundRobinWriter as StockWriter
from torchrl.data.replay_buffers.generations import (
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

STEPS = 50
slot_numbers = st.integers(0, 7)


def rank(record):
    return record * 7919 % 13  # in no order, and often the same


def leaves(rb):
    sampler = rb._priority_sampler
    return [float(sampler._sum_tree[cell]) for cell in range(sampler.max_size)]


class Stampless(RoundRobinWriter):
    """A user's writer: its ``extend`` is TorchRL's, so it stamps nothing, and the buffer does."""

    def extend(self, data):
        return StockWriter.extend(self, data)


def slices(cells):
    """Masks leaves while it samples, and fails where no episode is long enough."""
    return PrioritizedSliceSampler(cells, **PER, slice_len=2, traj_key="episode")


class Model(RuleBasedStateMachine):
    """One buffer, now and then a second one on its storage."""

    make_storage = LazyTensorStorage
    make_writer = TensorDictRoundRobinWriter
    make_sampler = None  # that of a TensorDictPrioritizedReplayBuffer
    sync = True
    width = 1  # cells of a slot
    keeps_best = False
    # TorchRL's and a user's writers write what comes: a batch that laps itself may tear records,
    # and slots that the length grows over get no stamp. TorchRL's load puts other counters there.
    careful = True
    steps = 0

    def __init__(self):
        super().__init__()
        self.next_id = 0
        self.taken = []  # (slot, cell, generation, record)
        self.saved = []

    @property
    def is_list(self):
        return issubclass(type(self).make_storage, ListStorage)

    def build(self, storage, make_writer=None):
        writer = (make_writer or type(self).make_writer)(track_generations=True)
        if self.make_sampler is None:
            return TensorDictPrioritizedReplayBuffer(
                **PER, storage=storage, batch_size=4, writer=writer, sync=self.sync, dim_extend=0
            )
        sampler = type(self).make_sampler(storage.max_size)
        return TensorDictReplayBuffer(
            storage=storage, batch_size=4, writer=writer, sampler=sampler, dim_extend=0
        )

    @initialize(capacity=st.integers(1, 8))
    def start(self, capacity):
        self.capacity = capacity
        if self.width == 1:
            storage = type(self).make_storage(capacity)
        else:
            storage = type(self).make_storage(capacity * self.width, ndim=2)
            if not self.careful:  # TorchRL's writer wants a storage that has its shape
                first = StockReplayBuffer(storage=storage, dim_extend=0)
                first.extend(self.data([0]))
                first.empty()
                storage._attached_entities.clear()
        best = partial(TensorDictMaxValueWriter, rank_key="rank")
        self.rb = self.build(storage, best if self.keeps_best else None)
        self.ranked, self.next_slot = [], 0
        self.second = None
        self.length = 0
        self.record = [None] * capacity
        self.leaf = [[0.0] * self.width for _ in range(capacity)]
        self.default = 1.0

    def data(self, records):
        """The records' rows of cells; two records in a row are an episode."""
        at = torch.as_tensor([self.id_of(record) for record in records])
        if self.width > 1:
            at = at.unsqueeze(1).expand(-1, self.width).clone()
        return TensorDict({"id": at, "episode": at // 2, "rank": rank(at)}, at.shape)

    # ---- the oracle

    def fresh(self, rows):
        self.next_id += rows
        return [(record, 0) for record in range(self.next_id - rows, self.next_id)]

    @staticmethod
    def id_of(record):
        return record[0] if isinstance(record, tuple) else record

    def wrote(self, slots, records, length):
        for slot, record in zip(slots, records, strict=True):
            self.record[slot] = record
        for slot in range(self.length, length):
            if slot not in slots:
                self.record[slot] = None  # counted in without a record
                self.leaf[slot] = [self.default] * self.width
        self.length = length
        for slot in slots:
            if slot < length:
                self.leaf[slot] = [self.default] * self.width

    def is_live(self, handle):
        slot, _, _, record = handle
        return slot < self.length and self.record[slot] == record

    def take(self, index, generation):
        cells = index.reshape(generation.numel(), -1).tolist()
        for (slot, *cell), stamp in zip(cells, generation.tolist(), strict=True):
            if self.width == 1:
                cell = [0]
            if stamp >= 0 and slot < self.length and self.record[slot] is not None:
                self.taken.append((slot, *cell, stamp, self.record[slot]))

    def index_of(self, handles):
        if self.width == 1:
            return [slot for slot, _, _, _ in handles]
        return [[slot, cell] for slot, cell, _, _ in handles]

    # ---- steps

    def ring_write(self, rb, rows, add):
        start = rb.writer._cursor
        records = self.fresh(rows)
        data = self.data(records)
        write = rb.add if add else rb.extend
        index, generation = write(data[0] if add else data, return_generation=True)
        slots = [(start + row) % self.capacity for row in range(rows)]
        if self.width == 1:
            assert index == slots[0] if add else index.tolist() == slots
        else:
            cells = [[slot, cell] for slot in slots for cell in range(self.width)]
            assert index.tolist() == cells
        length = min(self.capacity, self.length + rows)
        if rows > self.capacity:
            slots, records = slots[-self.capacity :], records[-self.capacity :]
        self.wrote(slots, records, length)
        self.take(torch.as_tensor(index), generation.reshape(-1))

    def rows(self, laps):
        return max(1, round(laps * self.capacity if self.careful else min(laps, 1) * self.capacity))

    def best_write(self, rb, rows, add):
        holder, index = {}, []
        records = self.fresh(rows)
        for row, record in enumerate(records):
            slot = -1
            if len(self.ranked) < self.capacity:
                slot, self.next_slot = self.next_slot, (self.next_slot + 1) % self.capacity
            elif rank(record[0]) > min(self.ranked)[0]:
                slot = min(self.ranked)[1]
                self.ranked.remove(min(self.ranked))
            if slot >= 0:
                self.ranked.append((rank(record[0]), slot))
                if slot in holder:
                    index[holder[slot]] = -1
                holder[slot] = row
            index.append(slot)
        data = self.data(records)
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
        self.write(self.rows(laps), add=False)

    @rule()
    def add(self):
        self.write(1, add=True)

    @rule(laps=st.floats(0.3, 1.5))
    def extend_through_a_second_buffer(self, laps):
        if (self.is_list or not self.careful) and self.length < self.capacity:
            return  # a list only grows at its end
        if self.second is None:
            self.second = self.build(self.rb.storage)
        self.ring_write(self.second, self.rows(laps), add=False)

    @precondition(lambda self: self.length and not self.keeps_best)
    @rule(slots=st.lists(slot_numbers, min_size=1, max_size=3, unique=True))
    def write_at(self, slots):
        slots = sorted({slot % self.capacity for slot in slots})
        if self.is_list or not self.careful:
            slots = [slot for slot in slots if slot < self.length] or [0]
        records = self.fresh(len(slots))
        self.rb.writer.write_at(torch.tensor(slots), self.data(records))
        self.wrote(slots, records, max(self.length, max(slots) + 1))

    @precondition(lambda self: self.length)
    @rule(slot=slot_numbers)
    def assign(self, slot):
        slot %= self.length
        records = self.fresh(1)
        self.rb[slot] = self.data(records)[0]
        self.wrote([slot], records, self.length)

    @precondition(lambda self: self.length and not self.is_list)
    @rule()
    def patch_a_field(self):
        everything = self.rb.storage[:]["id"].clone()
        self.rb.set_("id", everything)

    @rule(count=st.booleans())
    def empty(self, count):
        self.rb.empty(empty_write_count=count)
        self.length = 0
        self.ranked, self.next_slot = [], 0
        self.leaf = [[0.0] * self.width for _ in range(self.capacity)]
        self.default = 1.0

    @precondition(lambda self: self.length)
    @rule()
    def sample(self):
        if not any(map(sum, self.leaf[: self.length])):
            return
        may_fail = type(self).make_sampler is slices
        with contextlib.suppress(RuntimeError) if may_fail else contextlib.nullcontext():
            sample = self.rb.sample()
            assert sample["index_generation"].shape == (4,)
            self.take(sample["index"], sample["index_generation"])

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def update_late(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.taken), min_size=1, max_size=6))
        priority = [float(data.draw(st.integers(1, 50))) for _ in chosen]
        result = self.rb.update_priority_if_present(
            index=self.index_of(chosen),
            generation=[stamp for _, _, stamp, _ in chosen],
            priority=priority,
        )
        live = [self.is_live(handle) for handle in chosen]
        assert result.updated_mask.tolist() == live
        for (slot, cell, _, _), alive, value in zip(chosen, live, priority, strict=True):
            if alive:
                self.leaf[slot][cell] = value
                self.default = max(self.default, value)

    @precondition(lambda self: self.length)
    @rule()
    def checkpoint(self):
        self.settle()
        state = copy.deepcopy(self.rb.state_dict())
        leaf = copy.deepcopy(self.leaf)
        ranks = self.ranked[:], self.next_slot
        self.saved.append((state, self.length, self.record[:], leaf, self.default, ranks))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 100))
    def restore(self, which):
        state, self.length, record, leaf, self.default, ranks = self.saved[which % len(self.saved)]
        self.ranked, self.next_slot = ranks[0][:], ranks[1]
        self.rb.load_state_dict(copy.deepcopy(state))
        self.record, self.leaf = record[:], copy.deepcopy(leaf)

    @rule()
    def go_on_with_a_deep_copy(self):
        self.settle()
        self.rb = copy.deepcopy(self.rb)
        self.second = None

    # ---- what must hold after each step

    def settle(self):
        with self.rb._table.lock:
            if self.rb._learner_sampler is not None:  # an asynchronous learner
                self.rb._learner.catch_up(self.rb._table, self.rb._learner_sampler)

    @invariant()
    def every_handle_and_every_leaf_is_right(self):
        if not hasattr(self, "rb"):
            return
        type(self).steps += 1
        self.settle()
        assert len(self.rb.storage) == self.length * self.width
        if self.length:
            for slot, record in enumerate(self.record[: self.length]):
                stored = self.rb.storage[slot]["id"].reshape(-1).tolist()
                assert record is None or stored == [self.id_of(record)] * self.width
        length = self.length * self.width
        assert leaves(self.rb)[:length] == [leaf for row in self.leaf for leaf in row][:length]
        if self.taken:
            generation = [stamp for _, _, stamp, _ in self.taken]
            live = self.rb._table.is_live(self.index_of(self.taken), generation).tolist()
            assert live == [self.is_live(handle) for handle in self.taken]


STORAGES = {
    "tensor": {"make_storage": LazyTensorStorage},
    "memmap": {"make_storage": LazyMemmapStorage},
    "list": {"make_storage": ListStorage},
    "lazy stack": {"make_storage": LazyStackStorage},
    "compressed": {"make_storage": CompressedListStorage},
    "asynchronous": {"make_storage": LazyTensorStorage, "sync": False},
    "max value": {"keeps_best": True},
    "asynchronous max value": {"make_storage": ListStorage, "sync": False, "keeps_best": True},
    "rows of cells": {"width": 2},
    "memmap rows of cells": {"make_storage": LazyMemmapStorage, "width": 3},
}
WRITERS = {
    "a plain writer": {"make_writer": RoundRobinWriter},
    "a user's writer": {"make_writer": Stampless, "careful": False},
}
SAMPLERS = {
    "a priority sampler": {"make_sampler": lambda cells: PrioritizedSampler(cells, **PER)},
    "prioritized slices": {"make_sampler": slices},
}
KINDS = {
    **STORAGES,
    **WRITERS,
    **SAMPLERS,
    **{
        f"{name}, rows of cells": {**kind, "width": 2}
        for name, kind in {**WRITERS, **SAMPLERS}.items()
    },
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
    assert run(kind, examples=15, derandomize=True) >= 200


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_no_handle_lies_and_no_leaf_is_wrong_for_long(kind):
    run(kind, 300, derandomize=False)
