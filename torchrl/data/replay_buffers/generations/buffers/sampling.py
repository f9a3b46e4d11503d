"""What a tracking buffer needs to know about TorchRL's samplers and samples."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from tensordict.utils import expand_as_right, is_tensorclass
from torch.utils._pytree import tree_map
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    PromptGroupSampler,
    Sampler,
    StalenessAwareSampler,
    Storage,
    StreamingSliceSampler,
    TensorStorage,
    Writer,
)

from ..writers.ring import RoundRobinWriter

# Their samples name cells by one number, which a storage with ndim > 1 reads as a slot.
_ONE_DIMENSION_ONLY = (PromptGroupSampler, StalenessAwareSampler, StreamingSliceSampler)


def check_dimensions(storage: Storage, sampler: Sampler, writer: Writer) -> None:
    """Refuses a sampler or a writer that does not know the dimensions of a tracked storage.

    Raises:
        ValueError: with ``ndim > 1`` for a sampler of one dimension, or for priorities over a
            storage without records that a writer of TorchRL's may give more cells than they have
            leaves.
    """
    if storage.ndim == 1:
        return
    if isinstance(sampler, _ONE_DIMENSION_ONLY):
        raise ValueError(
            f"{type(sampler).__name__} needs a storage with ndim=1: got {type(storage).__name__} "
            f"with ndim={storage.ndim}. Flatten the records and give the storage ndim=1."
        )
    unshaped = isinstance(storage, TensorStorage) and not storage.initialized
    prioritized = isinstance(sampler, PrioritizedSampler)
    if unshaped and prioritized and not isinstance(writer, RoundRobinWriter):
        raise ValueError(
            f"A priority sampler over a {type(storage).__name__} with ndim={storage.ndim} that was "
            "never written needs a writer that makes sure of a leaf for every cell: got a "
            f"{type(writer).__name__} of TorchRL's. Use generations.RoundRobinWriter."
        )


def unmask_leaves(sampler: PrioritizedSampler) -> None:
    """Restores the leaves that a failed ``PrioritizedSliceSampler.sample`` has left at zero.

    It masks the ends of trajectories while it samples, in the sum tree alone; so the min tree still
    has every leaf, and that of an update that came in between.

    Args:
        sampler (PrioritizedSampler): the sampler; the caller holds the lock of the table.
    """
    slots = torch.arange(sampler.max_size)
    leaves = torch.as_tensor(sampler._min_tree[slots])
    written = leaves < torch.finfo(sampler.dtype).max
    sampler._sum_tree[slots[written]] = leaves[written]


def info_on(device: torch.device | None, info: dict[Any, Any]) -> dict[Any, Any]:
    """Returns what a sampler tells of a sample, such as its index, on the device of the storage.

    TorchRL's ``sample`` passes it through PyTree, which takes as long as to read 100 records.
    """
    if device is None:
        return info
    if type(info) is not dict:  # an ensemble's is a tensordict
        return _on(device, info)
    return {key: _on(device, value) for key, value in info.items()}


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    return tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, value)


def put_info(data: Any, info: dict[Any, Any]) -> None:
    """Puts what a sampler tells of a sample into the sampled records.

    TorchRL's ``sample`` has each entry checked by the tensordict.

    Args:
        data (TensorDictBase): the records, ``[batch]`` or of more dimensions. A tensorclass has no
            room for more, and stays as it is.
        info (dict): index, stamps, weights: entries that begin with the dimensions of the records,
            or are expanded to them.

    Raises:
        RuntimeError: for records that are no tensordict, or an entry that does not go with them.
    """
    if not is_tensor_collection(data):
        raise RuntimeError(f"sample() needs records in a tensordict: got {type(data).__name__}.")
    if is_tensorclass(data):
        return
    device, shape, plain = data.device, data.batch_size, type(data) is TensorDict
    with data.unlock_() if data.is_locked else contextlib.nullcontext():
        for key, value in info.items():
            try:
                if key == "index" and isinstance(value, tuple):
                    value = torch.stack(value, -1)
                elif not isinstance(value, torch.Tensor):
                    value = torch.as_tensor(value)
                if device is not None and value.device != device:
                    value = value.to(device)
                if value.ndim < len(shape):
                    value = expand_as_right(value, data)
                if plain and isinstance(key, str) and value.shape[: len(shape)] == shape:
                    data._set_str(key, value, inplace=False, validated=True)
                else:
                    data.set(key, value)
            except RuntimeError as err:
                raise RuntimeError(
                    f"sample() needs records that {key!r} goes with, and a transform may have "
                    f"changed their shape: got {value!r} for records of batch size {list(shape)}. "
                    "sample(return_info=True) of a ReplayBuffer gives both apart."
                ) from err
