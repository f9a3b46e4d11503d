"""The page of combinations says what is so, of every public name."""

from __future__ import annotations

import pytest
import torch
from combinations import OTHERS, PAGE, SAMPLERS, STORAGES, UNITS, WRITERS, page
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage
from torchrl.data import replay_buffers as stock
from torchrl.data.replay_buffers.generations import (
    ConditionalPriorityUpdates,
)


def test_the_page_is_what_trying_each_combination_gives():
    assert PAGE.read_text() == page(), "run: python test/docs/combinations.py"


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
