"""A script runs unchanged under the launcher, and in its children too."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import pytest
import torch
import torchrl.data
from common import PER, ids
from torchrl.data import (
    HERReplayBuffer,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
)
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import generations
from torchrl.data.replay_buffers.generations import __main__ as launcher
from torchrl.data.replay_buffers.generations.launch import launch
from torchrl.data.replay_buffers.generations.launch.launch import StandIns

SCRIPTS = Path(__file__).parent / "scripts"
LAUNCHER = ("-m", "torchrl.data.replay_buffers.generations")


class Run(NamedTuple):
    code: int
    value: dict
    errors: list[str]


def start(*command: str | Path, **kwargs) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, command)], **pipes, **kwargs)


def end(process: subprocess.Popen) -> Run:
    """Its exit status, the JSON of its last line, and its stderr; TorchRL logs to stdout too."""
    out, err = process.communicate(timeout=110)
    assert out, err
    return Run(process.returncode, json.loads(out.splitlines()[-1]), err.splitlines())


# ---------------------------------------------------------------------- documented scripts


@pytest.mark.parametrize(
    ("script", "arguments", "last_line"),
    [
        (
            "parts_of_a_buffer.py",
            (),
            "generations: guarded 1 TensorDictPrioritizedReplayBuffer; 0 of 640 priorities were "
            "stale; not guarded: 1 PrioritizedReplayBuffer; calls that wrote priorities by slot, "
            "unchecked: 2",
        ),
        (
            "collect_and_store.py",
            ("--frames", "300"),
            "generations: guarded 1 TensorDictReplayBuffer; 0 of 192 priorities were stale",
        ),
        (
            "written_by_a_process.py",
            (),
            "generations: guarded 1 TensorDictPrioritizedReplayBuffer; 0 of 160 priorities were "
            "stale",
        ),
    ],
    ids=["parts", "collected", "processes"],
)
def test_a_script_gives_the_same_values_alone_and_launched(script, arguments, last_line):
    alone = start(SCRIPTS / script, *arguments)
    launched = start(*LAUNCHER, SCRIPTS / script, *arguments)
    alone, launched = end(alone), end(launched)
    assert alone.code == launched.code == 0, launched.errors
    assert alone.value == launched.value
    assert launched.errors[-1] == last_line


# ---------------------------------------------------------------------- what a script sees

A_SCRIPT = '''
"""Says what its names mean, and brings some priorities late, in three processes."""

import json
import multiprocessing
import os
import sys

import hydra
import torch
import torchrl.data
from beside import HERE
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer, LazyTensorStorage, ReplayBuffer, RoundRobinWriter
from torchrl.data import TensorDictPrioritizedReplayBuffer as Buffer


torch.set_num_threads(1)  # a forked child can't use the threads that its parent had


class Mine(Buffer):
    pass


def bring_late(overwritten, rb=None):
    if rb is None:
        rb = Mine(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), batch_size=8)
    rb.extend(TensorDict({"id": torch.arange(8)}, [8]))
    sample = rb.sample()
    rb.extend(TensorDict({"id": torch.arange(overwritten)}, [overwritten]))
    sample["index"] = torch.arange(8)
    sample["index_generation"] = torch.zeros(8, dtype=torch.int64)
    sample["td_error"] = torch.ones(8)
    rb.update_tensordict_priority(sample)


def die():
    os._exit(1)


if __name__ == "__main__":
    target = {
        "_target_": "torchrl.data.replay_buffers.TensorDictPrioritizedReplayBuffer",
        "alpha": 1.0,
        "beta": 1.0,
        "batch_size": 8,
        "storage": {"_target_": "torchrl.data.LazyTensorStorage", "max_size": 8},
        "writer": {
            "_target_": "torchrl.data.replay_buffers.TensorDictRoundRobinWriter",
            "track_generations": False,  # which TorchRL's configuration always says
        },
    }
    by_hydra = hydra.utils.instantiate(target)
    bring_late(1, by_hydra)
    for method, overwritten in (("fork", 2), ("spawn", 4)):
        process = multiprocessing.get_context(method).Process(
            target=bring_late, args=(overwritten,)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join()
    her = HERReplayBuffer(lambda sample: 0, storage=LazyTensorStorage(4))
    print(
        json.dumps(
            {
                "argv": sys.argv,
                "beside": HERE,
                "file": __file__,
                "tracks": by_hydra.writer.tracks_generations,
                "module": type(by_hydra).__mro__[2].__module__,
                "torchrl's is an instance": isinstance(her, ReplayBuffer),
                "and ours": [isinstance(by_hydra, cls) for cls in (ReplayBuffer, Buffer)],
                "and of a subclass": isinstance(by_hydra, Mine),
                "writer": isinstance(RoundRobinWriter(), RoundRobinWriter),
            }
        )
    )
    sys.exit(3)
'''


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    (folder / "script.py").write_text(A_SCRIPT)
    (folder / "beside.py").write_text("HERE = 'a module beside the script'\n")
    (folder / "elsewhere").mkdir()
    process = start(*LAUNCHER, "../script.py", "--flag", "word", cwd=folder / "elsewhere")
    return folder, end(process)


def test_a_launched_script_has_its_arguments_and_its_folder(launched):
    folder, run = launched
    script = str(folder / "elsewhere" / ".." / "script.py")
    assert run.value["argv"] == [script, "--flag", "word"]
    assert run.value["file"] == script
    assert run.value["beside"] == "a module beside the script"


def test_hydra_targets_mean_ours_with_tracking_on(launched):
    _, run = launched
    assert run.value["tracks"] is True
    assert run.value["module"] == "torchrl.data.replay_buffers.generations.buffers.classes"


def test_instances_are_what_they_were_before(launched):
    _, run = launched
    assert run.value["torchrl's is an instance"] is True
    assert run.value["and ours"] == [True, True]
    assert run.value["and of a subclass"] is False
    assert run.value["writer"] is True


def test_the_last_line_sums_up_the_children_too_and_says_who_is_missing(launched):
    _, run = launched
    assert run.code == 3
    assert run.errors[-1] == (
        "generations: guarded 2 Mine, 1 TensorDictPrioritizedReplayBuffer; 7 of 24 priorities were "
        "stale; children that ended without a report: 1"
    )


def test_a_script_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generations", "nowhere.py"])
    with pytest.raises(SystemExit) as exited:
        launcher.main()
    assert exited.value.code == 2
    assert "SCRIPT must be a file: got nowhere.py" in capsys.readouterr().err


# ---------------------------------------------------------------------- stand-ins


def test_an_import_changes_no_name():
    assert torchrl.data.ReplayBuffer is torchrl_buffers.ReplayBuffer
    assert torchrl.data.ReplayBuffer.__module__ == "torchrl.data.replay_buffers.replay_buffers"


def test_every_writer_and_buffer_of_ours_that_torchrl_has_by_name_has_a_stand_in():
    ours = {
        name
        for name in generations.__all__
        if issubclass(getattr(generations, name), getattr(torchrl.data, name, type(None)))
    }
    assert {made.__name__ for made in launch._STAND_INS} == ours


@pytest.fixture
def report(monkeypatch):
    fresh = launch.Report()
    monkeypatch.setattr(launch, "report", fresh)
    return fresh


def td_stand_in(**kwargs):
    kwargs.setdefault("storage", LazyTensorStorage(8))
    rb = StandIns.TensorDictPrioritizedReplayBuffer(**PER, batch_size=8, **kwargs)
    rb.extend(ids(range(8)))
    return rb


def bring_late(rb):
    sample = rb.sample()
    rb.extend(ids(range(8)))
    return rb.update_tensordict_priority(sample.set("td_error", torch.ones(8)))


def test_a_stand_in_tracks_and_guards(report):
    rb = td_stand_in()
    assert bring_late(rb).num_stale == 8
    assert report.as_dict() == {
        "guarded": {"TensorDictPrioritizedReplayBuffer": 1},
        "unguarded": {},
        "unchecked": 0,
        "applied": 0,
        "stale": 8,
    }


def test_the_counts_of_a_buffer_outlive_it(report):
    bring_late(td_stand_in())
    bring_late(td_stand_in())
    assert report.as_dict()["stale"] == 16


def test_copies_and_pickles_of_a_stand_in_are_stand_ins_that_count(report):
    rb = td_stand_in()
    for copied in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert type(copied) is StandIns.TensorDictPrioritizedReplayBuffer
        assert bring_late(copied).num_stale == 8
    assert report.as_dict()["stale"] == 16
    assert report.as_dict()["guarded"] == {"TensorDictPrioritizedReplayBuffer": 1}


def test_a_scripts_subclass_can_be_sent_by_cloudpickle(report):
    class Mine(StandIns.TensorDictPrioritizedReplayBuffer):
        pass

    child = (
        "import sys, cloudpickle; from torchrl.data import LazyTensorStorage\n"
        "Mine = cloudpickle.load(sys.stdin.buffer)\n"
        "rb = Mine(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4))\n"
        "sys.exit(0 if rb.writer.tracks_generations else 1)"
    )
    sent = subprocess.run([sys.executable, "-c", child], input=cloudpickle.dumps(Mine), check=False)
    assert sent.returncode == 0


def test_priorities_written_by_slot_are_counted_as_unchecked(report):
    rb = StandIns.PrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(8))
    index = rb.extend(torch.arange(8))
    rb.update_priority(index, 2.0)
    assert report.as_dict()["unchecked"] == 1
    assert report.as_dict()["unguarded"] == {"PrioritizedReplayBuffer": 1}
    # Those that records carry are of no other record.
    td_stand_in().extend(ids(range(8), td_error=torch.ones(8)))
    assert report.as_dict()["unchecked"] == 1


def test_a_buffer_without_priorities_is_neither_guarded_nor_not(report):
    rb = StandIns.TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=RandomSampler())
    assert rb.writer.tracks_generations
    assert report.as_dict()["guarded"] == report.as_dict()["unguarded"] == {}


def test_a_writer_without_stamps_stays_without(report):
    rb = StandIns.TensorDictReplayBuffer(
        storage=LazyTensorStorage(8), writer=ImmutableDatasetWriter(), batch_size=8
    )
    assert not rb.writer.tracks_generations
    rb = StandIns.ReplayBuffer(storage=LazyTensorStorage(8), writer=ImmutableDatasetWriter)
    assert not rb.writer.tracks_generations


@pytest.mark.parametrize("given", [False, True])
def test_parts_that_cannot_be_tracked_work_as_torchrls_do(given, report):
    writer = {"writer": StandIns.TensorDictRoundRobinWriter()} if given else {}
    rb = StandIns.TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PrioritizedSampler(4, **PER),  # too few leaves for 8 slots
        batch_size=4,
        **writer,
    )
    assert not rb.writer.tracks_generations
    rb.extend(ids(range(4)))
    sample = rb.sample()
    assert rb.update_tensordict_priority(sample.set("td_error", torch.ones(4))) is None
    assert report.as_dict()["unguarded"] == {"TensorDictReplayBuffer": 1}
    assert report.as_dict()["unchecked"] == 1


def test_a_script_that_asks_for_tracking_itself_is_told_that_it_cannot_be():
    with pytest.raises(ValueError, match="a leaf for every slot"):
        StandIns.TensorDictReplayBuffer(
            storage=LazyTensorStorage(8),
            sampler=PrioritizedSampler(4, **PER),
            writer=StandIns.TensorDictRoundRobinWriter(track_generations=True),
        )


def test_a_writers_stand_in_builds_ours_and_tracks_whatever_a_default_says():
    for name in ("RoundRobinWriter", "TensorDictRoundRobinWriter", "TensorDictMaxValueWriter"):
        for given in ({}, {"track_generations": False}):  # as Hydra does
            made = getattr(StandIns, name)(**given)
            assert type(made) is getattr(generations, name)
            assert made.tracks_generations
            assert isinstance(made, getattr(StandIns, name))
        assert isinstance(getattr(torchrl.data, name)(), getattr(StandIns, name))


def test_a_scripts_own_writer_tracks_by_default():
    class Mine(StandIns.RoundRobinWriter):
        pass

    rb = StandIns.ReplayBuffer(storage=LazyTensorStorage(4), writer=Mine())
    _, generation = rb.extend(torch.arange(4), return_generation=True)
    assert generation.tolist() == [0] * 4
    assert Mine(track_generations=False).tracks_generations


def test_torchrls_classes_are_none_of_ours_because_of_a_stand_in():
    # An abstract class asks its subclasses, of which the stand-in is one.
    assert not issubclass(torchrl_buffers.RoundRobinWriter, generations.RoundRobinWriter)
    assert not isinstance(torchrl_buffers.RoundRobinWriter(), generations.RoundRobinWriter)


def test_an_ensemble_with_a_member_of_torchrls_is_torchrls():
    def member(cls, *args):
        return cls(*args, storage=LazyTensorStorage(4))

    ours = StandIns.ReplayBufferEnsemble(*(member(StandIns.TensorDictReplayBuffer),) * 2)
    assert type(ours) is generations.ReplayBufferEnsemble
    assert ours.writer.tracks_generations
    her = member(HERReplayBuffer, lambda sample: 0)
    mixed = StandIns.ReplayBufferEnsemble(member(StandIns.TensorDictReplayBuffer), her)
    assert type(mixed) is torchrl_buffers.ReplayBufferEnsemble
    assert isinstance(mixed, StandIns.ReplayBufferEnsemble)


def test_a_summary_says_when_nothing_was_guarded():
    nothing = launch.Report().as_dict()
    assert launch.summary([nothing], 0) == (
        "generations: guarded nothing; 0 of 0 priorities were stale"
    )
