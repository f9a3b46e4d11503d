"""Hydra configurations of our writers and buffers, beside TorchRL's own. Needs hydra-core.

Importing this module puts them into Hydra's config store, in TorchRL's groups ``writer`` and
``replay_buffer``, each under a name that begins with ``generations_``. Fields that are not told
here are those of TorchRL's configurations. A nested key is a list. A whole configuration, as YAML:

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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import MISSING, OmegaConf
from torchrl.trainers.algorithms.configs import data as torchrl_configs

_PACKAGE = "torchrl.data.replay_buffers.generations"
_BUILD = f"{_PACKAGE}.training.configs.build"


def build(*, _class: str, **fields: Any) -> Any:
    """Builds a writer or buffer of this package from what YAML can say.

    Keyword Args:
        _class (str): the name of its class.
        **fields: its arguments, see :data:`CONVERTED` and :data:`POSITIONAL`; further ones in
            ``arguments``.

    Raises:
        ValueError: if ``dtype`` is the name of no floating-point dtype of torch.
    """
    plain: dict[str, Any] = {
        name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for name, value in fields.items()
    }
    members = plain.pop(POSITIONAL.get(_class, ""), ())
    plain.update(plain.pop("arguments", {}))
    arguments = {
        name: CONVERTED[name](value) if name in CONVERTED else value
        for name, value in plain.items()
    }
    return get_class(f"{_PACKAGE}.{_class}")(*members, **arguments)


def _nested_key(key: Any) -> Any:
    """YAML knows lists where a nested key is a tuple."""
    return tuple(key) if isinstance(key, list) else key


def _floating_dtype(given: Any) -> torch.dtype:
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            "PrioritizedReplayBufferConfig: dtype must name a floating-point dtype of torch, such "
            f"as 'float64': got {given!r}."
        )
    return dtype


# Fields whose argument YAML can't say, and what makes it of them.
CONVERTED: dict[str, Callable[[Any], Any]] = {
    "priority_key": _nested_key,
    "rank_key": _nested_key,
    "routing_key": _nested_key,
    "dtype": _floating_dtype,
    "replay_buffer_cls": lambda given: get_class(given) if isinstance(given, str) else given,
}
# Fields that hold a list of positional arguments, by the class.
POSITIONAL = {"WriterEnsemble": "writers", "ReplayBufferEnsemble": "rbs"}


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
    """Configuration of our :class:`TensorDictMaxValueWriter`."""

    _target_: str = _BUILD
    _class: str = "TensorDictMaxValueWriter"
    compilable: bool = False
    track_generations: bool = False


@dataclass
class WriterEnsembleConfig(torchrl_configs.WriterConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.WriterEnsemble`."""

    _target_: str = _BUILD
    _class: str = "WriterEnsemble"
    writers: list[Any] = field(default_factory=list)
    track_generations: bool = False


@dataclass
class ReplayBufferConfig(torchrl_configs.ReplayBufferConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.ReplayBuffer`."""

    _target_: str = f"{_PACKAGE}.ReplayBuffer"
    track_generations: bool = False


@dataclass
class TensorDictReplayBufferConfig(torchrl_configs.TensorDictReplayBufferConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.TensorDictReplayBuffer`."""

    _target_: str = _BUILD
    _class: str = "TensorDictReplayBuffer"
    priority_key: Any = "td_error"
    transport: str = "auto"
    transport_options: Any = None
    track_generations: bool = False
    guard_priorities: bool = False


@dataclass
class _BufferConfig(torchrl_configs.ReplayBufferBaseConfig):
    """What all buffers take."""

    _target_: str = _BUILD
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

    _class: str = "PrioritizedReplayBuffer"
    dtype: Any = "float32"
    sampler: Any = None
    delayed_init: bool = False


@dataclass
class TensorDictPrioritizedReplayBufferConfig(_PrioritizedConfig):
    """Configuration of our :class:`TensorDictPrioritizedReplayBuffer`."""

    _class: str = "TensorDictPrioritizedReplayBuffer"
    priority_key: Any = "td_error"
    reduction: str = "max"
    compilable: bool = False
    guard_priorities: bool = False


@dataclass
class ReplayBufferEnsembleConfig(_BufferConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.ReplayBufferEnsemble`.

    ``rbs`` are the members, a list of configurations.
    """

    _class: str = "ReplayBufferEnsemble"
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

    _class: str = "RemoteTensorDictReplayBuffer"


@dataclass
class RayReplayBufferConfig(torchrl_configs.ReplayBufferBaseConfig):
    """Configuration of :class:`~torchrl.data.replay_buffers.generations.RayReplayBuffer`.

    ``replay_buffer_cls`` is the import path of the class in the actor, and ``arguments`` are what
    that takes: storage, sampler and writer with ``_partial_: true``.
    """

    _target_: str = _BUILD
    _class: str = "RayReplayBuffer"
    replay_buffer_cls: Any = f"{_PACKAGE}.ReplayBuffer"
    ray_init_config: Any = None
    remote_config: Any = None
    transport: str = "auto"
    transport_options: Any = None
    delayed_init: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


for _group, _name, _node in (
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
    ConfigStore.instance().store(group=_group, name=f"generations_{_name}", node=_node)
