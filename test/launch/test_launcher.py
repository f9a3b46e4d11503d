"""A script runs unchanged under the launcher, and in its children too."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import pytest
import torch
import torchrl.data
from common import PER, ids, leaves
from launched import installed
from torchrl.data import (
    HERReplayBuffer,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
)
from torchrl.data import replay_buffers as torchrl_buffers
from torchrl.data.replay_buffers import generations
from torchrl.data.replay_buffers.generations import __main__ as launcher
from torchrl.data.replay_buffers.generations.launch import names
from torchrl.data.replay_buffers.generations.launch.report import Report, summary

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
                "module": type(by_hydra).__module__,
                "relation": issubclass(Buffer, ReplayBuffer),
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
    for name in ("elsewhere", "tmp"):
        (folder / name).mkdir()
    process = start(
        *(*LAUNCHER, "../script.py", "--flag", "word"),
        cwd=folder / "elsewhere",
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
    )
    return folder, end(process)


def test_a_launched_script_has_its_arguments_and_its_folder(launched):
    folder, run = launched
    assert run.value["argv"] == ["../script.py", "--flag", "word"]
    assert run.value["file"] == str(folder / "elsewhere" / ".." / "script.py")
    assert run.value["beside"] == "a module beside the script"


def test_hydra_targets_mean_ours_with_tracking_on(launched):
    _, run = launched
    assert run.value["tracks"] is True
    assert run.value["module"] == "torchrl.data.replay_buffers.generations.buffers.classes"
    assert run.value["relation"] is True


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
        "stale; children that ended without a report: 1; the run failed"
    )
    assert run.errors[-2] == ""  # it begins on a line of its own


def test_no_report_stays_in_the_temporary_folder_whatever_became_of_a_child(launched):
    folder, _ = launched
    assert list((folder / "tmp").glob("torchrl_generations_*")) == []


A_MODULE = """
import json, multiprocessing, sys
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from . import parts
from .parts import Mine, bring_late


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=bring_late)
    process.start()
    process.join()
    assert process.exitcode == 0
    module = Mine.__mro__[1].__module__
    print(json.dumps({"argv": sys.argv, "package": __package__, "name": module}))
"""
ITS_PARTS = """
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer


class Mine(TensorDictPrioritizedReplayBuffer):
    pass


def bring_late():
    rb = Mine(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), batch_size=8)
    rb.extend(TensorDict({"id": torch.arange(8)}, [8]))
    sample = rb.sample()
    rb.extend(TensorDict({"id": torch.arange(8)}, [8]))
    rb.update_tensordict_priority(sample.set("td_error", torch.ones(8)))
"""


@pytest.mark.parametrize("name", ["package.module", "package"])
def test_a_module_of_a_package_is_run_as_python_does_in_its_children_too(name, tmp_path):
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / ("__main__.py" if name == "package" else "module.py")
    # The package itself imports a name that must mean ours by then.
    (tmp_path / "package" / "__init__.py").write_text("from .parts import Mine\n")
    (tmp_path / "package" / "parts.py").write_text(ITS_PARTS)
    file.write_text(A_MODULE)
    run = end(start(*LAUNCHER, "-m", name, "--flag", "-m", cwd=tmp_path))
    assert run.code == 0, run.errors
    assert run.value["argv"] == [str(file), "--flag", "-m"]
    assert run.value["package"] == "package"
    assert run.value["name"] == "torchrl.data.replay_buffers.generations.buffers.classes"
    assert run.errors[-1] == "generations: guarded 1 Mine; 8 of 8 priorities were stale"


def test_a_module_that_is_none_is_an_error_of_the_run(tmp_path):
    process = start(*LAUNCHER, "-m", "nowhere.at.all", cwd=tmp_path)
    _, errors = process.communicate(timeout=110)
    assert process.returncode == 1
    assert "No module named 'nowhere'" in errors
    assert errors.splitlines()[-1] == (
        "generations: no prioritized buffer was built; the run failed"
    )


def test_a_script_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generations", "nowhere.py"])
    with pytest.raises(SystemExit) as exited:
        launcher.main()
    assert exited.value.code == 2
    assert "SCRIPT must be a file: got nowhere.py" in capsys.readouterr().err


# ---------------------------------------------------------------------- the names

NAMED = "TensorDictPrioritizedReplayBuffer"


def test_an_import_changes_no_name():
    assert torchrl.data.ReplayBuffer is torchrl_buffers.ReplayBuffer
    assert torchrl.data.ReplayBuffer.__module__ == "torchrl.data.replay_buffers.replay_buffers"
    assert names.GuardedBuffer not in generations.ReplayBuffer.__mro__


def test_every_writer_and_buffer_of_ours_that_torchrl_has_by_name_is_installed():
    ours = {
        name
        for name in generations.__all__
        if issubclass(getattr(generations, name), getattr(torchrl.data, name, type(None)))
    }
    assert {cls.__name__ for cls in (*names.BUFFERS, *names.WRITERS)} == ours


@pytest.fixture
def report(monkeypatch):
    """The report of this process while the names are installed."""
    fresh = Report()
    monkeypatch.setattr(names, "REPORT", fresh)
    with installed():
        yield fresh


def buffer(**kwargs):
    kwargs.setdefault("storage", LazyTensorStorage(8))
    rb = torchrl.data.TensorDictPrioritizedReplayBuffer(**PER, batch_size=8, **kwargs)
    rb.extend(ids(range(8)))
    return rb


def bring_late(rb):
    sample = rb.sample()
    rb.extend(ids(range(8)))
    return rb.update_tensordict_priority(sample.set("td_error", torch.ones(8)))


def test_the_names_mean_our_classes_which_track_and_guard(report):
    rb = buffer()
    assert type(rb) is generations.TensorDictPrioritizedReplayBuffer
    assert bring_late(rb).num_stale == 8
    assert report.as_dict() == {
        "guarded": {NAMED: 1},
        "unguarded": {},
        "unchecked": 0,
        "applied": 0,
        "stale": 8,
    }


def test_the_names_stand_to_each_other_and_look_as_before(report):
    for name in (cls.__name__ for cls in names.BUFFERS):
        before, now = getattr(names.TORCHRLS, name), getattr(torchrl.data, name)
        assert issubclass(now, before)
        assert inspect.signature(now) == inspect.signature(before)
        assert issubclass(now, torchrl.data.ReplayBuffer)
    with pytest.raises(TypeError, match=r"^((?!Guarded).)*'sizes'"):
        torchrl.data.TensorDictReplayBuffer(sizes=3)


def test_what_torchrl_builds_is_an_instance_of_the_names(report):
    her = HERReplayBuffer(lambda sample: 0, storage=LazyTensorStorage(4))
    assert isinstance(her, torchrl.data.TensorDictReplayBuffer)
    assert not isinstance(her, torchrl.data.PrioritizedReplayBuffer)
    assert not isinstance(her, generations.ConditionalPriorityUpdates)


def test_this_package_goes_on_to_mean_torchrls_classes(report):
    assert torchrl_buffers.RoundRobinWriter is generations.RoundRobinWriter
    writer = names.TORCHRLS.RoundRobinWriter(track_generations=True)
    with pytest.raises(ValueError, match="got TorchRL's RoundRobinWriter, which stamps after"):
        generations.ReplayBuffer(storage=LazyTensorStorage(4), writer=writer)
    assert not isinstance(writer, torchrl_buffers.RoundRobinWriter)


def test_the_counts_of_a_buffer_outlive_it(report):
    bring_late(buffer())
    bring_late(buffer())
    assert report.as_dict()["stale"] == 16


def test_copies_and_pickles_of_a_buffer_count(report):
    rb = buffer()
    for copied in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert bring_late(copied).num_stale == 8
    assert report.as_dict()["stale"] == 16
    assert report.as_dict()["guarded"] == {NAMED: 1}


def test_a_buffer_behind_rpc_counts_as_any_other(report):
    class Mine(torchrl.data.RemoteTensorDictReplayBuffer):
        pass

    rb = Mine(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, **PER), batch_size=8)
    rb.extend(ids(range(8), td_error=torch.ones(8)))
    assert bring_late(rb).num_stale == 8
    rb.update_priority(torch.arange(8), torch.ones(8))
    assert report.as_dict()["guarded"] == {"Mine": 1}
    assert report.as_dict()["unchecked"] == 1


def test_a_scripts_subclass_can_be_sent_by_cloudpickle(report):
    class Mine(torchrl.data.TensorDictPrioritizedReplayBuffer):
        pass

    child = (
        "import sys, cloudpickle\n"
        "from torchrl.data import LazyTensorStorage, ReplayBuffer\n"
        "Mine = cloudpickle.load(sys.stdin.buffer)\n"
        "rb = Mine(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4))\n"
        "assert isinstance(rb, ReplayBuffer)\n"
    )
    sent = subprocess.run([sys.executable, "-c", child], input=cloudpickle.dumps(Mine), check=False)
    assert sent.returncode == 0


def test_priorities_written_by_slot_are_counted_as_unchecked(report):
    rb = torchrl.data.PrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(8))
    index = rb.extend(torch.arange(8))
    rb.update_priority(index, 2.0)
    assert report.as_dict()["unchecked"] == 1
    assert report.as_dict()["unguarded"] == {"PrioritizedReplayBuffer": 1}
    # Those that records carry are of no other record, whether the buffer is tracked or not.
    buffer().extend(ids(range(8), td_error=torch.ones(8)))
    assert report.as_dict()["unchecked"] == 1


@pytest.mark.parametrize("priority", [-1.0, float("nan"), 0.0])
@pytest.mark.parametrize("sync", [True, False])
def test_priorities_that_we_refuse_do_what_they_do_in_torchrls_buffer(priority, sync, report):
    def outcome(cls):
        rb = cls(**PER, storage=LazyTensorStorage(8), batch_size=8, sync=sync)
        rb.extend(ids(range(8)))
        sample = rb.sample()
        sample["index"] = torch.arange(8)
        if cls is generations.TensorDictPrioritizedReplayBuffer:
            sample["index_generation"] = torch.zeros(8, dtype=torch.int64)
        sample["td_error"] = torch.full([8], 2.0)
        sample["td_error"][3] = priority
        try:
            assert rb.update_tensordict_priority(sample) is None
        except Exception as error:
            return type(error), str(error)
        return str(rb.prioritized_sampler._sum_tree[torch.arange(8)])

    ours = outcome(torchrl.data.TensorDictPrioritizedReplayBuffer)
    assert report.as_dict()["unchecked"] == 1
    assert ours == outcome(names.TORCHRLS.TensorDictPrioritizedReplayBuffer)


def test_a_sample_without_stamps_is_updated_by_slot_and_counted(report):
    rb = buffer()
    sample = rb.sample().exclude("index_generation")
    assert rb.update_tensordict_priority(sample.set("td_error", torch.full([8], 5.0))) is None
    assert leaves(rb)[int(sample["index"][0])] == 5.0
    assert report.as_dict()["unchecked"] == 1


def test_a_buffer_without_priorities_is_left_alone(report):
    rb = torchrl.data.TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=8)
    rb.extend(ids(range(8)))
    assert rb.sample().get("index_generation", None) is None
    rb = torchrl.data.PrioritizedReplayBuffer(**PER, storage=LazyTensorStorage(8), batch_size=8)
    rb.extend(torch.arange(8))
    assert "index_generation" not in rb.sample(return_info=True)[1]
    assert report.as_dict()["guarded"] == {}


@pytest.mark.parametrize("guarded_first", [True, False])
@pytest.mark.parametrize("is_td", [True, False])
def test_a_buffer_without_priorities_makes_the_handles_of_a_guarded_one_stale(
    guarded_first, is_td, report
):
    cls = torchrl.data.TensorDictReplayBuffer if is_td else torchrl.data.ReplayBuffer
    storage = LazyTensorStorage(8)
    if guarded_first:
        rb, other = buffer(storage=storage), cls(storage=storage, batch_size=8)
    else:
        other, rb = cls(storage=storage, batch_size=8), buffer(storage=storage)
    sample = rb.sample().set("td_error", torch.ones(8))
    other.extend(ids(range(8)))
    assert rb.update_tensordict_priority(sample).num_stale == 8


def test_a_writer_without_stamps_stays_without(report):
    for writer in (ImmutableDatasetWriter(), ImmutableDatasetWriter):
        rb = torchrl.data.TensorDictReplayBuffer(
            storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, **PER), writer=writer
        )
        assert not rb.writer.tracks_generations
    assert report.as_dict()["unguarded"] == {"TensorDictReplayBuffer": 2}


@pytest.mark.parametrize("given", [False, True])
def test_parts_that_cannot_be_tracked_work_as_torchrls_do(given, report):
    writer = {"writer": torchrl.data.TensorDictRoundRobinWriter()} if given else {}
    rb = torchrl.data.TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PrioritizedSampler(4, **PER),  # too few leaves for 8 slots
        batch_size=4,
        **writer,
    )
    assert not rb.writer.tracks_generations
    rb.extend(ids(range(4), td_error=torch.ones(4)))
    sample = rb.sample()
    assert rb.update_tensordict_priority(sample.set("td_error", torch.ones(4))) is None
    assert report.as_dict()["unguarded"] == {"TensorDictReplayBuffer": 1}
    assert report.as_dict()["unchecked"] == 1


def test_a_script_that_asks_for_tracking_itself_is_told_that_it_cannot_be(report):
    with pytest.raises(ValueError, match="a leaf for every slot"):
        torchrl.data.TensorDictReplayBuffer(
            storage=LazyTensorStorage(8),
            sampler=PrioritizedSampler(4, **PER),
            writer=torchrl.data.TensorDictRoundRobinWriter(track_generations=True),
        )


def test_a_writer_that_the_script_made_tracks_in_a_guarded_buffer(report):
    class Mine(torchrl.data.TensorDictRoundRobinWriter):
        pass

    ranks = generations.TensorDictMaxValueWriter(rank_key="id")
    for writer in (Mine(), Mine, Mine(track_generations=False), ranks):
        rb = buffer(writer=writer)
        assert rb.writer.tracks_generations
    assert report.as_dict()["guarded"] == {NAMED: 4}


def test_torchrls_writers_are_none_of_ours_because_of_a_name(report):
    assert not issubclass(names.TORCHRLS.RoundRobinWriter, generations.RoundRobinWriter)
    assert not isinstance(names.TORCHRLS.RoundRobinWriter(), generations.RoundRobinWriter)


def test_an_ensemble_of_what_ours_does_not_take_is_torchrls(report):
    def member(cls, *args):
        return cls(*args, storage=LazyTensorStorage(8))

    rb = torchrl.data.TensorDictReplayBuffer
    ours = torchrl.data.ReplayBufferEnsemble(member(rb), member(rb))
    assert type(ours) is generations.ReplayBufferEnsemble
    her = member(HERReplayBuffer, lambda sample: 0)
    wide = torchrl.data.TensorDictReplayBuffer(
        storage=LazyTensorStorage(8, ndim=2), sampler=PrioritizedSampler(8, **PER)
    )
    for odd in (her, wide):
        mixed = torchrl.data.ReplayBufferEnsemble(member(rb), odd)
        assert type(mixed) is names.TORCHRLS.ReplayBufferEnsemble
        assert isinstance(mixed, torchrl.data.ReplayBufferEnsemble)


def one(kind="guarded", **counts):
    return Report().as_dict() | {kind: {NAMED: 1}} | counts


@pytest.mark.parametrize(
    ("reports", "line"),
    [
        ([Report().as_dict()], "no prioritized buffer was built"),
        ([one()], f"guarded 1 {NAMED}; checked nothing"),
        (
            [one("unguarded", unchecked=47)],
            f"checked nothing; not guarded: 1 {NAMED}; calls that wrote priorities by slot, "
            "unchecked: 47",
        ),
        (
            [one(applied=1, stale=1_000), one(stale=1, unchecked=2)],
            f"guarded 2 {NAMED}; 1,001 of 1,002 priorities were stale; calls that wrote priorities "
            "by slot, unchecked: 2",
        ),
    ],
)
def test_the_last_line_is_no_all_clear_where_nothing_was_checked(reports, line):
    assert summary(reports) == f"generations: {line}"
    assert summary(reports, failed=True) == f"generations: {line}; the run failed"
