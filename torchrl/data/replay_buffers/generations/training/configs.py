"""Hydra configurations of our writers and buffers, beside TorchRL's own. Needs hydra-core.

Importing this module puts them into Hydra's config store, in TorchRL's groups ``writer`` and
``replay_buffer``, each under a name that begins with ``generations_``. Fields that are not told
here are those of TorchRL's configurations. A whole configuration, as YAML:

.. code-block:: yaml

    defaults:
      - replay_buffer: generations_tensordict_prioritized
      - storage@replay_buffer.storage: lazy_tensor
      - _self_
    replay_buffer:
      alpha: 0.7
      beta: 0.5
      track_generations: true
      guard_priorities: true
      storage: {max_size: 1000}

>>> from hydra.utils import instantiate
>>> config = TensorDictPrioritizedReplayBufferConfig(alpha=0.7, beta=0.5, track_generations=True)
>>> type(instantiate(config)).__name__
'TensorDictPrioritizedReplayBuffer'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import MISSING, OmegaConf
from torchrl.data.replay_buffers import Writer
from torchrl.trainers.algorithms.configs import data as torchrl_configs

from ..buffers.classes import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from ..buffers.ensemble import ReplayBufferEnsemble, WriterEnsemble
from ..remote.remote import RayReplayBuffer, RemoteTensorDictReplayBuffer
from ..writers.max_value import TensorDictMaxValueWriter

_PACKAGE = "torchrl.data.replay_buffers.generations"


@dataclass
class RoundRobinWriterConfig(torchrl_configs.RoundRobinWriterConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.RoundRobinWriter`."""

    _target_: str = f"{_PACKAGE}.RoundRobinWriter"


@dataclass
class TensorDictRoundRobinWriterConfig(torchrl_configs.TensorDictRoundRobinWriterConfig):
    """Configuration of our :class:`TensorDictRoundRobinWriter`."""

    _target_: str = f"{_PACKAGE}.TensorDictRoundRobinWriter"


@dataclass
class TensorDictMaxValueWriterConfig(torchrl_configs.TensorDictMaxValueWriterConfig):
    """Configuration of our :class:`TensorDictMaxValueWriter`; ``rank_key`` may be a list."""

    _target_: str = f"{_PACKAGE}.training.configs.make_tensordict_max_value_writer"
    compilable: bool = False
    track_generations: bool = False


@dataclass
class WriterEnsembleConfig(torchrl_configs.WriterConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.WriterEnsemble`."""

    _target_: str = f"{_PACKAGE}.training.configs.make_writer_ensemble"
    writers: list[Any] = field(default_factory=list)
    track_generations: bool = False


@dataclass
class ReplayBufferConfig(torchrl_configs.ReplayBufferConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.ReplayBuffer`."""

    _target_: str = f"{_PACKAGE}.ReplayBuffer"
    track_generations: bool = False


@dataclass
class TensorDictReplayBufferConfig(torchrl_configs.TensorDictReplayBufferConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.TensorDictReplayBuffer`.

    ``priority_key`` may be a list: a nested key.
    """

    _target_: str = f"{_PACKAGE}.training.configs.make_tensordict_replay_buffer"
    priority_key: Any = "td_error"
    transport: str = "auto"
    transport_options: Any = None
    track_generations: bool = False
    guard_priorities: bool = False


@dataclass
class _BufferConfig(torchrl_configs.ReplayBufferBaseConfig):
    """What all buffers take."""

    track_generations: bool = False
    batch_size: int | None = None
    prefetch: int | None = None
    pin_memory: bool = False
    shared: bool = False
    dim_extend: int | None = None
    generator: Any = None
    sample_unit: Any = None
    transform: Any = None
    collate_fn: Any = None
    transport: str = "auto"
    transport_options: Any = None


@dataclass
class _PrioritizedConfig(_BufferConfig):
    """What both prioritized buffers take."""

    alpha: float = MISSING
    beta: float = MISSING
    eps: float = 1e-8
    sync: bool = True
    sampler_device: Any = None
    storage: Any = None
    writer: Any = None


@dataclass
class PrioritizedReplayBufferConfig(_PrioritizedConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.PrioritizedReplayBuffer`.

    ``dtype`` is the name of a floating-point dtype of torch.
    """

    _target_: str = f"{_PACKAGE}.training.configs.make_prioritized_replay_buffer"
    dtype: Any = "float32"
    sampler: Any = None
    delayed_init: bool = False


@dataclass
class TensorDictPrioritizedReplayBufferConfig(_PrioritizedConfig):
    """Configuration of our :class:`TensorDictPrioritizedReplayBuffer`.

    ``priority_key`` may be a list: a nested key.
    """

    _target_: str = f"{_PACKAGE}.training.configs.make_tensordict_prioritized_replay_buffer"
    priority_key: Any = "td_error"
    reduction: str = "max"
    compilable: bool = False
    guard_priorities: bool = False


@dataclass
class ReplayBufferEnsembleConfig(_BufferConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.ReplayBufferEnsemble`.

    ``rbs`` are the members, a list of configurations. ``routing_key`` may be a list.
    """

    _target_: str = f"{_PACKAGE}.training.configs.make_replay_buffer_ensemble"
    rbs: list[Any] = field(default_factory=list)
    p: Any = None
    sample_from_all: bool = False
    num_buffer_sampled: int | None = None
    routing_key: Any = None
    routing_dim: int | None = None
    storages: Any = None
    samplers: Any = None
    writers: Any = None
    collate_fns: Any = None
    consume_after_n_samples: int | None = None
    checkpointer: Any = None
    transform_factory: Any = None
    delayed_init: bool | None = None
    compilable: bool | None = None
    service_backend: str = "direct"
    service_backend_options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RemoteTensorDictReplayBufferConfig(TensorDictReplayBufferConfig):
    """Configuration of our :class:`RemoteTensorDictReplayBuffer`, as of the buffer it is."""

    _target_: str = f"{_PACKAGE}.training.configs.make_remote_tensordict_replay_buffer"


@dataclass
class RayReplayBufferConfig(torchrl_configs.ReplayBufferBaseConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.RayReplayBuffer`.

    ``replay_buffer_cls`` is the import path of the class in the actor, and ``arguments`` are what
    that takes: storage, sampler and writer with ``_partial_: true``.
    """

    _target_: str = f"{_PACKAGE}.training.configs.make_ray_replay_buffer"
    replay_buffer_cls: Any = f"{_PACKAGE}.ReplayBuffer"
    ray_init_config: Any = None
    remote_config: Any = None
    transport: str = "auto"
    transport_options: Any = None
    delayed_init: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def make_remote_tensordict_replay_buffer(
    *, priority_key: Any, **kwargs: Any
) -> RemoteTensorDictReplayBuffer:
    """Builds the buffer from what YAML can say."""
    return RemoteTensorDictReplayBuffer(priority_key=_nested_key(priority_key), **kwargs)


def make_ray_replay_buffer(
    *, replay_buffer_cls: Any, arguments: Mapping[str, Any], **kwargs: Any
) -> RayReplayBuffer:
    """Builds the buffer from what YAML can say."""
    if isinstance(replay_buffer_cls, str):
        replay_buffer_cls = get_class(replay_buffer_cls)
    plain = {
        name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for name, value in kwargs.items()
    }
    return RayReplayBuffer(replay_buffer_cls=replay_buffer_cls, **plain, **arguments)


def make_tensordict_max_value_writer(*, rank_key: Any, **kwargs: Any) -> TensorDictMaxValueWriter:
    """Builds the writer from what YAML can say."""
    return TensorDictMaxValueWriter(rank_key=_nested_key(rank_key), **kwargs)


def make_writer_ensemble(*, writers: Sequence[Writer], **kwargs: Any) -> WriterEnsemble:
    """Builds the ensemble, which takes its writers as positional arguments."""
    return WriterEnsemble(*writers, **kwargs)


def make_replay_buffer_ensemble(
    *, rbs: Sequence[Any], routing_key: Any, p: Any, **kwargs: Any
) -> ReplayBufferEnsemble:
    """Builds the ensemble, which takes its members as positional arguments."""
    if isinstance(p, Sequence) and not isinstance(p, str):
        p = list(p)
    return ReplayBufferEnsemble(*rbs, routing_key=_nested_key(routing_key), p=p, **kwargs)


def make_tensordict_replay_buffer(*, priority_key: Any, **kwargs: Any) -> TensorDictReplayBuffer:
    """Builds the buffer from what YAML can say."""
    return TensorDictReplayBuffer(priority_key=_nested_key(priority_key), **kwargs)


def make_tensordict_prioritized_replay_buffer(
    *, priority_key: Any, **kwargs: Any
) -> TensorDictPrioritizedReplayBuffer:
    """Builds the buffer from what YAML can say."""
    return TensorDictPrioritizedReplayBuffer(priority_key=_nested_key(priority_key), **kwargs)


def make_prioritized_replay_buffer(*, dtype: Any, **kwargs: Any) -> PrioritizedReplayBuffer:
    """Builds the buffer from what YAML can say.

    Raises:
        ValueError: if torch has no floating-point dtype of that name.
    """
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(named, torch.dtype) and named.is_floating_point):
        raise ValueError(
            "PrioritizedReplayBufferConfig: dtype must name a floating-point dtype of torch, such "
            f"as 'float64': got {dtype!r}."
        )
    return PrioritizedReplayBuffer(dtype=named, **kwargs)


def _nested_key(key: Any) -> Any:
    """YAML knows lists where a nested key is a tuple."""
    return tuple(key) if isinstance(key, Sequence) and not isinstance(key, str) else key


def _register() -> None:
    store = ConfigStore.instance()
    for group, name, node in (
        ("writer", "round_robin", RoundRobinWriterConfig),
        ("writer", "tensordict_round_robin", TensorDictRoundRobinWriterConfig),
        ("writer", "tensordict_max_value", TensorDictMaxValueWriterConfig),
        ("writer", "ensemble", WriterEnsembleConfig),
        ("replay_buffer", "base", ReplayBufferConfig),
        ("replay_buffer", "prioritized", PrioritizedReplayBufferConfig),
        ("replay_buffer", "tensordict", TensorDictReplayBufferConfig),
        ("replay_buffer", "tensordict_prioritized", TensorDictPrioritizedReplayBufferConfig),
        ("replay_buffer", "ensemble", ReplayBufferEnsembleConfig),
        ("replay_buffer", "remote", RemoteTensorDictReplayBufferConfig),
        ("replay_buffer", "ray", RayReplayBufferConfig),
    ):
        store.store(group=group, name=f"generations_{name}", node=node)


_register()
