"""The page of combinations says what is so, of every public name."""

from __future__ import annotations

import pytest
import torch
from combinations import OTHERS, PAGE, SAMPLERS, STORAGES, UNITS, WRITERS, page
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, PrioritizedSampler
from torchrl.data import replay_buffers as stock
from torchrl.data.replay_buffers.generations import (
    ConditionalPriorityUpdates,
    TensorDictReplayBuffer,
)


def test_the_page_is_what_trying_each_combination_gives():
    assert PAGE.read_text() == page(), "run: python test/combinations.py"


@pytest.mark.parametrize("name", stock.__all__)
def test_every_public_name_stands_on_the_page(name):
    assert f"- ``{name}``: " in PAGE.read_text()


def test_the_page_speaks_of_no_name_that_there_is_not():
    tried = [*STORAGES, *SAMPLERS, *WRITERS, *UNITS]
    assert set(OTHERS) <= set(stock.__all__)
    for name in tried:
        assert any(public in name for public in stock.__all__), name


def test_a_hindsight_buffer_carries_stamps():
    class Mine(ConditionalPriorityUpdates, stock.HERReplayBuffer):
        pass

    step = torch.arange(8.0).unsqueeze(-1)
    goals = {"achieved_goal": step, "desired_goal": torch.zeros(8, 1)}
    data = TensorDict(
        {
            **goals,
            "next": {
                **goals,
                "reward": torch.zeros(8, 1),
                "done": step == 7,
                "terminated": step == 7,
            },
        },
        [8],
    )
    rb = Mine(
        storage=LazyMemmapStorage(8),
        reward_fn=lambda td: (td["achieved_goal"] == td["desired_goal"]).float(),
        batch_size=4,
        track_generations=True,
    )
    rb.extend(data)
    sample = rb.sample()
    assert sample["index_generation"].tolist() == [0] * 4
    rb.extend(data)
    assert not rb._table.is_live(sample["index"], sample["index_generation"]).any()


@pytest.mark.parametrize("records", [5, 12])
@pytest.mark.parametrize(
    "checkpointer",
    [
        stock.TensorStorageCheckpointer,
        stock.FlatStorageCheckpointer,
        stock.NestedStorageCheckpointer,
    ],
)
def test_every_checkpointer_brings_records_and_handles_back_into_their_slots(
    checkpointer, records, tmp_path
):
    def built():
        return TensorDictReplayBuffer(
            storage=LazyMemmapStorage(8),
            sampler=PrioritizedSampler(8, alpha=1.0, beta=1.0, eps=0.0),
            batch_size=4,
            track_generations=True,
            checkpointer=checkpointer(),
        )

    rb = built()
    for first in range(0, records, 4):
        rb.extend(episode(first, min(4, records - first)))
    slots = torch.arange(min(records, 8))
    handles = {"index": slots, "generation": rb.writer.generations_of(slots)}
    rb.dumps(tmp_path)
    resumed = built()
    resumed.loads(tmp_path)

    assert resumed[:]["obs"].tolist() == rb[:]["obs"].tolist()
    assert resumed.update_priority_if_present(**handles, priority=3.0).updated_mask.all()


def episode(first, count):
    at = torch.arange(first, first + count).unsqueeze(-1)
    done = at == first + count - 1
    return TensorDict(
        {
            "obs": at.float(),
            "collector": {"traj_ids": at[:, 0] // 4},
            "next": {
                "obs": at + 1.0,
                "reward": torch.zeros(count, 1),
                "done": done,
                "terminated": done,
                "truncated": torch.zeros_like(done),
            },
        },
        [count],
    )
