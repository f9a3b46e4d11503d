"""The ring writer of tensordict buffers, which writes the slots into the records."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right, is_tensorclass
from torchrl.data import replay_buffers as torchrl_buffers

from ..core.table import SlotGenerations
from .ring import RoundRobinWriter
from .stamping import GENERATION_KEY, row_generations


class TensorDictRoundRobinWriter(RoundRobinWriter, torchrl_buffers.TensorDictRoundRobinWriter):
    """A ring writer for tensordict buffers whose slots carry generation stamps.

    See :class:`torchrl.data.TensorDictRoundRobinWriter`, and :class:`RoundRobinWriter` for the
    arguments. It writes ``"index"`` into the tensordict that it is given, as TorchRL's does; where
    that tensordict carries an ``"index_generation"``, a sample put back in, it rewrites this, too.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl.data.replay_buffers.generations import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     writer=TensorDictRoundRobinWriter(track_generations=True),
        ...     batch_size=2,
        ... )
        >>> index = rb.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> rb.sample()["index_generation"]
        tensor([0, 0])
    """

    _index_key = "index"

    def _index_entry(self, data: Any, index: Any) -> dict[str, torch.Tensor]:
        if not _has_room(data):
            return {}
        slots = torch.as_tensor(index)
        return {"index": slots if slots.ndim == data.ndim else expand_as_right(slots, data)}

    def _set_index(self, data: Any, index: Any) -> None:
        for key, value in self._index_entry(data, index).items():
            data.set(key, value)

    def _check_labelled(self, data: Any, labels: bool) -> None:
        if labels and _has_room(data) and data.is_locked:
            raise ValueError(
                "A write puts 'index' into the records: got locked ones. Give it an unlocked copy."
            )

    def _labels(self, stored: Any, index: Any) -> Any:
        return index if self._storage.ndim == 1 else stored.get("index")

    def _label(self, table: SlotGenerations, data: Any, index: Any) -> None:
        if is_tensorclass(data):
            return
        slots = torch.as_tensor(index, device=data.device)
        if slots.ndim > 1:
            slots = slots.reshape(slots.shape[0], -1)[:, 0]
        data.set("index", expand_as_right(slots, data))
        if GENERATION_KEY in data.keys():  # noqa: SIM118  a tensordict is no mapping
            data.set(GENERATION_KEY, expand_as_right(row_generations(table, slots), data))


def _has_room(data: Any) -> bool:
    """Whether slots can be written into records: a tensorclass has no room for more."""
    return isinstance(data, TensorDictBase) and not is_tensorclass(data)
