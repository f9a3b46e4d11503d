"""Storages with ndim > 1: one stamp per dim-0 slot, liveness per row, priorities per cell."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading

import numpy as np
import pytest
import torch
from common import PER, Thread, leaves, stamps
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
)
from torchrl.data import ReplayBuffer as StockReplayBuffer
from torchrl.data import RoundRobinWriter as StockWriter
from torchrl.data.replay_buffers import (
    PrioritizedSliceSampler,
    PromptGroupSampler,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from torchrl.data.replay_buffers.generations import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    RoundRobinWriter,
    SlotGenerations,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

SLOTS, WIDTH = 4, 3
CELLS = SLOTS * WIDTH
ALL_CELLS = [[slot, cell] for slot in range(SLOTS) for cell in range(WIDTH)]


def rows(first, count, *more):
    """``count`` rows of cells with ids from ``first * 10`` on: row 2 is 20, 21, 22."""
    at = torch.arange(first, first + count).reshape(-1, 1) * 10 + torch.arange(WIDTH)
    return at.reshape(count, WIDTH, *more)


def td_rows(first, count, **columns):
    return TensorDict({"id": rows(first, count), **columns}, [count, WIDTH])


def grid(written=SLOTS, storage=LazyTensorStorage, dim_extend=0, **kwargs):
    """A 4x3 buffer of integer cells; alpha 1 and eps 0: a leaf is a priority."""
    rb = PrioritizedReplayBuffer(
        **PER,
        storage=storage(CELLS, ndim=2),
        dim_extend=dim_extend,
        track_generations=True,
        **kwargs,
    )
    if written:
        rb.extend(rows(0, written))
    return rb


def td_grid(written=SLOTS, dim_extend=0, **kwargs):
    kwargs.setdefault("storage", LazyTensorStorage(CELLS, ndim=2))
    rb = TensorDictPrioritizedReplayBuffer(
        **PER, dim_extend=dim_extend, track_generations=True, **kwargs
    )
    if written:
        rb.extend(td_rows(0, written))
    return rb


def rewrite(rb, count):
    """Puts other records into the first slots, with the default priority of 1."""
    rb.writer._cursor = 0
    sampler = rb._priority_sampler
    sampler._max_priority = None
    rb.extend(rows(100, count))


# ------------------------------------------------------------------ the exact cases of the contract


def test_only_coordinates_of_written_rows_are_updated():
    rb = grid(written=2)
    index = torch.tensor([[0, 1], [1, 2], [3, 0], [0, 3], [0, -1], [-1, 0]])
    result = rb.update_priority_if_present(
        index=index, generation=torch.zeros(6, dtype=torch.int64), priority=torch.arange(5.0, 11.0)
    )
    assert result.updated_mask.tolist() == [True, True, False, False, False, False]
    assert leaves(rb) == [1, 5, 1, 1, 1, 6, 0, 0, 0, 0, 0, 0]


def test_a_one_dimensional_index_is_refused_since_it_could_be_rows_or_cells():
    rb = grid()
    rewrite(rb, 2)
    with pytest.raises(ValueError, match=r"rows or cells\?"):
        rb.update_priority_if_present(index=[3], generation=[0], priority=[7.0])
    assert leaves(rb) == [1] * 12

    result = rb.update_priority_if_present(
        index=[[3, 0], [1, 0]], generation=[0, 0], priority=[7.0, 7.0]
    )
    assert result.updated_mask.tolist() == [True, False]
    assert leaves(rb) == [1, 1, 1, 1, 1, 1, 1, 1, 1, 7, 1, 1]


def test_priorities_in_the_shape_of_the_data_are_transposed_as_update_priority_does():
    def built():
        rb = PrioritizedReplayBuffer(
            **PER, storage=LazyTensorStorage(6, ndim=2), dim_extend=1, track_generations=True
        )
        return rb, *rb.extend(torch.arange(6).reshape(2, 3), return_generation=True)

    rb, index, generation = built()
    stock, _, _ = built()
    priority = torch.tensor([[10.0, 20, 30], [40, 50, 60]])
    assert index.shape == (6, 2)
    assert generation.tolist() == [0] * 6

    stock.update_priority(index, priority)
    result = rb.update_priority_if_present(index=index, generation=generation, priority=priority)

    assert result.updated_mask.tolist() == [True] * 6
    assert leaves(rb) == leaves(stock) == [10, 40, 20, 50, 30, 60]
    rb.sampler._max_priority = None
    rb.writer._cursor = 0
    rb.extend(torch.zeros(2, 2, dtype=torch.int64))  # dim-0 slots 0 and 1
    late = rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert late.updated_mask.tolist() == [False, False, False, False, True, True]
    assert leaves(rb) == [1, 1, 1, 1, 30, 60]


@pytest.mark.parametrize("single", [False, True])
def test_a_first_write_that_makes_more_cells_than_leaves_is_refused_and_nothing_changed(single):
    storage = LazyTensorStorage(14, ndim=2)
    rb = PrioritizedReplayBuffer(**PER, storage=storage, dim_extend=0, track_generations=True)
    write = rb.add if single else rb.extend
    with pytest.raises(ValueError, match=r"2 slots with 18 cells.*holds 14"):
        write(torch.zeros(9) if single else torch.zeros(1, 9))  # 9 a row: 2 rows, 18 cells
    assert (len(storage), storage.initialized, storage.max_size) == (0, False, 14)
    assert (rb.writer._cursor, rb.writer._write_count) == (0, 0)
    assert leaves(rb) == [0] * 14

    assert rb.extend(torch.zeros(2, 7)).shape == (14, 2)  # 7 a row fit
    assert leaves(rb) == [1] * 14


def test_after_a_refused_first_write_a_larger_tree_helps():
    rb = PrioritizedReplayBuffer(
        **PER, storage=LazyTensorStorage(14, ndim=2), dim_extend=0, track_generations=True
    )
    with pytest.raises(ValueError, match="or the sampler a larger max_capacity"):
        rb.extend(torch.zeros(1, 9))
    rb.set_sampler(PrioritizedSampler(18, **PER))
    rb.extend(torch.zeros(1, 9))
    assert leaves(rb) == [1] * 9 + [0] * 9


def test_a_first_write_of_a_torchrl_buffer_gives_the_table_its_shape():
    storage = LazyTensorStorage(CELLS, ndim=2)
    rb = ReplayBuffer(storage=storage, dim_extend=0, track_generations=True)
    StockReplayBuffer(storage=storage, dim_extend=0).extend(rows(0, 3))
    assert rb.writer.generations_of([[0, 2], [0, 3], [2, 0], [3, 0]]).tolist() == [0, -1, 0, -1]
    index = rb.extend(rows(4, 5))  # the cursor of this writer is still at 0
    assert index[::WIDTH, 0].tolist() == [0, 1, 2, 3, 0]
    assert stamps(rb).tolist() == [2, 1, 1, 0]


# ------------------------------------------------------------------ stamps


def test_an_extend_advances_the_rows_that_it_writes_once_each():
    rb = grid()
    assert stamps(rb).tolist() == [0, 0, 0, 0]
    index, generation = rb.extend(rows(4, 2), return_generation=True)
    assert index.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert generation.tolist() == [1] * 6
    assert stamps(rb).tolist() == [1, 1, 0, 0]


def test_one_added_row_gives_a_handle_per_cell():
    rb = grid(written=0)
    index, generation = rb.add(rows(0, 1)[0], return_generation=True)
    assert index.tolist() == [[0, 0], [0, 1], [0, 2]]
    assert generation.tolist() == [0, 0, 0]
    rb.add(rows(1, 1)[0])
    assert stamps(rb).tolist() == [0, 0, -1, -1]
    assert leaves(rb) == [1] * 6 + [0] * 6


def test_stamps_are_read_for_rows_and_for_cells():
    rb = grid(written=2)
    rb._table.advance([1])
    of = rb.writer.generations_of
    assert of([0, 1, 2, 9, -1]).tolist() == [0, 1, -1, -1, -1]  # a 1-D index: rows
    assert of(torch.tensor([0, 1])).tolist() == [0, 1]  # also when it is as long as ndim
    assert of(1).tolist() == 1
    assert of([[0, 2], [1, 0], [1, 3], [1, -1], [2, 0]]).tolist() == [0, 1, -1, -1, -1]
    assert of((torch.tensor([0, 1]), torch.tensor([2, 0]))).tolist() == [0, 1]
    assert of((1, 2)).tolist() == 1
    assert of(torch.tensor([[[0, 0], [1, 1]], [[1, 2], [3, 3]]])).tolist() == [[0, 1], [1, -1]]
    assert of(np.array([[1, 1]])).tolist() == [1]


def test_liveness_of_rows_and_cells():
    table = SlotGenerations.attach(grid().storage)
    table.advance([1])
    assert table.is_live([0, 1], [0, 0]).tolist() == [True, False]
    assert table.is_live([[0, 2], [1, 0], [0, 3]], [0, 1, 0]).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="one generation per index"):
        table.is_live([[0, 2], [1, 0]], [[0, 0], [0, 0]])


def test_a_write_behind_the_back_is_declared_by_rows_or_by_cells():
    table = SlotGenerations.attach(grid().storage)
    table.advance([0, 0, 3])
    assert table.stamps.tolist() == [2, 0, 0, 1]
    table.advance([[1, 0], [1, 2], [2, 1]])  # the cells of a row are one write
    assert table.stamps.tolist() == [2, 1, 1, 1]
    table.advance([[1, 0], [1, 0], [1, 2]])  # a cell that is named twice was written twice
    assert table.stamps.tolist() == [2, 3, 1, 1]
    with pytest.raises(IndexError, match="from 0 to 3: got 4"):
        table.advance([4])
    assert table.stamps.tolist() == [2, 3, 1, 1]


def test_a_batch_of_more_rows_than_there_are_keeps_the_last_of_them():
    for written in (0, 1, SLOTS):
        rb = grid(written)
        start = rb.writer._cursor
        index, generation = rb.extend(rows(10, 6), return_generation=True)
        taken = [(start + row) % SLOTS for row in range(6)]
        assert index.tolist() == [[slot, cell] for slot in taken for cell in range(WIDTH)]
        assert generation[: 2 * WIDTH].tolist() == [-1] * 2 * WIDTH
        current = SlotGenerations.attach(rb.storage).of(index[2 * WIDTH :])
        assert generation[2 * WIDTH :].tolist() == current.tolist()
        assert leaves(rb) == [1] * 12
        for row, slot in list(enumerate(taken))[2:]:
            assert rb.storage[slot].tolist() == rows(10 + row, 1)[0].tolist()
        assert rb.storage._last_cursor_index == taken[-1]
        assert rb.writer._cursor == (start + 6) % SLOTS


def test_an_emptied_grid_has_no_live_handle():
    rb = grid()
    rb.empty()
    index, generation = rb.extend(rows(0, 1), return_generation=True)
    assert generation.tolist() == [2, 2, 2]
    assert rb.writer.generations_of(range(4)).tolist() == [2, -1, -1, -1]
    result = rb.update_priority_if_present(index=index, generation=[0, 0, 0], priority=5.0)
    assert result.num_updated == 0


def test_the_table_of_a_lazy_storage_takes_its_shape_at_the_first_write():
    rb = grid(written=0)
    assert rb.writer.generations_of(range(4)).tolist() == [-1] * 4
    result = rb.update_priority_if_present(index=[[0, 0]], generation=[0], priority=5.0)
    assert result.updated_mask.tolist() == [False]
    table, tensor = SlotGenerations.attach(rb.storage), stamps(rb)
    rb.extend(rows(0, 1))
    assert stamps(rb).tolist() == [0, -1, -1, -1]
    assert SlotGenerations.attach(rb.storage) is table
    assert stamps(rb) is tensor is rb.storage._slot_generations


def test_records_that_were_there_before_the_table_get_handles_that_work():
    storage = LazyTensorStorage(CELLS, ndim=2)
    StockReplayBuffer(storage=storage, dim_extend=0).extend(rows(0, 2))
    rb = PrioritizedReplayBuffer(**PER, storage=storage, dim_extend=0, track_generations=True)
    assert stamps(rb).tolist() == [0, 0, -1, -1]
    assert leaves(rb) == [1] * 6 + [0] * 6
    result = rb.update_priority_if_present(
        index=[[1, 2], [2, 0]], generation=[0, 0], priority=[4.0, 4.0]
    )
    assert result.updated_mask.tolist() == [True, False]


def test_a_storage_that_gets_its_device_with_its_shape():
    rb = grid(
        written=0, storage=lambda *size, **kwargs: LazyTensorStorage(*size, device="auto", **kwargs)
    )
    rb.extend(rows(0, 2))
    assert rb.storage.device == torch.device("cpu")
    assert stamps(rb).tolist() == [0, 0, -1, -1]
    result = rb.update_priority_if_present(index=[[1, 1]], generation=[0], priority=2.0)
    assert result.num_updated == 1


def test_three_dimensions():
    rb = PrioritizedReplayBuffer(
        **PER, storage=LazyTensorStorage(12, ndim=3), dim_extend=0, track_generations=True
    )
    index, generation = rb.extend(torch.arange(12).reshape(3, 2, 2), return_generation=True)
    assert index.shape == (12, 3)
    assert stamps(rb).tolist() == [0, 0, 0]
    rb.add(torch.zeros(2, 2, dtype=torch.int64))  # slot 0
    result = rb.update_priority_if_present(
        index=index, generation=generation, priority=torch.arange(2.0, 14.0)
    )
    assert result.updated_mask.tolist() == [False] * 4 + [True] * 8
    assert leaves(rb) == [1, 1, 1, 1, 6, 7, 8, 9, 10, 11, 12, 13]
    again = rb.update_priority_if_present(
        index=(torch.tensor([2, 2]), torch.tensor([1, 2]), torch.tensor([0, 0])),
        generation=[0, 0],
        priority=3.0,
    )
    assert again.updated_mask.tolist() == [True, False]
    assert leaves(rb)[-2:] == [3, 13]


def test_three_dimensions_with_the_default_dim_extend():
    def built():
        rb = PrioritizedReplayBuffer(
            **PER, storage=LazyTensorStorage(24, ndim=3), track_generations=True
        )
        assert rb.dim_extend == 2
        return rb, *rb.extend(torch.arange(24).reshape(2, 3, 4), return_generation=True)

    rb, index, generation = built()
    stock, _, _ = built()
    priority = torch.arange(1.0, 25.0).reshape(2, 3, 4)
    stock.update_priority(index, priority)
    rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert leaves(rb) == leaves(stock)
    # The leaf of a cell is the priority that stands at its place in the data.
    for (t, b, a), leaf in zip(index.tolist(), leaves(rb), strict=True):
        assert leaf == priority[a, b, t]
        assert rb.storage[t, b, a] == priority[a, b, t] - 1


# ------------------------------------------------------------------ updates


def test_what_a_sampler_returns_is_taken_as_it_is():
    rb = grid(batch_size=30)
    data, info = rb.sample(return_info=True)
    assert isinstance(info["index"], tuple)
    assert info["index_generation"].shape == (30,)
    numbers = info["index"][0] * WIDTH + info["index"][1]
    assert data.tolist() == (info["index"][0] * 10 + info["index"][1]).tolist()
    rewrite(rb, 1)

    result = rb.update_priority_if_present(
        index=info["index"], generation=info["index_generation"], priority=numbers + 2.0
    )

    assert result.updated_mask.tolist() == (info["index"][0] > 0).tolist()
    sampled = set(numbers.tolist())
    assert leaves(rb) == [
        cell + 2.0 if cell in sampled and cell >= WIDTH else 1.0 for cell in range(CELLS)
    ]


def test_a_tensordict_sample_goes_back_as_it_came():
    rb = td_grid(batch_size=6)
    sample = rb.sample()
    assert sample["index"].shape == (6, 2)
    assert sample["index_generation"].tolist() == [0] * 6
    sample["td_error"] = (sample["index"] @ torch.tensor([WIDTH, 1])) + 2.0
    sampled = {tuple(cell) for cell in sample["index"].tolist()}

    assert rb.update_tensordict_priority_if_present(sample).updated_mask.tolist() == [True] * 6
    assert leaves(rb) == [
        slot * WIDTH + cell + 2.0 if (slot, cell) in sampled else 1.0 for slot, cell in ALL_CELLS
    ]
    rb.sampler._empty()
    rb.extend(td_rows(4, 4))
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 0
    assert leaves(rb) == [1] * 12


def test_one_row_of_a_sample_and_several_numbers_per_cell():
    rb = td_grid(batch_size=6)
    sample = rb.sample()
    sample["td_error"] = torch.arange(12.0).reshape(6, 2) + 2  # reduced by the largest
    result = rb.update_tensordict_priority_if_present(sample[4])
    assert result.updated_mask.tolist() is True
    slot, cell = sample["index"][4].tolist()
    assert leaves(rb)[slot * WIDTH + cell] == 11
    assert sum(leaves(rb)) == 11 + 11
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 6


def test_a_sample_without_priorities_gets_the_default():
    rb = td_grid(batch_size=6)
    rb.update_priority(torch.tensor(ALL_CELLS), torch.full((12,), 3.0))
    rb.sampler._max_priority = (torch.tensor(2.0), torch.tensor(0))
    sample = rb.sample()
    assert rb.update_tensordict_priority_if_present(sample).num_updated == 6
    sampled = {tuple(cell) for cell in sample["index"].tolist()}
    assert leaves(rb) == [2.0 if tuple(cell) in sampled else 3.0 for cell in ALL_CELLS]


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([[[0, 0], [1, 1]], [[2, 2], [3, 0]]]),
        (torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [2, 0]])),
        (np.array([[0, 1], [2, 3]]), [[0, 1], [2, 0]]),
    ],
)
def test_the_mask_has_the_leading_shape_of_the_coordinates(index):
    rb = grid()
    rewrite(rb, 1)
    result = rb.update_priority_if_present(
        index=index, generation=[[0, 0], [0, 0]], priority=[[5.0, 6.0], [7.0, 8.0]]
    )
    assert result.updated_mask.tolist() == [[False, True], [True, True]]
    assert result.batch_size == (2, 2)
    assert leaves(rb) == [1, 1, 1, 1, 6, 1, 1, 1, 7, 8, 1, 1]


def test_one_cell_alone():
    rb = grid()
    result = rb.update_priority_if_present(index=(1, 2), generation=0, priority=4.0)
    assert result.updated_mask.shape == ()
    assert leaves(rb) == [1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 1, 1]


def test_the_last_row_wins_for_a_cell_that_comes_twice():
    rb = grid()
    result = rb.update_priority_if_present(
        index=[[1, 1], [1, 1], [1, 1]], generation=[0, 0, 5], priority=[4.0, 3.0, 9.0]
    )
    assert result.updated_mask.tolist() == [True, True, False]
    assert leaves(rb)[4] == 3


def test_no_handle_at_all():
    rb = grid()
    for index in ([], torch.zeros(0, 2, dtype=torch.int64)):
        result = rb.update_priority_if_present(index=index, generation=[], priority=[])
        assert result.updated_mask.shape == (0,)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"index": 3, "generation": 0}, "rows or cells"),
        ({"index": torch.tensor([0, 1])}, "rows or cells"),
        ({"index": [[0, 1, 2], [0, 1, 2]]}, r"coordinates of shape \[..., 2\]"),
        ({"index": (torch.tensor([0, 1]),)}, "tuple of 1"),
        ({"index": (torch.tensor([0, 1]), torch.tensor([0]))}, "tensors of one shape"),
        ({"generation": [0]}, "one generation per cell"),
        ({"generation": 0}, "one generation per cell"),
        ({"generation": [[0], [0]]}, "one generation per cell"),
        ({"priority": [1.0, 2.0, 3.0]}, "one priority per cell"),
        ({"priority": [[1.0, 2.0, 3.0, 4.0]]}, "one priority per cell"),
        ({"priority": [1.0, -2.0]}, "not negative"),
        ({"priority": [1.0, float("nan")]}, "finite"),
    ],
)
def test_a_bad_call_is_refused_and_nothing_is_written(bad, match):
    rb = grid()
    good = {"index": [[0, 0], [1, 1]], "generation": [0, 0], "priority": [5.0, 6.0]}
    with pytest.raises(ValueError, match=match):
        rb.update_priority_if_present(**{**good, **bad})
    assert leaves(rb) == [1] * 12


@pytest.mark.parametrize(
    "bad",
    [
        {"index": [[0.0, 1.0]]},
        {"index": (True, False)},
        {"generation": [0.0]},
        {"priority": "high"},
        {"priority": [True]},
    ],
)
def test_what_is_no_number_is_a_type_error(bad):
    rb = grid()
    good = {"index": [[0, 0]], "generation": [0], "priority": [5.0]}
    with pytest.raises(TypeError):
        rb.update_priority_if_present(**{**good, **bad})
    assert leaves(rb) == [1] * 12


def test_priorities_of_another_shape_than_the_cells_are_not_guessed():
    rb = grid()
    index = torch.tensor(ALL_CELLS).reshape(4, 3, 2)
    generation = torch.zeros(4, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"shape \(12,\) for \(4, 3\) cells"):
        rb.update_priority_if_present(index=index, generation=generation, priority=torch.ones(12))
    with pytest.raises(ValueError, match=r"shape \(3, 4\)"):
        rb.update_priority_if_present(index=index, generation=generation, priority=torch.ones(3, 4))
    priority = torch.arange(1.0, 13.0).reshape(4, 3)
    rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert leaves(rb) == priority.flatten().tolist()


def test_a_field_is_patched_by_coordinates_in_range_alone():
    rb = td_grid()
    rewritten = td_rows(50, 1)
    rb.extend(rewritten)  # slot 0
    result = rb.update_if_present(
        index=torch.tensor([[0, 0], [1, 1], [1, -1], [1, 3], [4, 0]]),
        generation=torch.tensor([0, 0, 0, 0, 0]),
        patch={"id": torch.tensor([-1, -2, -3, -4, -5])},
    )
    assert result.updated.tolist() == [False, True, False, False, False]
    assert rb.storage[:]["id"].tolist() == [
        [500, 501, 502],
        [10, -2, 12],
        [20, 21, 22],
        [30, 31, 32],
    ]


# ------------------------------------------------------------------ writing


def test_priorities_that_the_data_carries():
    errors = torch.arange(2.0, 8.0).reshape(2, 3)
    rb = td_grid(0)
    rb.extend(td_rows(0, 2, td_error=errors))
    assert leaves(rb) == [2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0]

    transposed = td_grid(0, dim_extend=1)
    transposed.extend(TensorDict({"td_error": errors}, [2, 3]))  # [B, T]: three slots of two cells
    assert leaves(transposed) == [2, 5, 3, 6, 4, 7, 0, 0, 0, 0, 0, 0]

    added = td_grid(0)
    added.add(td_rows(0, 2, td_error=errors)[1])
    assert leaves(added) == [5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def test_of_rows_that_a_call_overwrites_itself_the_last_priorities_stay():
    rb = td_grid(0)
    rb.extend(td_rows(0, 6, td_error=torch.arange(1.0, 19.0).reshape(6, 3)))
    assert leaves(rb) == [13, 14, 15, 16, 17, 18, 7, 8, 9, 10, 11, 12]
    assert rb.sampler.default_priority == 18


@pytest.mark.parametrize(
    ("index", "value", "advanced"),
    [
        (1, rows(7, 1)[0], [1]),
        (slice(1, 3), rows(7, 2), [1, 2]),
        (torch.tensor([3, 0]), rows(7, 2), [0, 3]),
        (torch.tensor([False, True, False, True]), rows(7, 2), [1, 3]),
        ((slice(None), 1), torch.arange(4), [0, 1, 2, 3]),
        ((2, 1), torch.tensor(5), [2]),
        ((torch.tensor([0, 3]), torch.tensor([1, 2])), torch.tensor([5, 6]), [0, 3]),
    ],
)
def test_an_assignment_advances_the_rows_that_it_touches(index, value, advanced):
    rb = grid()
    rb.update_priority(torch.tensor(ALL_CELLS), torch.full((12,), 3.0))
    rb.sampler._max_priority = None
    expected = rb.storage[:].clone()
    expected[index] = value

    rb[index] = value

    assert rb.storage[:].tolist() == expected.tolist()
    assert stamps(rb).tolist() == [int(slot in advanced) for slot in range(SLOTS)]
    assert leaves(rb) == [1.0 if slot in advanced else 3.0 for slot, _ in ALL_CELLS]


def test_an_assignment_counts_along_dim_extend():
    rb = grid(0, dim_extend=1)
    rb.extend(rows(0, 4).T)  # [B, T]: four slots of three cells
    rb[1:2] = torch.tensor([[5, 6, 7, 8]])  # cell 1 of every slot
    assert rb.storage[:, 1].tolist() == [5, 6, 7, 8]
    assert stamps(rb).tolist() == [1, 1, 1, 1]
    rb[(0, 2)] = torch.tensor(9)  # cell 0 of slot 2
    assert rb.storage[2].tolist() == [9, 7, 22]
    assert stamps(rb).tolist() == [1, 1, 2, 1]


def test_an_assignment_to_a_grid_that_was_never_written_is_refused():
    rb = grid(0)
    with pytest.raises(ValueError, match="Use extend"):
        rb[0] = rows(0, 1)[0]
    assert not rb.storage.initialized


def test_write_at_puts_rows_anywhere_and_the_slots_that_it_counts_in_get_a_stamp():
    rb = grid()
    rb.writer.write_at(torch.tensor([2, 0]), rows(7, 2))
    assert stamps(rb).tolist() == [1, 0, 1, 0]
    rb.writer.write_at(3, rows(9, 1)[0])
    assert stamps(rb).tolist() == [1, 0, 1, 1]
    assert leaves(rb) == [1] * 12


def test_write_at_counts_in_the_rows_up_to_its_own():
    rb = grid(1)
    rb.writer.write_at(torch.tensor([2]), rows(7, 1))
    assert len(rb.storage) == 3 * WIDTH
    assert stamps(rb).tolist() == [0, 0, 0, -1]
    assert leaves(rb) == [1] * 9 + [0] * 3


def test_a_sample_put_back_is_stored_without_its_stamps():
    rb = td_grid(0, dim_extend=1, batch_size=6)
    rb.extend(td_rows(0, 2))  # [B, T]: slots 0 to 2 of two cells
    sample = rb.sample().reshape(2, 3)
    rb.extend(sample)  # slots 3 to 5
    assert set(rb.storage[:].keys()) == {"id", "index", "priority_weight"}
    assert rb.storage[3:]["id"].tolist() == sample["id"].T.tolist()


def test_a_sample_given_to_the_writer_itself_gets_the_stamps_of_its_rows():
    rb = td_grid(2, batch_size=6)
    sample = rb.sample().reshape(2, 3)
    rb.writer.extend(sample)  # TorchRL's writer labels each cell with its slot
    assert sample["index"].tolist() == [[2, 2, 2], [3, 3, 3]]
    assert sample["index_generation"].tolist() == [[0, 0, 0], [0, 0, 0]]
    rb.writer.extend(sample)
    assert sample["index"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert sample["index_generation"].tolist() == [[1, 1, 1], [1, 1, 1]]
    one = sample[1]
    rb.writer.add(one)
    assert one["index"].tolist() == [2, 2, 2]
    assert one["index_generation"].tolist() == [1, 1, 1]


def test_an_added_record_of_three_dimensions_gives_no_priority_to_another():
    rb = TensorDictPrioritizedReplayBuffer(
        **PER, storage=LazyTensorStorage(12, ndim=3), dim_extend=0, track_generations=True
    )
    rb.extend(TensorDict({"id": torch.zeros(3, 2, 2)}, [3, 2, 2]))
    rb.update_priority(torch.cartesian_prod(*map(torch.arange, (3, 2, 2))), torch.full((12,), 3.0))
    rb.add(
        TensorDict({"id": torch.zeros(2, 2), "td_error": torch.tensor([[5.0, 6], [7, 8]])}, [2, 2])
    )
    assert leaves(rb) == [5, 6, 7, 8] + [3] * 8


# ------------------------------------------------------------------ samplers and units


def episodes(count, width=WIDTH):
    """``count`` steps of ``width`` lanes, in episodes of two steps."""
    step = torch.arange(count).reshape(-1, 1).expand(count, width)
    return TensorDict(
        {
            "id": step * 10 + torch.arange(width),
            "episode": step // 2 * 10 + torch.arange(width),
            "next": TensorDict({"done": (step % 2 == 1).unsqueeze(-1)}, [count, width]),
        },
        [count, width],
    )


GRID_SAMPLERS = {
    "random": RandomSampler,
    "without_replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=2, traj_key="episode"),
    "slices_without_replacement": lambda: SliceSamplerWithoutReplacement(
        slice_len=2, traj_key="episode"
    ),
    "prioritized": lambda: PrioritizedSampler(CELLS, **PER),
    "prioritized_slices": lambda: PrioritizedSliceSampler(
        CELLS, **PER, slice_len=2, traj_key="episode"
    ),
}


@pytest.mark.parametrize("name", GRID_SAMPLERS)
def test_every_sampler_of_more_dimensions_carries_stamps(name):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CELLS, ndim=2),
        sampler=GRID_SAMPLERS[name](),
        batch_size=6,
        dim_extend=0,
        track_generations=True,
    )
    rb.extend(episodes(4))
    sample = rb.sample()
    assert sample["index"].shape == (6, 2)
    assert sample["id"].tolist() == (sample["index"] @ torch.tensor([10, 1])).tolist()
    assert sample["index_generation"].tolist() == [0] * 6
    rb.extend(episodes(2))
    table = SlotGenerations.attach(rb.storage)
    live = table.is_live(sample["index"], sample["index_generation"])
    assert live.tolist() == (sample["index"][:, 0] >= 2).tolist()
    sample["td_error"] = torch.full((6,), 5.0)
    if "prioritized" not in name:
        with pytest.raises(RuntimeError, match="PrioritizedSampler"):
            rb.update_tensordict_priority_if_present(sample)
        return
    assert rb.update_tensordict_priority_if_present(sample).updated_mask.tolist() == live.tolist()
    updated = {tuple(cell) for cell in sample["index"][live].tolist()}
    assert leaves(rb) == [5.0 if tuple(cell) in updated else 1.0 for cell in ALL_CELLS]


@pytest.mark.parametrize(
    "sampler",
    [
        StalenessAwareSampler(),
        PromptGroupSampler(num_groups=1),
        StreamingSliceSampler(slice_len=2),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_of_one_dimension_is_refused(sampler):
    with pytest.raises(ValueError, match=r"needs a storage with ndim=1.*Flatten"):
        ReplayBuffer(
            storage=LazyTensorStorage(CELLS, ndim=2), sampler=sampler, track_generations=True
        )
    rb = grid(0)
    with pytest.raises(ValueError, match="needs a storage with ndim=1"):
        rb.set_sampler(sampler)
    assert isinstance(rb.sampler, PrioritizedSampler)


def test_the_anchor_of_a_sequence_is_a_cell():
    rb = td_grid(0, sample_unit=Sequence(length=2), batch_size=6)
    rb.extend(episodes(4))
    sample = rb.sample()
    assert sample["anchor_index"].shape == (12, 2)
    assert sample["anchor_generation"].tolist() == [0] * 12
    rb.extend(episodes(2))  # slots 0 and 1
    sample["td_error"] = torch.full((12,), 5.0)

    result = rb.update_tensordict_priority_if_present(sample)

    live = sample["anchor_index"][:, 0] >= 2
    assert result.updated_mask.tolist() == live.tolist()
    updated = {tuple(cell) for cell in sample["anchor_index"][live].tolist()}
    assert leaves(rb) == [5.0 if tuple(cell) in updated else 1.0 for cell in ALL_CELLS]


def test_a_prioritized_slice_sampler_smaller_than_the_grid_is_refused_at_the_first_write():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(14, ndim=2),
        sampler=PrioritizedSliceSampler(14, **PER, slice_len=2, traj_key="episode"),
        batch_size=2,
        dim_extend=0,
        track_generations=True,
    )
    with pytest.raises(ValueError, match="holds 14"):
        rb.extend(episodes(1, width=9))


# ------------------------------------------------------------------ writers, buffers, copies


def test_a_tree_of_another_buffer_limits_the_first_write_too():
    storage = LazyTensorStorage(14, ndim=2)
    PrioritizedReplayBuffer(**PER, storage=storage, track_generations=True)
    writing = ReplayBuffer(storage=storage, dim_extend=0, track_generations=True)
    with pytest.raises(ValueError, match="holds 14"):
        writing.extend(torch.zeros(1, 9))
    assert not storage.initialized


def test_a_writer_of_torchrls_over_a_tracked_storage_without_a_shape_is_refused():
    storage = LazyTensorStorage(14, ndim=2)
    ReplayBuffer(storage=storage, dim_extend=0, track_generations=True)
    with pytest.raises(ValueError, match=r"Use generations\.RoundRobinWriter"):
        PrioritizedReplayBuffer(**PER, storage=storage, dim_extend=0, writer=StockWriter())


def test_the_writes_of_a_second_buffer_make_rows_stale_and_give_the_default_priority():
    rb = grid()
    rb.update_priority(torch.tensor(ALL_CELLS), torch.full((12,), 3.0))
    rb.sampler._max_priority = None
    other = ReplayBuffer(storage=rb.storage, dim_extend=0, track_generations=True)
    other.extend(rows(50, 1))
    assert leaves(rb) == [1, 1, 1] + [3] * 9
    result = rb.update_priority_if_present(index=[[0, 0], [1, 0]], generation=[0, 0], priority=5.0)
    assert result.updated_mask.tolist() == [False, True]


def test_a_checkpoint_of_flat_records_is_refused_by_a_buffer_of_cells(tmp_path):
    flat = PrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(CELLS), track_generations=True)
    flat.extend(torch.arange(CELLS))
    flat.dumps(tmp_path)
    rb = grid(0)
    with pytest.raises(ValueError, match=r"shape \(12,\): this buffer has ndim=2"):
        rb.load_state_dict(flat.state_dict())
    with pytest.raises(RuntimeError, match="plain tensors into a storage that has records"):
        rb.loads(tmp_path)
    assert not rb.storage.initialized


def test_an_update_waits_for_a_write_of_its_row(monkeypatch):
    rb = grid()
    inside, go_on = threading.Event(), threading.Event()
    put = rb.storage.set

    def put_slowly(*args, **kwargs):
        inside.set()  # the stamps have advanced, the row is still the former one
        assert go_on.wait(30)
        return put(*args, **kwargs)

    monkeypatch.setattr(rb.storage, "set", put_slowly)
    writing = Thread(lambda: rb.extend(rows(5, 1)))
    assert inside.wait(30)
    updating = Thread(
        lambda: rb.update_priority_if_present(
            index=[[0, 2], [1, 0]], generation=[0, 0], priority=[9.0, 5.0]
        )
    )
    updating.join_briefly(0.2)
    assert updating.is_alive()
    go_on.set()
    writing.join()

    assert updating.join().updated_mask.tolist() == [False, True]
    assert leaves(rb) == [1, 1, 1, 5] + [1] * 8


def test_a_row_that_a_write_counts_in_without_a_record_gets_a_stamp():
    rb = grid(1)
    other = ReplayBuffer(storage=rb.storage, dim_extend=0, track_generations=True)
    other.extend(rows(50, 1))  # slot 0 again: TorchRL counts two rows now
    assert len(rb.storage) == 2 * WIDTH
    assert stamps(rb).tolist() == [1, 0, -1, -1]
    assert leaves(rb) == [1] * 6 + [0] * 6


def test_a_users_writer_that_returns_coordinates_advances_each_row_once():
    class Mine(RoundRobinWriter):
        def extend(self, data):
            self._storage.set(torch.arange(len(data)), data)
            return self._replicate_index(torch.arange(len(data)))

    rb = ReplayBuffer(
        storage=LazyTensorStorage(CELLS, ndim=2),
        writer=Mine(track_generations=True),
        dim_extend=0,
    )
    rb.extend(rows(0, 2))
    _, generation = rb.extend(rows(0, 2), return_generation=True)
    assert generation.tolist() == [1] * 6
    assert len(rb.storage) == CELLS  # TorchRL counts the two rows twice: all slots can be sampled
    assert stamps(rb).tolist() == [1, 1, 0, 0]


def test_a_users_writer_never_writes_past_the_end_of_a_tree():
    class Mine(RoundRobinWriter):
        def extend(self, data):
            return StockWriter.extend(self, data)

    rb = PrioritizedReplayBuffer(
        **PER,
        storage=LazyTensorStorage(14, ndim=2),
        writer=Mine(track_generations=True),
        dim_extend=0,
    )
    with pytest.raises(ValueError, match="a leaf for every slot: got max_capacity=14"):
        rb.extend(torch.zeros(1, 9))  # 2 rows, 18 cells
    assert leaves(rb) == [0] * 14


def test_another_storage_of_more_dimensions():
    rb = grid()
    held, generation = torch.tensor(ALL_CELLS), torch.zeros(12, dtype=torch.int64)
    rb.set_storage(LazyTensorStorage(6, ndim=2))
    assert not rb._table.is_live(held, generation).any()
    index, generation = rb.extend(torch.arange(6).reshape(3, 2), return_generation=True)
    priority = torch.arange(2.0, 8.0)
    result = rb.update_priority_if_present(index=index, generation=generation, priority=priority)
    assert result.num_updated == 6
    assert leaves(rb)[:6] == priority.tolist()


def test_compiled_writes_and_samples_stamp_rows():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(CELLS, ndim=2, compilable=True),
        dim_extend=0,
        batch_size=4,
        compilable=True,
        track_generations=True,
    )
    extend = torch.compile(rb.extend, backend="eager")
    sample = torch.compile(lambda: rb.sample(return_info=True), backend="eager")
    expected = [[0, 0, 0, -1], [1, 1, 0, 0], [2, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 2]]
    for call, generations in enumerate(expected):
        extend(rows(10 * call, 3))
        data, info = sample()
        assert stamps(rb).tolist() == generations
        assert info["index_generation"].tolist() == stamps(rb)[info["index"][0]].tolist()
        assert data.tolist() == rb.storage[:][info["index"]].tolist()


def test_an_asynchronous_learner_is_refused():
    with pytest.raises(ValueError, match="1-D storages when sync=False"):  # TorchRL's words
        grid(sync=False)
    rb = PrioritizedReplayBuffer(
        **PER, storage=LazyTensorStorage(CELLS), sync=False, track_generations=True
    )
    with pytest.raises(ValueError, match=r"sync=False.*needs a storage with ndim=1"):
        rb.set_storage(LazyTensorStorage(CELLS, ndim=2))


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
@pytest.mark.parametrize("written", [0, 2])
def test_a_copy_goes_its_own_way(make, copied, written):
    rb = grid(written, storage=make)
    other = copied(rb)
    index, generation = other.extend(rows(5, 1), return_generation=True)
    assert rb.update_priority_if_present(index=index, generation=generation, priority=4.0).num_stale
    assert other.update_priority_if_present(
        index=index, generation=generation, priority=4.0
    ).updated_mask.all()
    assert len(rb.storage) == written * WIDTH


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("way", ["state_dict", "dump"])
def test_a_restore_brings_its_own_handles_back(make, way, tmp_path):
    rb = td_grid(2, storage=make(CELLS, ndim=2))
    rb.update_priority_if_present(index=[[1, 2]], generation=[0], priority=[6.0])
    resumed = td_grid(0, storage=make(CELLS, ndim=2))
    if way == "dump":
        rb.dumps(tmp_path)
        resumed.loads(tmp_path)
    else:
        resumed.load_state_dict(copy.deepcopy(rb.state_dict()))

    assert stamps(resumed).tolist() == [0, 0, -1, -1]
    assert leaves(resumed) == [1, 1, 1, 1, 1, 6, 0, 0, 0, 0, 0, 0]
    result = resumed.update_priority_if_present(
        index=[[0, 1], [2, 0]], generation=[0, 0], priority=4.0
    )
    assert result.updated_mask.tolist() == [True, False]
    index, generation = resumed.extend(td_rows(2, 1), return_generation=True)
    assert index[:, 0].tolist() == [2, 2, 2]
    assert (generation > 2**20).any() or generation.min() > 0  # from the base on


def test_an_older_state_makes_later_rows_stale():
    rb = td_grid(2)
    state = copy.deepcopy(rb.state_dict())
    index, generation = rb.extend(td_rows(2, 2), return_generation=True)
    rb.load_state_dict(state)
    assert (
        rb.update_priority_if_present(
            index=index, generation=generation, priority=4.0
        ).updated_mask.tolist()
        == [False] * 6
    )
    assert rb.update_priority_if_present(
        index=[[0, 0]], generation=[0], priority=4.0
    ).updated_mask.tolist() == [True]


def test_rows_that_ran_on_since_a_state_was_taken_are_stale():
    rb = td_grid()
    state = rb.state_dict()  # no copy
    rb.update_priority(torch.tensor(ALL_CELLS), torch.full((12,), 3.0))
    rb.extend(td_rows(9, 1))
    rb.load_state_dict(state)
    result = rb.update_priority_if_present(index=[[0, 0], [1, 0]], generation=[0, 0], priority=5.0)
    assert result.updated_mask.tolist() == [False, True]
    assert leaves(rb) == [1, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("way", ["state_dict", "dump"])
def test_a_checkpoint_of_another_shape_is_refused_and_nothing_changed(way, tmp_path):
    rb = td_grid()
    other = td_grid(0, storage=LazyTensorStorage(15, ndim=2))
    other.extend(td_rows(0, 2))
    rb.dumps(tmp_path)
    load = {"dump": other.loads, "state_dict": other.load_state_dict}[way]
    with pytest.raises(ValueError, match="capacity"):
        load(tmp_path if way == "dump" else rb.state_dict())
    assert stamps(other).tolist() == [0, 0, -1, -1, -1]
    assert leaves(other) == [1] * 6 + [0] * 9


def write_two_rows(rb):
    torch.set_num_threads(1)
    rb.extend(td_rows(50, 2))


@pytest.mark.parametrize(
    ("method", "make", "first"),
    [
        ("fork", LazyTensorStorage, "parent"),
        ("forkserver", LazyMemmapStorage, "parent"),
        ("fork", LazyMemmapStorage, "child"),
        ("forkserver", LazyTensorStorage, "child"),
    ],
)
def test_the_rows_that_another_process_writes_are_stale(method, make, first):
    rb = TensorDictReplayBuffer(
        storage=make(CELLS - 1, ndim=2, shared_init=first == "child"),  # rounded up to 12 cells
        dim_extend=0,
        batch_size=6,
        track_generations=True,
    )
    rb.share()
    if first == "parent":
        rb.extend(td_rows(0, 4))
        held = rb.sample()
    process = multiprocessing.get_context(method).Process(
        target=write_two_rows, args=(rb,), daemon=True
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    table = SlotGenerations.attach(rb.storage)
    if first == "parent":
        live = table.is_live(held["index"], held["index_generation"])
        assert live.tolist() == (held["index"][:, 0] >= 2).tolist()
        assert rb.storage[:, 0]["id"].tolist() == [500, 510, 20, 30]
    else:
        assert table.of(range(4)).tolist() == [0, 0, -1, -1]
        index, generation = rb.extend(td_rows(0, 3), return_generation=True)
        assert index[::WIDTH, 0].tolist() == [2, 3, 0]
        assert generation[::WIDTH].tolist() == [0, 0, 1]
        assert rb.storage[:, 0]["id"].tolist() == [20, 510, 0, 10]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("handles_on", ["cpu", "cuda"])
def test_coordinates_on_another_device_than_the_storage(handles_on):
    storage_on = "cpu" if handles_on == "cuda" else "cuda"
    rb = ReplayBuffer(
        storage=LazyTensorStorage(CELLS, ndim=2, device=storage_on),
        sampler=PrioritizedSampler(CELLS, **PER, device="cpu"),  # TorchRL's wheel has no other
        dim_extend=0,
        track_generations=True,
    )
    rb.extend(rows(0, 4).to(storage_on))
    rb.extend(rows(4, 1).to(storage_on))
    result = rb.update_priority_if_present(
        index=torch.tensor([[0, 0], [1, 1], [1, 1]], device=handles_on),
        generation=torch.tensor([0, 0, 0], device=handles_on),
        priority=torch.tensor([5.0, 6.0, 7.0], device=handles_on),
    )
    assert result.updated_mask.device.type == handles_on
    assert result.updated_mask.tolist() == [False, True, True]
    assert leaves(rb)[:6] == [1, 1, 1, 1, 7, 1]
