from __future__ import annotations

import inspect
import threading
import warnings

import numpy as np
import pytest
import torch
import torchrl.data
from common import (
    CAPACITY,
    PER,
    STORAGES,
    Thread,
    buffer,
    handles,
    ids,
    leaves,
    stamps,
    td_buffer,
)
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    TensorStorage,
)
from torchrl.data.replay_buffers import generations
from torchrl.data.replay_buffers.generations import (
    ConditionalPriorityUpdates,
    PrioritizedReplayBuffer,
    PriorityUpdateResult,
    ReplayBuffer,
    RoundRobinWriter,
    SlotGenerations,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

MAX_LEAF = torch.finfo(torch.float32).max / CAPACITY


def update(rb, index, generation, priority):
    return rb.update_priority_if_present(index=index, generation=generation, priority=priority)


# ------------------------------------------------------------------ what is written and reported


@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
def test_a_late_priority_reaches_its_own_record_or_none(make):
    rb = buffer(0, storage=make(CAPACITY))
    rb.extend([*torch.arange(8)] if make is ListStorage else torch.arange(8))
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    held = handles(rb)
    for record in range(100, 103):
        rb.add(torch.tensor(record))
    result = rb.update_priority_if_present(**held, priority=torch.arange(100, 108))
    assert isinstance(result, PriorityUpdateResult)
    assert result.updated_mask.tolist() == [False] * 3 + [True] * 5
    assert (result.num_updated, result.num_stale) == (5, 3)
    assert result.batch_size == (8,)
    assert leaves(rb) == [8, 8, 8, 103, 104, 105, 106, 107]
    assert rb.sampler.default_priority == 107


def test_a_list_without_maximum_takes_conditional_updates_up_to_its_trees_size():
    rb = ReplayBuffer(
        storage=ListStorage(), sampler=PrioritizedSampler(20, **PER), track_generations=True
    )
    index, generation = rb.extend(list(range(18)), return_generation=True)
    assert update(rb, index, generation, torch.arange(1.0, 19.0)).num_updated == 18
    assert leaves(rb) == [*range(1, 19), 0, 0]
    with pytest.raises(ValueError, match="holds 20 slots: got a record for slot 20"):
        rb.extend([0, 1, 2])
    assert len(rb) == 18
    assert rb.writer._cursor == 18
    rb.extend([0, 1])
    assert leaves(rb)[18:] == [18, 18]


@pytest.mark.parametrize("name", ["PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer"])
def test_a_tree_for_a_list_without_maximum_is_refused_instead_of_built_for_ever(name):
    with pytest.raises(ValueError, match="needs a storage with a max_size"):
        getattr(generations, name)(**PER, storage=ListStorage())


def test_a_sampler_with_too_few_leaves_is_refused_at_construction():
    storage = LazyTensorStorage(CAPACITY)
    sampler = PrioritizedSampler(4, **PER)
    with pytest.raises(ValueError, match="max_capacity=4 for a storage of 8 slots"):
        ReplayBuffer(storage=storage, sampler=sampler, track_generations=True)
    assert storage._attached_entities == []


def test_a_slot_that_was_never_written_is_stale_and_the_rest_is_updated():
    rb = buffer(5)
    assert update(rb, [6, 2], [-1, 0], [50, 3]).updated_mask.tolist() == [False, True]
    rb.add(torch.tensor(9))
    assert leaves(rb) == [1, 1, 3, 1, 1, 3, 0, 0]


def test_after_empty_the_current_stamps_are_stale_until_there_are_records_again():
    rb = buffer()
    rb.empty()
    result = update(rb, range(8), stamps(rb).clone(), 99)
    assert (result.num_updated, result.num_stale) == (0, 8)
    rb.extend(torch.arange(2))
    assert leaves(rb) == [1, 1, 0, 0, 0, 0, 0, 0]
    result = update(rb, range(8), stamps(rb).clone(), 4)
    assert (result.num_updated, result.num_stale) == (2, 6)
    assert leaves(rb) == [4, 4, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("index", [[-1, 8, 10**6, -9], [-(2**63), 2**63 - 1, 9, -2]])
@pytest.mark.parametrize("generation", [0, -1, 1, 2**62])
def test_an_index_out_of_range_is_stale_and_touches_nothing(index, generation):
    rb = buffer()
    assert update(rb, index, [generation] * 4, 50.0).updated_mask.tolist() == [False] * 4
    assert leaves(rb) == [1] * 8
    assert rb.sampler.default_priority == 1


def test_update_if_present_follows_the_same_rule_on_an_emptied_slot_and_out_of_range():
    rb = td_buffer()
    patch = {"id": torch.full((4,), 77)}
    rb.empty()
    result = rb.update_if_present(
        index=torch.tensor([0, 1, 2, 7]), generation=stamps(rb)[[0, 1, 2, 7]].clone(), patch=patch
    )
    assert result.updated.tolist() == [False] * 4
    rb.extend(ids(range(8)))
    current = stamps(rb)[0].item()
    result = rb.update_if_present(
        index=torch.tensor([-1, 8, 10**6, 0]), generation=torch.full((4,), current), patch=patch
    )
    assert result.updated.tolist() == [False, False, False, True]
    assert rb[:]["id"].tolist() == [77, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        (0, ()),
        (np.int64(0), ()),
        (torch.tensor(0), ()),
        (np.array(0), ()),
        ([0], (1,)),
        ((0,), (1,)),
        (np.array([0]), (1,)),
        (np.array([0], dtype=np.uint8), (1,)),
        (torch.tensor([0], dtype=torch.int32), (1,)),
        ((torch.tensor([0]),), (1,)),
        ((np.array([0]),), (1,)),
        (range(0, 1), (1,)),
        ([torch.tensor(0)], (1,)),
        (torch.tensor([[0]]), (1,)),
        (torch.tensor([[0, 0, 0]]), (1,)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("generation", [0, [0], torch.tensor([0]), np.array(0)], ids=repr)
def test_every_form_of_an_index_works_and_shapes_the_mask(index, shape, generation):
    rb = buffer()
    result = update(rb, index, generation, 5.0)
    assert result.updated_mask.shape == shape
    assert result.updated_mask.dtype is torch.bool
    assert result.num_updated == 1
    assert leaves(rb) == [5] + [1] * 7


def test_a_read_only_array_makes_no_warning():
    index = np.arange(2)
    index.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert update(buffer(), index, index * 0, index + 1.0).num_updated == 2


def test_one_priority_goes_to_all_handles_and_an_empty_batch_is_no_error():
    rb = buffer()
    assert update(rb, [0, 1, 2], [0, 0, 0], 4.0).num_updated == 3
    assert leaves(rb) == [4, 4, 4, 1, 1, 1, 1, 1]
    for empty in (
        [],
        (),
        torch.empty(0),
        np.array([]),
        torch.empty(0, dtype=torch.int64),
        range(0),
    ):
        result = update(rb, empty, empty, [])
        assert (result.num_updated, result.num_stale) == (0, 0)
        assert result.updated_mask.shape == (0,)
    assert update(rb, [], [], 3.0).num_updated == 0
    assert leaves(rb) == [4, 4, 4, 1, 1, 1, 1, 1]


def test_trailing_dimensions_repeat_the_slot_and_their_priorities_are_reduced():
    rb = buffer()
    index = torch.tensor([[0, 0], [3, 3], [5, 5]])
    priority = torch.tensor([[1.0, 5.0], [7.0, 2.0], [0.5, 9.0]])
    rb.add(torch.tensor(0))
    result = update(rb, index, torch.zeros_like(index), priority)
    assert result.updated_mask.tolist() == [False, True, True]
    assert leaves(rb) == [1, 1, 1, 7, 1, 9, 1, 1]
    assert update(rb, index[:, :1], [1, 0, 0], priority[:, :1]).updated_mask.shape == (3,)
    assert leaves(rb) == [1, 1, 1, 7, 1, 0.5, 1, 1]
    with pytest.raises(ValueError, match=r"one index per record: got shape \(1, 2\)"):
        update(rb, [[0, 1]], [0], 1.0)
    with pytest.raises(ValueError, match=r"one generation per record: got shape \(3, 2\)"):
        update(rb, index, torch.tensor([[1, 0], [0, 0], [0, 0]]), 1.0)


# ------------------------------------------------------------------ bad input


def refused(rb, error, match, **arguments):
    """The call raises, and stamps, tree, default priority and sampling are as before."""
    before = (leaves(rb), stamps(rb).clone(), float(rb.sampler.default_priority))
    with pytest.raises(error, match=match):
        rb.update_priority_if_present(**arguments)
    assert leaves(rb) == before[0]
    assert torch.equal(stamps(rb), before[1])
    assert float(rb.sampler.default_priority) == before[2]
    rb.sample(4)


NO_INTEGERS = [
    True,
    0.0,
    [True, False, True],
    [0, True, 2],
    [0.0, 1.0, 2.0],
    torch.tensor([True, False, True]),
    torch.arange(3.0),
    np.array([0.0, 1.0, 2.0]),
    np.array([True, False, True]),
    "abc",
    None,
    ["a"],
]


@pytest.mark.parametrize("bad", NO_INTEGERS, ids=repr)
def test_an_index_or_generation_that_is_no_integer_is_refused_by_name(bad):
    rb = buffer()
    refused(rb, TypeError, r"index must be integer", index=bad, generation=[0, 0, 0], priority=1.0)
    refused(
        rb, TypeError, "generation must be integer", index=[0, 1, 2], generation=bad, priority=1.0
    )


def test_numbers_of_handles_stamps_and_priorities_must_agree():
    rb = buffer()
    three = {"index": [0, 1, 2], "generation": [0, 0, 0]}
    rule = "one generation per record: got 1 generations for 3 records"
    refused(rb, ValueError, rule, index=[0, 1, 2], generation=[0], priority=1.0)
    refused(rb, ValueError, rule, index=[0, 1, 2], generation=0, priority=1.0)
    rule = r"one priority per record, or one for all: got priority of shape \(2,\) for 3 records"
    refused(rb, ValueError, rule, **three, priority=[1.0, 2.0])
    refused(rb, ValueError, r"shape \(0,\) for 3 records", **three, priority=[])
    refused(rb, ValueError, r"shape \(2, 3\) for 3 records", **three, priority=torch.ones(2, 3))
    refused(rb, ValueError, r"shape \(3, 0\) for 3 records", **three, priority=torch.ones(3, 0))
    one = {"index": [0], "generation": [0]}
    refused(rb, ValueError, r"shape \(1, 0\) for 1 records", **one, priority=[[]])
    sparse = torch.ones(3).to_sparse()
    refused(rb, TypeError, "dense tensor: got layout torch.sparse_coo", **three, priority=sparse)
    two_dimensional = (torch.tensor([0]), torch.tensor([1]))
    rule = "a tuple of 2 for a one-dimensional storage"
    refused(rb, ValueError, rule, index=two_dimensional, generation=[0], priority=1.0)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), -1.0, 3e38, 0.0, 1e300, MAX_LEAF * 1.01]
)
def test_a_priority_that_would_break_the_tree_is_refused_in_any_row_live_or_stale(bad, row, live):
    rb = buffer()
    priority = torch.ones(3, dtype=torch.float64)
    priority[row] = bad
    generation = [0, 0, 0] if live else [7, 7, 7]
    refused(
        rb,
        ValueError,
        rf"priority\[{row}\] must be finite, not negative, .* got {bad}".replace("+", r"\+"),
        index=[0, 1, 2],
        generation=generation,
        priority=priority,
    )


def test_a_python_number_keeps_its_digits_in_a_tree_of_float64():
    sampler = PrioritizedSampler(CAPACITY, **PER, dtype=torch.float64)
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, track_generations=True)
    index, generation = rb.extend(torch.arange(2), return_generation=True)
    result = rb.update_priority_if_present(index=index, generation=generation, priority=[1e39, 0.1])
    assert result.num_updated == 2
    assert sampler._sum_tree[index].tolist() == [1e39, 0.1]


TOO_SMALL = "a leaf for every slot: got max_capacity=4 for a storage of 6 slots"


def test_a_tree_smaller_than_the_records_of_a_list_without_an_end_is_refused():
    def of(leaves):
        sampler = PrioritizedSampler(leaves, **PER)
        return ReplayBuffer(storage=ListStorage(), sampler=sampler, track_generations=True)

    rb, other = of(9), of(4)
    index, generation = rb.extend(list(torch.arange(6.0)), return_generation=True)
    with pytest.raises(ValueError, match=TOO_SMALL):
        ReplayBuffer(storage=rb.storage, sampler=PrioritizedSampler(4, **PER))
    with pytest.raises(ValueError, match=TOO_SMALL):
        rb.set_sampler(PrioritizedSampler(4, **PER))
    with pytest.raises(ValueError, match=TOO_SMALL):
        other.set_storage(rb.storage)
    rb.extend(list(torch.arange(3.0)))  # up to its own tree's last leaf
    held = {"index": index, "generation": generation}
    assert rb.update_priority_if_present(**held, priority=2.0).num_updated == 6


def test_a_tree_that_was_there_before_the_table_is_checked_too():
    storage = LazyTensorStorage(6)
    small = [
        cls(storage=storage, sampler=PrioritizedSampler(4, **PER))
        for cls in (ReplayBuffer, torchrl.data.ReplayBuffer)
    ]
    with pytest.raises(ValueError, match=TOO_SMALL):
        ReplayBuffer(storage=storage, track_generations=True)
    assert not hasattr(storage, "_slot_generations")
    small[0].set_sampler(PrioritizedSampler(6, **PER))
    del storage._attached_entities[1]  # TorchRL's, which adopt() brings back
    rb = ReplayBuffer(storage=storage, track_generations=True)
    storage.attach(small[1])
    with pytest.raises(ValueError, match=TOO_SMALL):
        rb._table.adopt(small[1])


def test_a_larger_tree_takes_more_records_of_a_list_without_an_end():
    sampler = PrioritizedSampler(4, **PER)
    rb = ReplayBuffer(storage=ListStorage(), sampler=sampler, track_generations=True)
    with pytest.raises(ValueError, match="holds 4 slots: got a record for slot 4"):
        rb.extend(list(torch.arange(5.0)))
    rb.set_sampler(PrioritizedSampler(6, **PER))
    rb.extend(list(torch.arange(5.0)))
    assert len(rb) == 5


def test_the_first_bad_row_is_named_and_a_single_priority_has_no_row():
    rb = buffer()
    three = {"index": [0, 1, 2], "generation": [0, 0, 0]}
    refused(rb, ValueError, r"priority\[1\].*got -2\.0", **three, priority=[1.0, -2.0, -3.0])
    refused(rb, ValueError, r"priority must be finite.*got -2", **three, priority=-2)
    priority = torch.tensor([[1.0, 2.0], [3.0, float("inf")], [5.0, 6.0]])
    refused(rb, ValueError, r"priority\[1\] must be finite", **three, priority=priority)


@pytest.mark.parametrize(
    "bad", [True, [True] * 3, torch.ones(3, dtype=torch.bool), "abc", None, 1j]
)
def test_a_priority_that_is_no_number_is_a_type_error(bad):
    three = {"index": [0, 1, 2], "generation": [0, 0, 0]}
    refused(buffer(), TypeError, "priority must be", **three, priority=bad)


def test_the_largest_allowed_priorities_leave_the_tree_usable():
    rb = buffer()
    largest = float(np.nextafter(np.float32(MAX_LEAF), np.float32(0)))
    assert update(rb, range(8), [0] * 8, largest).num_updated == 8
    assert np.isfinite(rb.sampler._sum_tree.query(0, 8))
    rb.sample(4)


def test_a_weight_that_underflows_to_zero_is_refused_and_a_zero_priority_with_eps_is_not():
    storage = LazyTensorStorage(CAPACITY)
    squared = PrioritizedReplayBuffer(
        alpha=2.0, beta=1.0, eps=0.0, storage=storage, track_generations=True
    )
    squared.extend(torch.arange(8))
    refused(squared, ValueError, r"above 0", index=[0, 1], generation=[0, 0], priority=[1.0, 1e-30])
    with_eps = PrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.5, storage=LazyTensorStorage(CAPACITY), track_generations=True
    )
    with_eps.extend(torch.arange(8))
    assert update(with_eps, 0, 0, 0.0).num_updated == 1
    assert leaves(with_eps)[0] == 0.5
    uniform = PrioritizedReplayBuffer(
        alpha=0.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(CAPACITY), track_generations=True
    )
    uniform.extend(torch.arange(8))
    assert update(uniform, 0, 0, 0.0).num_updated == 1  # 0 ** 0 is 1


@pytest.mark.parametrize(
    "priority",
    [
        torch.tensor([500, 600], dtype=torch.float64),
        torch.tensor([500, 600], dtype=torch.float16),
        torch.tensor([500, 600], dtype=torch.bfloat16),
        torch.tensor([500, 600], dtype=torch.int64),
        torch.tensor([500.0, 600.0], requires_grad=True),
        torch.tensor([[500.0], [600.0]]),
        np.array([500, 600], dtype=np.float64),
        np.array([600, 500], dtype=np.int32)[::-1],
        [500, 600],
    ],
    ids=repr,
)
def test_priorities_are_cast_to_the_samplers_dtype(priority):
    rb = buffer(2)
    expected = torch.as_tensor(np.array(priority)) if isinstance(priority, np.ndarray) else priority
    expected = torch.as_tensor(expected).to(torch.float32).reshape(-1).tolist()
    assert update(rb, [0, 1], [0, 0], priority).num_updated == 2
    assert leaves(rb) == [*expected, 0, 0, 0, 0, 0, 0]
    rb.add(torch.tensor(9))
    assert leaves(rb)[2] == max(expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_stale_duplicate_never_shadows_the_live_row(order):
    rb = buffer()
    rb.add(torch.tensor(9))  # slot 0 is at stamp 1 now
    generation, priority = torch.tensor([1, 0]), torch.tensor([20.0, 99.0])
    result = update(rb, [0, 0], generation[list(order)], priority[list(order)])
    assert result.updated_mask.tolist() == [row == 0 for row in order]
    assert leaves(rb)[0] == 20
    assert rb.sampler.default_priority == 20


def test_of_a_live_duplicate_the_last_row_wins_and_all_count():
    rb = buffer()
    result = update(rb, [2, 3, 2, 2], [0] * 4, [5.0, 6.0, 9.0, 7.0])
    assert result.updated_mask.tolist() == [True] * 4
    assert leaves(rb) == [1, 1, 7, 6, 1, 1, 1, 1]


def test_without_tracking_or_without_priorities_the_error_says_what_to_build():
    plain = PrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(CAPACITY))
    plain.extend(torch.arange(8))
    with pytest.raises(RuntimeError, match="track_generations=True"):
        update(plain, [0], [0], 1.0)
    for call in (
        lambda: plain.extend(torch.arange(2), return_generation=True),
        lambda: plain.add(torch.tensor(2), return_generation=True),
    ):
        with pytest.raises(RuntimeError, match="track_generations=True"):
            call()
    assert plain.write_count == 8
    uniform = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), track_generations=True)
    uniform.extend(torch.arange(8))
    with pytest.raises(RuntimeError, match="PrioritizedSampler"):
        update(uniform, [0], [0], 1.0)


@pytest.mark.parametrize(
    "index",
    [torch.tensor([1], dtype=torch.uint32), torch.tensor([1]).numpy().astype(">i8")],
    ids=["uint32", "big-endian"],
)
def test_odd_integer_dtypes_are_integers(index):
    rb = buffer()
    priority = torch.tensor([5.0]).numpy().astype(">f4")
    result = rb.update_priority_if_present(index=index, generation=[0], priority=priority)
    assert result.num_updated == 1
    assert leaves(rb)[1] == 5


def test_odd_inputs_get_errors_that_name_the_argument():
    rb = td_buffer()
    with pytest.raises(ValueError, match="one index per record"):
        rb.update_priority_if_present(index=torch.zeros(2, 0, dtype=int), generation=[], priority=1)
    with pytest.raises(TypeError, match="index must be a dense tensor"):
        rb.update_priority_if_present(
            index=torch.tensor([1]).to_sparse(), generation=[0], priority=1.0
        )
    with pytest.raises(TypeError, match="needs a tensordict: got NoneType"):
        rb.update_tensordict_priority_if_present(None)


# ------------------------------------------------------------------ tensordict buffers


def test_a_tensordict_sample_updates_its_live_records():
    rb = td_buffer(batch_size=4)
    sample = rb.sample()
    rb.extend(ids(range(3)))
    sample["td_error"] = torch.arange(10.0, 14.0)
    result = rb.update_tensordict_priority_if_present(sample)
    assert result.updated_mask.tolist() == [slot >= 3 for slot in sample["index"].tolist()]
    for slot, priority in zip(sample["index"].tolist(), sample["td_error"].tolist(), strict=True):
        if slot >= 3 and sample["index"].tolist().count(slot) == 1:
            assert leaves(rb)[slot] == priority
    assert leaves(rb)[:3] == [1, 1, 1]


def test_a_single_record_and_trajectory_records_update_like_torchrls_call():
    rb = td_buffer()
    one = ids([0], index=torch.tensor([3]), index_generation=torch.tensor([0]))[0]
    one["td_error"] = torch.tensor(6.0)
    assert rb.update_tensordict_priority_if_present(one).updated_mask.shape == ()
    assert leaves(rb)[3] == 6
    rb = td_buffer(0, batch_size=4)
    rb.extend(TensorDict({"x": torch.zeros(4, 2)}, [4, 2]))
    sample = rb.sample()
    sample["td_error"] = torch.tensor([[1.0, 5.0], [7.0, 2.0], [3.0, 3.0], [0.5, 9.0]])
    assert sample["index_generation"].shape == (4, 2)
    assert rb.update_tensordict_priority_if_present(sample).updated_mask.tolist() == [True] * 4
    last = {row[0]: high for row, high in zip(sample["index"].tolist(), [5, 7, 3, 9], strict=True)}
    assert [leaves(rb)[slot] for slot in last] == list(last.values())


def test_a_sample_whose_stamps_were_dropped_is_a_key_error_that_says_why():
    rb = td_buffer(batch_size=4)
    for key in ("index", "index_generation"):
        with pytest.raises(KeyError, match=f"needs '{key}'.*dropped the key"):
            rb.update_tensordict_priority_if_present(rb.sample().exclude(key))
    with pytest.raises(RuntimeError, match="needs a tensordict buffer"):
        buffer().update_tensordict_priority_if_present(rb.sample())
    plain = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(CAPACITY, **PER)
    )
    with pytest.raises(RuntimeError, match="track_generations=True"):
        plain.update_tensordict_priority_if_present(rb.sample())


# ------------------------------------------------------------------ construction

CLASSES = {
    "ReplayBuffer": {},
    "TensorDictReplayBuffer": {},
    "PrioritizedReplayBuffer": PER,
    "TensorDictPrioritizedReplayBuffer": PER,
}


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_is_a_torchrl_class_and_stands_to_ours_as_that_one_does(name):
    ours, theirs = getattr(generations, name), getattr(torchrl.data, name)
    assert issubclass(ours, theirs)
    for other in CLASSES:
        assert issubclass(ours, getattr(generations, other)) == issubclass(
            theirs, getattr(torchrl.data, other)
        )


@pytest.mark.parametrize("name", CLASSES)
def test_each_argument_of_a_torchrl_method_is_one_of_ours(name):
    ours, theirs = getattr(generations, name), getattr(torchrl.data, name)
    for method, stock in inspect.getmembers(theirs, inspect.isfunction):
        if method.startswith("_") and method != "__init__":
            continue
        have = inspect.signature(getattr(ours, method)).parameters
        wants = inspect.signature(stock).parameters
        if any(p.kind is p.VAR_KEYWORD for p in have.values()):
            continue
        assert [p for p in wants if p not in have] == [], method


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("delayed", [False, True])
def test_track_generations_builds_the_tracking_writer_of_the_buffers_kind(name, delayed):
    if name == "TensorDictPrioritizedReplayBuffer" and delayed:
        pytest.skip("TorchRL's class takes no delayed_init")
    kwargs = {} if not delayed else {"delayed_init": True}
    rb = getattr(generations, name)(
        **CLASSES[name],
        storage=LazyTensorStorage(CAPACITY),
        batch_size=2,
        track_generations=True,
        **kwargs,
    )
    assert rb.initialized is not delayed
    rb.extend(ids(range(8)))
    expected = TensorDictRoundRobinWriter if "TensorDict" in name else RoundRobinWriter
    assert type(rb.writer) is expected
    assert rb.writer.tracks_generations
    assert "index_generation" in rb.sample(return_info=True)[1]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("delayed", [False, True])
def test_a_writer_that_does_not_track_is_refused_with_track_generations(name, delayed):
    kwargs = {"storage": LazyTensorStorage(CAPACITY), "track_generations": True, **CLASSES[name]}
    cls = getattr(generations, name)
    with pytest.raises(ValueError, match="needs a writer that tracks: got RoundRobinWriter"):
        cls(writer=RoundRobinWriter(), **kwargs)
    if delayed and name != "TensorDictPrioritizedReplayBuffer":
        rb = cls(writer=RoundRobinWriter, delayed_init=True, **kwargs)
        with pytest.raises(ValueError, match="needs a writer that tracks"):
            rb.add(torch.tensor(1))
        assert not rb.initialized
    else:
        with pytest.raises(ValueError, match="needs a writer that tracks"):
            cls(writer=RoundRobinWriter, **kwargs)
    assert kwargs["storage"]._attached_entities == []


@pytest.mark.parametrize("name", ["PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer"])
def test_the_prioritized_classes_take_writer_shared_and_generator(name):
    def make(**kwargs):
        rb = getattr(generations, name)(
            **PER, storage=LazyTensorStorage(64), batch_size=16, **kwargs
        )
        rb.extend(ids(range(64)))
        return rb

    writer = TensorDictRoundRobinWriter(track_generations=True)
    assert make(writer=writer).writer is writer
    assert make(writer=lambda: writer).writer is writer
    assert make(shared=True).shared is True
    assert make().shared is False
    with pytest.raises(ValueError, match="prefetch"):
        make(shared=True, prefetch=2)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        rb = make(generator=generator)
        assert rb.sampler._rng is generator
        return rb.sample(return_info=True)[1]["index"].tolist()

    assert draw(3) == draw(3) != draw(4)


def test_a_users_own_buffer_gets_it_from_the_mix_in():
    class Mine(ConditionalPriorityUpdates, torchrl.data.TensorDictReplayBuffer):
        pass

    rb = Mine(
        storage=LazyTensorStorage(CAPACITY),
        sampler=PrioritizedSampler(CAPACITY, **PER),
        batch_size=8,
        track_generations=True,
    )
    rb.extend(ids(range(8)))
    sample = rb.sample()
    rb.extend(ids(range(8)))
    sample["td_error"] = torch.ones(8)
    assert rb.update_tensordict_priority_if_present(sample).num_stale == 8


@pytest.mark.parametrize("name", CLASSES)
def test_with_tracking_off_a_sample_has_the_stock_keys_and_the_storage_no_counters(name):
    def keys(module):
        storage = LazyTensorStorage(CAPACITY)
        rb = getattr(module, name)(**CLASSES[name], storage=storage, batch_size=2)
        rb.extend(ids(range(8)))
        data, info = rb.sample(return_info=True)
        assert not hasattr(storage, "_slot_generations")
        return set(data.keys()), set(info)

    assert keys(generations) == keys(torchrl.data)


def test_a_users_class_may_write_a_priority_by_integer_inside_of_add():
    class Some(torchrl.data.PrioritizedReplayBuffer):
        def add(self, data):
            index = super().add(data)
            self.update_priority(index, 5.0)
            return index

    class Mine(ConditionalPriorityUpdates, Some):
        pass

    rb = Mine(**PER, storage=LazyTensorStorage(4), track_generations=True)
    rb.add(torch.tensor(1.0))
    assert leaves(rb) == [5, 0, 0, 0]


def test_an_untracked_buffer_takes_no_lock_that_torchrl_does_not_take():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), shared=True)
    rb.extend(torch.arange(4))

    def all_of_it():
        rb.load_state_dict(rb.state_dict())
        rb.set_sampler(RandomSampler())
        rb.set_writer(torchrl.data.RoundRobinWriter())

    with rb._write_lock:  # not reentrant: TorchRL's own
        Thread(all_of_it).join()


def test_a_construction_that_fails_leaves_nothing_on_the_storage():
    for kwargs in (
        {"sampler": PrioritizedSampler(4, **PER)},
        {"sampler": torchrl.data.SamplerWithoutReplacement(drop_last=True)},
        {"storage": ListStorage(CAPACITY), "shared": True},
    ):
        storage = kwargs.pop("storage", LazyTensorStorage(CAPACITY))
        with pytest.raises((ValueError, RuntimeError)):
            ReplayBuffer(storage=storage, track_generations=True, **kwargs)
        assert not hasattr(storage, "_slot_generations")
        assert not hasattr(storage, "_generation_table")
        assert storage._attached_entities == []


# ------------------------------------------------------------------ records and patches


@pytest.mark.parametrize(
    ("index", "slots"),
    [
        (slice(2, 4), [2, 3]),
        (slice(None, None, 3), [0, 3, 6]),
        (slice(5, 2), []),
        (3, [3]),
        (-1, [7]),
        (torch.tensor([1, -2]), [1, 6]),
        (np.array([1, 6]), [1, 6]),
        ([0, 5], [0, 5]),
        (torch.arange(8) % 4 == 1, [1, 5]),
        ((torch.tensor([4]),), [4]),
        (range(2), [0, 1]),
        (..., list(range(8))),
    ],
    ids=repr,
)
def test_a_record_put_in_by_index_is_another_record_with_the_default_priority(index, slots):
    rb = td_buffer()
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    held = handles(rb)
    records = ids(range(50, 50 + len(slots)))
    rb[index] = records[0] if isinstance(index, int) else records
    live = [slot not in slots for slot in range(8)]
    assert rb._table.is_live(**held).tolist() == live
    assert leaves(rb) == [slot + 1 if live[slot] else 8 for slot in range(8)]
    assert [rb[:]["id"][slot].item() for slot in slots] == list(range(50, 50 + len(slots)))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_write_all_and_rb_slice_put_records_in_while_patches_keep_them(storage):
    rb = td_buffer(storage=storage(CAPACITY))
    held = handles(rb)
    update(rb, **held, priority=torch.arange(1.0, 9.0))
    if storage is not ListStorage:
        rb.set_at_("id", torch.tensor([5, 6]), torch.tensor([0, 1]))
        rb.set_("id", torch.arange(8) + 100)
        rb.update_(ids(range(8)))
        if storage is LazyTensorStorage:  # TorchRL refuses it for a memory-mapped one
            rb["id"] = torch.arange(8) + 200
        rb.update_if_present(**held, patch={"id": torch.arange(8) + 300})
    assert rb._table.is_live(**held).all()
    assert leaves(rb) == [1, 2, 3, 4, 5, 6, 7, 8]
    rb[2:4] = list(ids([1, 2])) if storage is ListStorage else ids([1, 2])
    assert rb._table.is_live(**held).tolist() == [True] * 2 + [False] * 2 + [True] * 4
    assert leaves(rb) == [1, 2, 8, 8, 5, 6, 7, 8]
    data = ids(range(8))
    rb.write_all(list(data) if storage is ListStorage else data)
    assert not rb._table.is_live(**held).any()
    assert leaves(rb) == [8] * 8


def test_records_past_the_length_get_a_stamp_but_no_priority_until_they_can_be_sampled():
    rb = buffer(2)
    rb[1:4] = torch.tensor([50, 51, 52])
    assert leaves(rb) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert rb._table.of(range(4)).tolist() == [0, 1, -1, -1]
    rb.add(torch.tensor(9))
    assert rb._table.of(range(4)).tolist() == [0, 1, 1, -1]


def test_bad_record_indices_change_nothing():
    rb = buffer()
    for bad in (8, -9, [0, 99], 1.5):
        with pytest.raises((IndexError, TypeError)):
            rb[bad] = torch.tensor(1)
    assert stamps(rb).tolist() == [0] * 8
    listed = buffer(0, storage=ListStorage(CAPACITY))
    listed.extend(list(range(8)))
    with pytest.raises(ValueError, match="one record per slot, 2 of them: got 1"):
        listed[2:4] = [5]
    assert listed.storage[:] == list(range(8))
    assert stamps(listed).tolist() == [0] * 8


def test_a_second_buffer_on_the_storage_gives_the_default_priority_in_the_first_ones_tree():
    storage = LazyTensorStorage(CAPACITY)
    first, second = buffer(storage=storage), buffer(0, storage=storage)
    held = handles(first)
    update(first, **held, priority=torch.arange(1.0, 9.0))
    second.extend(torch.arange(3))
    assert leaves(first) == [8, 8, 8, 4, 5, 6, 7, 8]
    assert update(first, **held, priority=20.0).updated_mask.tolist() == [False] * 3 + [True] * 5
    second[4:6] = torch.tensor([1, 2])
    assert leaves(first)[4:6] == [20, 20]  # first's own default by now
    assert leaves(second) == [1] * 8


def test_nested_field_names_patch_as_in_torchrl_and_none_writes_every_record():
    rb = td_buffer(0)
    rb.extend(TensorDict({"id": torch.arange(8), "n": {"y": torch.zeros(8)}}, [8]))
    held = handles(rb)
    rb["n", ("y",)] = torch.ones(8)
    assert rb._table.is_live(**held).all()
    assert rb[:]["n", "y"].tolist() == [1] * 8
    rb[None] = rb.storage[:].clone()[None]
    assert not rb._table.is_live(**held).any()


def test_a_boolean_list_for_a_list_storage_is_refused_and_nothing_is_written():
    rb = ReplayBuffer(storage=ListStorage(4), track_generations=True)
    held = rb.extend(list("wxyz"), return_generation=True)
    with pytest.raises(TypeError, match="index must be integer"):
        rb[[True, False, True, False]] = list("abcd")
    assert rb.storage[:] == list("wxyz")
    assert rb._table.is_live(*held).all()


def test_a_carried_priority_in_double_precision_is_cast():
    rb = td_buffer(0)
    rb.extend(ids(range(4), td_error=torch.arange(1.0, 5.0, dtype=torch.float64)))
    assert leaves(rb) == [1, 2, 3, 4, 0, 0, 0, 0]
    rb.extend(ids(range(2)))
    assert leaves(rb)[4:6] == [4, 4]


# ------------------------------------------------------------------ prefetching and parts


@pytest.mark.parametrize("cls", [buffer, td_buffer])
def test_a_batch_prefetched_before_a_full_lap_is_all_stale(cls):
    rb = cls(prefetch=3, batch_size=4)
    rb.sample()  # three more are on their way
    rb.synchronize()
    rb.extend(ids(range(8)) if cls is td_buffer else torch.arange(8))
    _, info = rb.sample(return_info=True)
    result = update(rb, info["index"], info["index_generation"], 50.0)
    assert (result.num_updated, result.num_stale) == (0, 4)
    assert leaves(rb) == [1] * 8


@pytest.mark.parametrize(
    "action",
    [
        lambda rb: rb.load_state_dict(rb.state_dict()),
        lambda rb: rb.set_storage(LazyTensorStorage(CAPACITY)) and rb.extend(torch.arange(8)),
        lambda rb: rb.set_writer(RoundRobinWriter(track_generations=True)),
        lambda rb: rb.set_sampler(PrioritizedSampler(CAPACITY, **PER)),
    ],
    ids=["restore", "set_storage", "set_writer", "set_sampler"],
)
def test_restoring_and_replacing_parts_while_batches_are_prefetched_does_not_deadlock(action):
    rb = buffer(prefetch=3, batch_size=4)
    started, go = threading.Event(), threading.Event()
    inner = type(rb)._sample

    def slow_sample(batch_size):
        started.set()
        assert go.wait(20)
        return inner(rb, batch_size)

    rb.sample()
    rb.synchronize()
    rb._sample = slow_sample  # the next prefetched samples stop before they take the locks
    rb.sample()
    assert started.wait(20)
    acting = Thread(lambda: action(rb))
    go.set()
    acting.join()
    rb.sample()
    rb.shutdown()


def test_set_storage_moves_writer_lock_and_tree_and_leaves_no_handle_alive():
    rb = buffer()
    held = handles(rb)
    former = rb.storage
    former_lock = rb._write_lock
    new = TensorStorage(torch.arange(4))
    assert rb.set_storage(new) is former
    assert rb.writer.table is SlotGenerations.attach(new)
    assert rb._write_lock is rb.writer.table.lock is not former_lock
    assert leaves(rb) == [1] * 4 + [0] * 4
    assert rb not in former._attached_entities
    result = rb.update_priority_if_present(**held, priority=5.0)
    assert result.num_stale == 8
    rb.extend(torch.arange(4))
    assert rb.update_priority_if_present(**held, priority=5.0).num_stale == 8
    assert rb.update_priority_if_present(**handles(rb, range(4)), priority=5.0).num_updated == 4
    with pytest.raises(ValueError, match="max_capacity=8 for a storage of 9 slots"):
        rb.set_storage(LazyTensorStorage(9))
    assert rb.storage is new


def test_set_sampler_gives_existing_records_the_default_priority():
    rb = buffer()
    rb.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    rb.set_sampler(RandomSampler())
    rb.set_sampler(PrioritizedSampler(CAPACITY, **PER))
    assert leaves(rb) == [1] * 8
    with pytest.raises(ValueError, match="max_capacity=4"):
        rb.set_sampler(PrioritizedSampler(4, **PER))


def test_set_writer_refuses_one_that_does_not_track_in_a_buffer_that_must():
    rb = buffer()
    with pytest.raises(ValueError, match="needs a writer that tracks"):
        rb.set_writer(RoundRobinWriter())
    assert rb.writer.tracks_generations


def test_a_sampler_that_was_set_aside_comes_back_without_the_priorities_of_gone_records():
    rb = td_buffer()
    rb.update_priority_if_present(**handles(rb), priority=torch.arange(1.0, 9.0))
    aside = rb.set_sampler(RandomSampler())
    rb.extend(ids(range(8)))
    rb.set_sampler(aside)
    assert leaves(rb) == [1] * 8


# ------------------------------------------------------------------ asynchronous learners


@pytest.mark.parametrize("cls", [buffer, td_buffer])
def test_an_asynchronous_learner_keeps_what_it_wrote_and_resets_what_was_overwritten(cls):
    def records(n):
        return ids(range(n)) if cls is td_buffer else torch.arange(n)

    rb = cls(0, sync=False, batch_size=4)
    rb.extend(records(5))
    update(rb, range(5), [0] * 5, [1, 2, 3, 4, 5])
    rb.sample()
    assert leaves(rb) == [1, 2, 3, 4, 5, 0, 0, 0]
    rb.extend(records(5))
    assert update(rb, [0, 2], [0, 0], [70, 6]).updated_mask.tolist() == [False, True]
    rb.sample()
    assert leaves(rb) == [5, 5, 6, 4, 5, 5, 5, 5]
    rb.empty(empty_write_count=False)
    rb.extend(records(2))
    rb.sample()
    assert leaves(rb) == [1, 1, 0, 0, 0, 0, 0, 0]
    other = cls(0, storage=rb.storage)
    other.extend(records(1))  # another buffer's write to the same storage
    update(rb, 1, int(stamps(rb)[1]), 9.0)
    rb.sample()
    assert leaves(rb)[:2] == [1, 9]


def catch_up(rb):
    rb._learner.catch_up(rb._table, rb._priority_sampler)


class Steps:
    """Random steps of two learners on one storage; they draw from one generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.storage = LazyTensorStorage(32)
        made = (td_buffer(0, storage=self.storage, sync=False, batch_size=4) for _ in range(2))
        self.trusting, self.thorough = made

    def draw(self, high):
        return int(torch.randint(high, (), generator=self.generator))

    def extend(self):
        self.trusting.extend(ids(range(self.draw(40) + 1)))

    def extend_by_another_cursor(self):
        self.thorough.extend(ids(range(self.draw(5) + 1)))

    def assign(self):
        self.trusting[self.draw(len(self.storage))] = ids([1])[0]

    def write_at(self):
        self.trusting.writer.write_at(torch.tensor([self.draw(32)]), ids([1]))

    def empty(self):
        if not self.draw(7):
            self.trusting.empty(empty_write_count=False)
            self.thorough._prioritized_sampler._empty()
            self.thorough._learner.forget()

    def patch(self):
        self.trusting.set_at_("id", torch.tensor([5]), torch.tensor([0]))

    def update(self):
        index = torch.randint(len(self.storage), (4,), generator=self.generator)
        priority = torch.rand(4, generator=self.generator) + 0.5
        for rb in (self.trusting, self.thorough):
            rb.update_priority_if_present(**handles(rb, index), priority=priority)

    def take_one(self):
        writes = [*[self.extend] * 6, self.extend_by_another_cursor, self.write_at]
        others = [self.assign, self.empty, self.patch, self.update]
        steps = [*writes, *others] if len(self.storage) else writes
        steps[self.draw(len(steps))]()


def test_a_learner_that_trusts_the_ring_log_sees_what_one_that_compares_every_slot_sees(
    monkeypatch,
):
    steps, looks = Steps(), []
    storage, trusting, thorough = steps.storage, steps.trusting, steps.thorough
    for _ in range(400):
        steps.take_one()
        if not steps.draw(2) or not len(storage):
            continue
        log = storage._generation_table.counters
        since = trusting._learner._until
        ranges = log.ranges_since(*since, storage._mutation_revision, storage.max_size)
        looks.append(ranges is not None)
        catch_up(trusting)
        with monkeypatch.context() as patch:
            patch.setattr(type(log), "ranges_since", lambda *_: None)
            catch_up(thorough)
        assert leaves(trusting)[: len(storage)] == leaves(thorough)[: len(storage)]
        seen = trusting._learner.state()[: len(storage)]
        assert torch.equal(seen, stamps(trusting)[: len(storage)])
    assert looks.count(True) > 50
    assert looks.count(False) > 20


def test_two_to_the_31_writes_are_no_limit_for_counts_and_learners():
    rb = td_buffer(sync=False, batch_size=8)
    rb.sample()
    held = handles(rb)
    update(rb, **held, priority=torch.arange(1.0, 9.0))
    rb.writer._write_count = 2**31 - 2
    rb.extend(ids(range(3)))
    assert rb.write_count == 2**31 + 1
    rb.sample()
    assert leaves(rb) == [8, 8, 8, 4, 5, 6, 7, 8]
    assert update(rb, **held, priority=50.0).num_stale == 3
