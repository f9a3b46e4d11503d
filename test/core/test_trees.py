from __future__ import annotations

import pytest
import torch
from common import CAPACITY
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler
from torchrl.data.replay_buffers.generations.core.trees import (
    write_default,
    write_priority,
)


def storage() -> LazyTensorStorage:
    made = LazyTensorStorage(CAPACITY)
    made.set(torch.arange(CAPACITY), torch.arange(CAPACITY))
    return made


def sampler(cls=PrioritizedSampler, **kwargs) -> PrioritizedSampler:
    return cls(CAPACITY, alpha=0.7, beta=0.5, **kwargs)


def state(of: PrioritizedSampler) -> tuple:
    index = torch.arange(CAPACITY)
    top, slot = of._max_priority
    top = None if top is None else float(top)
    slot = None if slot is None else int(slot)
    return of._sum_tree[index].tolist(), of._min_tree[index].tolist(), top, slot


class Doubling(PrioritizedSampler):
    """A user's sampler that does something of its own in update_priority."""

    def update_priority(self, index, priority, *, storage=None):
        super().update_priority(index, 2 * torch.as_tensor(priority), storage=storage)


SAMPLERS = {
    "float32": sampler,
    "float64": lambda: sampler(dtype=torch.float64),
    "within_buffer": lambda: sampler(max_priority_within_buffer=True),
    "users_own": lambda: sampler(Doubling),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_direct_write_leaves_the_sampler_as_torchrl_does(make):
    ours, theirs, where = make(), make(), storage()
    for slots, priority in (
        ([3, 1, 4, 1], [0.5, 3.0, 0.1, 2.0]),
        ([0], [2.5]),
        ([5, 2], [7.0, 0.25]),
        ([6, 7, 6], 1.5),
    ):
        slots = torch.tensor(slots)
        priority = torch.tensor(priority, dtype=ours.dtype)
        write_priority(ours, slots, priority, float(priority.max()), where)
        theirs.update_priority(slots, priority, storage=where)
        assert state(ours) == state(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_apart_in_memory_are_written_as_they_are_named(dtype):
    of, where = sampler(dtype=dtype), storage()
    apart = torch.tensor([[6, 0], [1, 0], [3, 0]])[:, 0]
    write_priority(of, apart, torch.rand(3, 2, dtype=dtype).fill_(4.0)[:, 1], 4.0, where)
    assert of._sum_tree[torch.arange(CAPACITY)].nonzero().view(-1).tolist() == [1, 3, 6]
    write_priority(of, apart, torch.tensor([1.0, 9, 2, 9, 3, 9], dtype=dtype)[::2], 3.0, where)
    assert of._sum_tree[6] < of._sum_tree[1] < of._sum_tree[3]
    write_default(of, torch.arange(CAPACITY)[::2], where)
    assert of._sum_tree[0] == of._sum_tree[2] == of._sum_tree[6] > of._sum_tree[3]


# TorchRL's mark_update fails with float64: it passes its default on as a float32.
@pytest.mark.parametrize("kind", ["float32", "within_buffer", "users_own"])
def test_a_default_priority_is_that_of_torchrls_mark_update(kind):
    ours, theirs, where = SAMPLERS[kind](), SAMPLERS[kind](), storage()
    for slots in (torch.arange(4), 5, torch.tensor([-1, 2]), torch.tensor([7]), -1):
        write_default(ours, slots, where)
        theirs.mark_update(slots, storage=where)
        assert state(ours) == state(theirs)
        for one in (ours, theirs):
            one.update_priority(torch.tensor([0]), 3.0)
    assert state(ours)[0][7] > state(ours)[0][3] > 0  # the default had risen meanwhile


def test_a_default_priority_follows_the_largest_one_and_the_exponent():
    ours, theirs, where = sampler(), sampler(), storage()

    def both(change):
        for one in (ours, theirs):
            change(one)
        write_default(ours, torch.tensor([5, 6]), where, are_leaves=True)
        theirs.mark_update(torch.tensor([5, 6]), storage=where)
        assert state(ours) == state(theirs)
        return state(ours)[0][5]

    leaves = [
        both(lambda one: one.update_priority(torch.tensor([0]), 2.0)),
        both(lambda one: one.update_priority(torch.tensor([1]), 3.0)),
        both(lambda one: setattr(one, "alpha", 0.4)),
        both(lambda one: setattr(one, "_eps", 0.5)),
        both(lambda one: one._empty()),
    ]
    assert len(set(leaves)) == len(leaves)


def test_a_users_own_default_priority_counts():
    class Small(PrioritizedSampler):
        @property
        def default_priority(self):
            return 0.25

    ours, theirs, where = sampler(Small), sampler(Small), storage()
    write_default(ours, torch.tensor([1, 2]), where)
    theirs.mark_update(torch.tensor([1, 2]), storage=where)
    assert state(ours) == state(theirs)
    assert 0.3 < state(ours)[0][1] < 0.4  # 0.25 ** 0.7


def test_a_default_priority_of_a_float64_tree_is_one_before_any_other():
    of = sampler(dtype=torch.float64)
    write_default(of, torch.tensor([2, 1]), storage())
    assert of._sum_tree[torch.arange(4)].tolist() == pytest.approx([0, 1, 1, 0], abs=1e-7)
    assert state(of)[2:] == (1.0, 2)


def test_a_sampler_without_priorities_takes_no_notice_of_a_default():
    write_default(RandomSampler(), torch.arange(3), storage())


def test_leaves_that_the_trees_do_not_take_leave_the_default_priority_alone():
    of, where = sampler(), storage()
    write_priority(of, torch.arange(3), torch.ones(3), 1.0, where)

    def loss(weight):
        priority = weight * torch.ones(3)
        write_priority(of, torch.arange(3), priority, 9.0, where)
        return priority.sum()

    with pytest.raises(RuntimeError, match="data pointer"):
        torch.func.grad(loss)(torch.tensor(9.0))
    assert of._max_priority[0] == 1


def test_an_exponent_that_is_learned_is_read_as_a_number():
    of, where = sampler(), storage()
    of.alpha = torch.nn.Parameter(torch.tensor(0.5))
    write_priority(of, torch.arange(2), torch.tensor([4.0, 9.0]), 9.0, where)
    assert of._sum_tree[torch.arange(2)].tolist() == [2, 3]
