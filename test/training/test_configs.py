"""Hydra builds each writer and buffer of ours from YAML, and every argument is a field."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import torchrl.data
from common import ids
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, Writer
from torchrl.data import ReplayBuffer as TorchRLBuffer
from torchrl.data.replay_buffers import generations
from torchrl.data.replay_buffers.generations.training import configs


def built_by_hydra() -> list[type]:
    """Our writers and buffers, without the mix-in."""
    classes = [getattr(generations, name) for name in generations.__all__]
    return [cls for cls in classes if issubclass(cls, (Writer, TorchRLBuffer))]


# An ensemble has its members' parts, and refuses others.
TAKES_NOT = {generations.ReplayBufferEnsemble: ("storage", "sampler", "writer")}
# What a Ray actor's buffer takes stands in a field of its own.
FORWARDS = {generations.RayReplayBuffer: "arguments"}


def constructor_arguments(cls: type) -> dict[str, inspect.Parameter]:
    """Every argument that reaches a constructor through ``**kwargs`` of those before it.

    Of ``*writers`` the name too: YAML gives a list of them. Private ones are Ray's, which adds them
    to a class that it has run.
    """
    if cls in FORWARDS:
        given = inspect.signature(vars(torchrl.data.RayReplayBuffer)["__init__"]).parameters
        named = {name: each for name, each in given.items() if each.kind is each.KEYWORD_ONLY}
        ours = inspect.signature(vars(cls)["__init__"]).parameters["replay_buffer_cls"]
        return {**named, "replay_buffer_cls": ours, FORWARDS[cls]: given["kwargs"]}
    found: dict[str, inspect.Parameter] = {}
    for owner in cls.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
        for parameter in parameters:
            named = parameter.name != "args" and parameter.name[0] != "_"
            if parameter.kind is not parameter.VAR_KEYWORD and named:
                found.setdefault(parameter.name, parameter)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    for name in TAKES_NOT.get(cls, ()):
        del found[name]
    return found


def fields(cls: type) -> dict[str, dataclasses.Field]:
    config = getattr(configs, f"{cls.__name__}Config")
    return {field.name: field for field in dataclasses.fields(config) if field.name[0] != "_"}


@pytest.mark.parametrize("cls", built_by_hydra(), ids=lambda cls: cls.__name__)
def test_every_constructor_argument_is_a_field_and_no_other(cls):
    assert fields(cls).keys() == constructor_arguments(cls).keys()


@pytest.mark.parametrize("cls", built_by_hydra(), ids=lambda cls: cls.__name__)
def test_a_field_has_the_default_of_its_argument(cls):
    config_fields = fields(cls)
    for name, parameter in constructor_arguments(cls).items():
        default = config_fields[name].default
        if parameter.kind is parameter.VAR_KEYWORD:
            assert config_fields[name].default_factory() == {}
        elif parameter.kind is parameter.VAR_POSITIONAL:
            assert config_fields[name].default_factory() == []
        elif parameter.default is inspect.Parameter.empty:
            assert default == "???"
        elif name == "replay_buffer_cls":
            assert get_class(default) is parameter.default
        elif name == "service_backend_options":
            assert config_fields[name].default_factory() == {}  # as TorchRL's own
        elif name == "dtype":
            assert getattr(torch, default) is parameter.default
        else:
            assert default == parameter.default, name


def built(tmp_path, yaml: str):
    """What Hydra builds of a configuration file's ``made``."""
    (tmp_path / "config.yaml").write_text(yaml)
    with initialize_config_dir(str(tmp_path), version_base=None):
        return instantiate(compose("config").made)


@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("name", ["round_robin", "tensordict_round_robin"])
def test_writers_from_yaml(name, tracks, tmp_path):
    writer = built(
        tmp_path,
        f"""
defaults:
  - writer@made: generations_{name}
  - _self_
made:
  track_generations: {str(tracks).lower()}
  compilable: true
""",
    )
    cls = {
        "round_robin": generations.RoundRobinWriter,
        "tensordict_round_robin": generations.TensorDictRoundRobinWriter,
    }[name]
    assert type(writer) is cls
    assert writer.tracks_generations is tracks
    assert writer._compilable is True


def test_a_buffer_from_yaml_with_all_its_parts(tmp_path):
    rb = built(
        tmp_path,
        """
defaults:
  - replay_buffer@made: generations_base
  - storage@made.storage: lazy_memmap
  - sampler@made.sampler: prioritized
  - writer@made.writer: generations_round_robin
  - _self_
made:
  storage: {max_size: 8}
  sampler: {max_capacity: 8, alpha: 1.0, beta: 1.0, eps: 0.0, reduction: max}
  writer: {track_generations: true}
  batch_size: 4
""",
    )
    assert type(rb) is generations.ReplayBuffer
    assert isinstance(rb.storage, LazyMemmapStorage)
    index, generation = rb.extend(torch.arange(8), return_generation=True)
    result = rb.update_priority_if_present(index=index, generation=generation, priority=2.0)
    assert result.num_updated == 8


def test_a_prioritized_buffer_from_yaml(tmp_path):
    rb = built(
        tmp_path,
        """
defaults:
  - replay_buffer@made: generations_prioritized
  - storage@made.storage: lazy_tensor
  - _self_
made:
  storage: {max_size: 8}
  alpha: 0.7
  beta: 0.5
  dtype: float64
  track_generations: true
""",
    )
    assert type(rb) is generations.PrioritizedReplayBuffer
    assert isinstance(rb.storage, LazyTensorStorage)
    assert rb.sampler.dtype is torch.float64
    assert rb.writer.tracks_generations


def test_a_tensordict_buffer_from_yaml(tmp_path):
    rb = built(
        tmp_path,
        """
defaults:
  - replay_buffer@made: generations_tensordict
  - sampler@made.sampler: prioritized
  - _self_
made:
  sampler: {max_capacity: 1000, alpha: 1.0, beta: 1.0, eps: 0.0, reduction: max}
  priority_key: [agents, td_error]
  track_generations: true
  guard_priorities: true
  batch_size: 4
""",
    )
    assert type(rb) is generations.TensorDictReplayBuffer
    assert isinstance(rb.sampler, PrioritizedSampler)
    rb.extend(ids(range(8)))
    sample = rb.sample()
    sample["agents"] = TensorDict({"td_error": torch.full([4], 3.0)}, [4])
    assert rb.update_tensordict_priority(sample).num_updated == 4
    assert rb.sampler._sum_tree[int(sample["index"][0])] == 3.0


@pytest.mark.parametrize("guard", [True, False])
def test_a_tensordict_prioritized_buffer_from_yaml(guard, tmp_path):
    rb = built(
        tmp_path,
        f"""
defaults:
  - replay_buffer@made: generations_tensordict_prioritized
  - storage@made.storage: lazy_tensor
  - _self_
made:
  storage: {{max_size: 8}}
  alpha: 0.7
  beta: 0.5
  batch_size: 4
  sync: false
  reduction: mean
  track_generations: true
  guard_priorities: {str(guard).lower()}
""",
    )
    assert type(rb) is generations.TensorDictPrioritizedReplayBuffer
    assert rb.prioritized_sampler.reduction == "mean"
    rb.extend(ids(range(8)))
    sample = rb.sample()
    rb.extend(ids(range(8)))
    sample["td_error"] = torch.ones(4)
    result = rb.update_tensordict_priority(sample)
    assert (result is not None) is guard
    assert rb.stats()["updates_stale"] == (4 if guard else 0)


def test_an_ensemble_refuses_the_parts_that_are_no_fields():
    member = generations.ReplayBuffer(storage=LazyTensorStorage(4))
    for name in ("storage", "sampler"):
        with pytest.raises(TypeError, match=name):
            generations.ReplayBufferEnsemble(member, **{name: None})


def test_a_max_value_writer_from_yaml(tmp_path):
    writer = built(
        tmp_path,
        """
defaults:
  - writer@made: generations_tensordict_max_value
  - _self_
made: {rank_key: [next, score], reduction: mean, track_generations: true}
""",
    )
    assert type(writer) is generations.TensorDictMaxValueWriter
    assert writer._rank_key == ("next", "score")
    assert writer.tracks_generations


def test_a_writer_ensemble_from_yaml(tmp_path):
    writer = built(
        tmp_path,
        """
defaults:
  - writer@made: generations_ensemble
  - writer@first: generations_round_robin
  - _self_
first: {track_generations: true}
made:
  track_generations: true
  writers: ["${first}", "${first}"]
""",
    )
    assert type(writer) is generations.WriterEnsemble
    assert [type(part) for part in writer._writers] == [generations.RoundRobinWriter] * 2
    assert writer.tracks_generations


def test_an_ensemble_of_buffers_from_yaml(tmp_path):
    ensemble = built(
        tmp_path,
        """
defaults:
  - replay_buffer@made: generations_ensemble
  - replay_buffer@member: generations_tensordict_prioritized
  - _self_
member: {alpha: 1.0, beta: 1.0, track_generations: true}
made:
  rbs: ["${member}", "${member}"]
  p: [0.25, 0.75]
  routing_key: [meta, source]
  batch_size: 4
  track_generations: true
""",
    )
    assert type(ensemble) is generations.ReplayBufferEnsemble
    assert [type(rb) for rb in ensemble._rbs] == [generations.TensorDictPrioritizedReplayBuffer] * 2
    assert ensemble._sampler.p.tolist() == [0.25, 0.75]
    assert ensemble.routing_key == ("meta", "source")


def test_a_remote_buffer_from_yaml(tmp_path):
    rb = built(
        tmp_path,
        """
defaults:
  - replay_buffer@made: generations_remote
  - _self_
made: {priority_key: [agents, td_error], track_generations: true}
""",
    )
    assert type(rb) is generations.RemoteTensorDictReplayBuffer
    assert rb.priority_key == ("agents", "td_error")
    assert rb.writer.tracks_generations


def test_a_buffer_in_a_ray_actor_from_yaml(tmp_path, monkeypatch):
    given = {}
    taken = type("Taken", (), {"__init__": lambda self, **kwargs: given.update(kwargs)})
    monkeypatch.setattr(generations, "RayReplayBuffer", taken)
    built(
        tmp_path,
        """
defaults:
  - replay_buffer@made: generations_ray
  - storage@made.arguments.storage: lazy_tensor
  - _self_
made:
  replay_buffer_cls: torchrl.data.replay_buffers.generations.TensorDictPrioritizedReplayBuffer
  remote_config: {num_cpus: 1}
  arguments:
    storage: {max_size: 8, _partial_: true}
    alpha: 1.0
    beta: 1.0
    track_generations: true
""",
    )
    assert given["replay_buffer_cls"] is generations.TensorDictPrioritizedReplayBuffer
    assert given["remote_config"] == {"num_cpus": 1}
    assert type(given["remote_config"]) is dict  # Ray takes no other mapping
    assert isinstance(given["storage"](), LazyTensorStorage)
    assert (given["alpha"], given["track_generations"]) == (1.0, True)


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(InstantiationException, match=r"floating-point dtype of torch.*'int64'"):
        instantiate(configs.PrioritizedReplayBufferConfig(alpha=1.0, beta=1.0, dtype="int64"))


def test_what_a_call_overrides_may_be_the_object_that_its_name_means():
    config = configs.PrioritizedReplayBufferConfig(alpha=1.0, beta=1.0)
    rb = instantiate(config, storage=LazyTensorStorage(4), dtype=torch.float64)
    assert rb.sampler.dtype is torch.float64


def test_ours_stand_beside_torchrls_in_the_store():
    repo = ConfigStore.instance().repo
    assert {"base.yaml", "tensordict.yaml", "generations_base.yaml"} <= repo["replay_buffer"].keys()
    assert {"round_robin.yaml", "generations_round_robin.yaml"} <= repo["writer"].keys()
    assert repo["replay_buffer"]["base.yaml"].node["_target_"].endswith("buffers.ReplayBuffer")
