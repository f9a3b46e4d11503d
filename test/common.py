"""What the tests share: small buffers, the leaves of their tree, and threads that fail loudly."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorStorage
from torchrl.data.replay_buffers.generations import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SlotGenerations,
    TensorDictPrioritizedReplayBuffer,
)

CAPACITY = 8
PER = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}

STORAGES = {
    "list": ListStorage,
    "tensor": lambda size: TensorStorage(torch.zeros(size, dtype=torch.int64)),
    "lazy_tensor": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
}


def readme_example(containing: str) -> str:
    """The one Python example of the README with this in it, for a test that runs it."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (found,) = [example for example in examples if containing in example]
    return found


def buffer(records: int = CAPACITY, **kwargs: Any) -> PrioritizedReplayBuffer:
    """A tracking buffer of integer records 0, 1, ...; alpha 1 and eps 0: a leaf is a priority."""
    kwargs.setdefault("storage", LazyTensorStorage(CAPACITY))
    rb = PrioritizedReplayBuffer(**PER, **kwargs, track_generations=True)
    if records:
        rb.extend(torch.arange(records))
    return rb


def td_buffer(records: int = CAPACITY, **kwargs: Any) -> TensorDictPrioritizedReplayBuffer:
    """The same with tensordict records, under the key ``"id"``."""
    kwargs.setdefault("storage", LazyTensorStorage(CAPACITY))
    rb = TensorDictPrioritizedReplayBuffer(**PER, **kwargs, track_generations=True)
    if records:
        rb.extend(ids(range(records)))
    return rb


def ids(values: Any, **columns: Any) -> TensorDict:
    data = {"id": torch.as_tensor(list(values)), **columns}
    return TensorDict(data, [len(data["id"])])


def audited(
    rb: ReplayBuffer, late: TensorDict, priority: Any, conditional: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Updates a late sample; returns what was applied, and which of its records were there."""
    with rb._table.lock:
        there = rb.storage[:]["id"][late["index"]] == late["id"]
        if conditional:
            applied = rb.update_priority_if_present(
                index=late["index"], generation=late["index_generation"], priority=priority
            ).updated_mask
        else:
            rb.update_priority(late["index"], priority)
            applied = torch.ones_like(there)
    return applied, there


def leaves(rb: ReplayBuffer) -> list[float]:
    """The values of the sum tree, slot by slot."""
    sampler = rb._priority_sampler
    return sampler._sum_tree[torch.arange(sampler.max_size)].tolist()


def stamps(rb: ReplayBuffer) -> torch.Tensor:
    return SlotGenerations.attach(rb.storage).stamps


def handles(rb: ReplayBuffer, index: Any = None) -> dict[str, torch.Tensor]:
    """The current handles of some slots (all by default), as keyword arguments."""
    index = torch.arange(CAPACITY) if index is None else torch.as_tensor(index)
    return {"index": index, "generation": rb.writer.generations_of(index)}


class Thread(threading.Thread):
    """A thread whose exception reaches the test at join()."""

    def __init__(self, target: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._run_target = target
        self._error: BaseException | None = None
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._run_target()
        except BaseException as error:
            self._error = error

    def join_briefly(self, seconds: float) -> None:
        super().join(seconds)

    def join(self, timeout: float | None = 30) -> Any:
        super().join(timeout)
        assert not self.is_alive(), "the thread is still waiting: a deadlock"
        if self._error is not None:
            raise self._error
        return self.result


@contextlib.contextmanager
def failing_writes(storage: Any) -> Iterator[None]:
    """Lets each write of a storage fail when it has put its data there."""
    torchrls = storage.set

    def failing(*args: Any, **kwargs: Any) -> None:
        torchrls(*args, **kwargs)
        raise OSError("no space left")

    storage.set = failing
    try:
        with pytest.raises(OSError, match="no space left"):
            yield
    finally:
        del storage.set
