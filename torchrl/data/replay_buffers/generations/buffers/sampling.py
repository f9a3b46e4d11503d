"""A sample: index, stamps and records read in one hold of the lock, and put together.

The draws are those of the sampler, whichever it is, with its random numbers. Where nothing but
TorchRL's own code stands between a tracking buffer and its records, they are read by
:class:`~..writers.columns.Columns`, and index, stamps and weights go straight into the new
tensordict. Whatever a user or TorchRL does in its own way (a transform, pinned memory, a sample
method) goes TorchRL's way: its ``_sample`` asks the sampler, attaches
``writer.generations_of(index)`` and reads the storage under the same lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection
from tensordict.utils import expand_as_right, is_tensorclass
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    Sampler,
    StalenessAwareSampler,
    Storage,
    StreamingSliceSampler,
    TensorStorage,
    Writer,
)

from ..core.table import SlotGenerations
from ..core.trees import draw
from ..processes.holding import locked
from ..writers.columns import columns_of
from ..writers.ring import RoundRobinWriter
from .torchrls import is_torchrls

if TYPE_CHECKING:
    from .conditional import ConditionalPriorityUpdates

# Their samples name cells by one number, which a storage with ndim > 1 reads as a slot.
_ONE_DIMENSION_ONLY = (PromptGroupSampler, StalenessAwareSampler, StreamingSliceSampler)


def sample(
    rb: ConditionalPriorityUpdates, torchrls: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Samples a buffer without the detours of TorchRL's ``sample``, where it takes them.

    That is where it would return at once what ``_sample`` gives, of the buffer's own batch size.
    """
    size = rb._batch_size
    if (
        rb._table is None
        or size is None
        or rb._prefetch
        or rb._service_shutdown
        or rb._sample_dependency is not None
        or is_compiling()
        or not is_torchrls(rb, "sample")
    ):
        if rb._prefetch or rb._sample_dependency is not None:  # it may wait for who needs the lock
            rb._refuse_in_a_write("sample() of a buffer with something in the background")
        return torchrls(*args, **kwargs)
    try:
        batch_size, return_info = _size_and_info(*args, **kwargs)
    except TypeError:  # other arguments
        return torchrls(*args, **kwargs)
    if batch_size not in (None, size):
        return torchrls(*args, **kwargs)
    data, info = rb._sample(size)
    if rb._is_tensordict or return_info:
        info = info_on(getattr(rb._storage, "device", None), info)
    if rb._is_tensordict:
        data = put_info(data, info)
    return (data, info) if return_info else data


def _size_and_info(
    batch_size: int | None = None, return_info: bool = False
) -> tuple[int | None, bool]:
    return batch_size, return_info


def is_direct(rb: ConditionalPriorityUpdates) -> bool:
    """Whether a sample of a tracked buffer may be read here."""
    return (
        not rb._pin_memory
        and not len(rb._transform)
        and not is_compiling()
        and not isinstance(rb._sampler, PrioritizedSliceSampler)
        and is_torchrls(rb, "_sample")
    )


def as_torchrl(
    rb: ConditionalPriorityUpdates, torchrls: Callable[[int], Any], batch_size: int
) -> Any:
    """Samples as TorchRL does; a sampler that fails while it masks leaves gets them back."""
    try:
        return torchrls(batch_size)
    except BaseException:
        if isinstance(rb._sampler, PrioritizedSliceSampler) and rb._table is not None:
            locked(rb, lambda _: unmask_leaves(rb._sampler))
        raise


def read(
    table: SlotGenerations, rb: ConditionalPriorityUpdates, batch_size: int
) -> tuple[Any, dict[Any, Any]]:
    """Draws and reads a sample; the caller holds the lock.

    Returns:
        The records, and what there is to tell of them: index, stamps, weights.
    """
    storage = rb._storage
    sampler = rb._sampler if rb._sync else rb.prioritized_sampler
    index, info = draw(sampler, storage, batch_size)
    if rb._sample_unit is not None:
        index, info = rb._sample_unit.expand(index, info, storage)
    info["index"] = index
    if rb._writer.tracks_generations:
        info["index_generation"] = rb._writer.generations_of(index)
    columns = columns_of(storage)
    if columns is not None and _is_plain(index, table.sharing.length, storage.max_size):
        # A user's sampler may count from the end.
        with contextlib.suppress(IndexError):
            return columns.read(index), info
    device = getattr(storage, "device", None)
    return storage.get(index if device in (None, "auto") else _on(device, index)), info


def _is_plain(index: Any, length: int, capacity: int) -> bool:
    """Whether an index names slots one by one, none of them past the length of the storage."""
    return (
        type(index) is torch.Tensor
        and index.ndim == 1
        and index.dtype is torch.int64
        and index.is_cpu
        and (length == capacity or bool((index < length).all()))
    )


def info_on(device: torch.device | None, info: Any) -> Any:
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


def put_info(data: Any, info: dict[Any, Any]) -> Any:
    """Puts what a sampler tells of a sample into the sampled records.

    Args:
        data (TensorDictBase): the records, ``[batch]`` or of more dimensions. A tensorclass has no
            room for more, and stays as it is.
        info (dict): index, stamps, weights: entries that begin with the dimensions of the records,
            or are expanded to them.

    Returns:
        The records. Of a lazy stack, it is another one: what it stacks are the stored records.

    Raises:
        RuntimeError: for records that are no tensordict, or an entry that does not go with them.
    """
    plain = type(data) is TensorDict
    if not plain:
        if not is_tensor_collection(data):
            name = type(data).__name__
            raise RuntimeError(f"sample() needs records in a tensordict: got {name}.")
        if is_tensorclass(data):
            return data
        if isinstance(data, LazyStackedTensorDict):
            data = data.copy()
    shape = data.batch_size
    with data.unlock_() if data.is_locked else contextlib.nullcontext():
        for key, value in info.items():
            try:
                entry = _entry(data, key, value)
                if plain and isinstance(key, str) and entry.shape[: len(shape)] == shape:
                    data._set_str(key, entry, inplace=False, validated=True)
                else:
                    data.set(key, entry)
            except RuntimeError as err:
                raise RuntimeError(
                    f"sample() needs records that {key!r} goes with, and a transform may have "
                    f"changed their shape: got {value!r} for records of batch size {list(shape)}. "
                    "sample(return_info=True) of a ReplayBuffer gives both apart."
                ) from err
    return data


def _entry(data: Any, key: Any, value: Any) -> torch.Tensor:
    """One entry as it goes into the records: a tensor, on their device, of their dimensions."""
    if key == "index" and isinstance(value, tuple):
        value = torch.stack(value, -1)
    elif not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    if data.device is not None and value.device != data.device:
        value = value.to(data.device)
    return expand_as_right(value, data) if value.ndim < data.ndim else value


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
