"""The main job: late priorities under a concurrent collector, audited by record ids."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torchrl.data.replay_buffers.generations import (
    PriorityUpdateResult,
    TensorDictPrioritizedReplayBuffer,
)

pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

SCRIPT = Path(__file__).parents[2] / "docs/source/tutorials/async_prioritized_dqn.py"
RAY_SCRIPT = SCRIPT.with_name("ray_prioritized_dqn.py")

# 24 steps of 16 frames late, less the one batch of 64 that the collector may be ahead: at least 320
# frames come between a sample and its priorities. They go around 128 slots twice, so that every
# priority but those of the last 24 samples is stale, however the two sides are scheduled.
SHORT = ("--frames", "1000", "--capacity", "128", "--delay", "24")
STEPS = 1 + (1000 - 128) // 16
IN_A_THREAD = (*SHORT, "--collector", "thread")


@pytest.fixture
def tutorial(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, drawing without a display."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    spec = importlib.util.spec_from_file_location("async_prioritized_dqn", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    threads, level = torch.get_num_threads(), logging.getLogger("torchrl").level
    yield module
    module.plt.close("all")
    torch.set_num_threads(threads)
    logging.getLogger("torchrl").setLevel(level)


def check_that_only_the_raw_run_misapplies(printed: str, folder: Path) -> None:
    header, *lines = (line.split() for line in printed.splitlines()[:3])
    assert header == ["run", "sent", "applied", "stale", "misapplied", "final", "return"]
    counts = {name: [int(n.replace(",", "")) for n in numbers] for name, *numbers, _ in lines}
    assert list(counts) == ["raw", "conditional"]

    sent, applied, stale, misapplied = counts["conditional"]
    assert sent == STEPS * 128
    assert stale >= (STEPS - 24) * 128
    assert applied == sent - stale
    assert misapplied == 0

    sent, applied, stale, misapplied = counts["raw"]
    assert sent == applied == STEPS * 128
    assert misapplied == stale >= (STEPS - 24) * 128

    assert (folder / "async_prioritized_dqn.png").stat().st_size > 0


def test_only_the_raw_run_puts_priorities_on_other_records(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, *SHORT, "--collector", "process", "--output", tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    check_that_only_the_raw_run_misapplies(done.stdout, tmp_path)


def test_only_the_raw_run_does_with_a_collector_in_a_thread(
    tutorial: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tutorial.main([*IN_A_THREAD, "--output", str(tmp_path)]) == 0
    check_that_only_the_raw_run_misapplies(capsys.readouterr().out, tmp_path)


def test_exit_status_tells_when_the_conditional_run_misapplies(
    tutorial: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Careless(TensorDictPrioritizedReplayBuffer):
        def update_tensordict_priority_if_present(self, data: Any) -> PriorityUpdateResult:
            self.update_tensordict_priority(data)
            everything = torch.ones(len(data), dtype=torch.bool)
            return PriorityUpdateResult(updated_mask=everything, batch_size=[len(data)])

    monkeypatch.setattr(tutorial, "TensorDictPrioritizedReplayBuffer", Careless)

    assert tutorial.main([*IN_A_THREAD, "--output", str(tmp_path)]) == 1
    assert "are on another record than their own" in capsys.readouterr().err


def test_exit_status_tells_when_a_live_record_is_refused(
    tutorial: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Timid(TensorDictPrioritizedReplayBuffer):
        def update_tensordict_priority_if_present(self, data: Any) -> PriorityUpdateResult:
            nothing = torch.zeros(len(data), dtype=torch.bool)
            return PriorityUpdateResult(updated_mask=nothing, batch_size=[len(data)])

    monkeypatch.setattr(tutorial, "TensorDictPrioritizedReplayBuffer", Timid)

    options = ("--frames", "600", "--capacity", "512", "--delay", "0", "--collector", "thread")
    assert tutorial.main([*options, "--output", str(tmp_path)]) == 1
    assert "live records were not written" in capsys.readouterr().err


def test_an_exception_of_the_collector_reaches_the_learner_and_leaves_no_thread(
    tutorial: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_records = tutorial.Writer._make_records

    def fail_later(self: Any, rollout: Any) -> Any:
        if self._next_id >= 640:
            raise OSError("the simulator is gone")
        return make_records(self, rollout)

    monkeypatch.setattr(tutorial.Writer, "_make_records", fail_later)

    with pytest.raises(RuntimeError, match="collector failed") as raised:
        tutorial.main([*IN_A_THREAD, "--output", str(tmp_path)])
    assert isinstance(raised.value.__cause__, OSError)
    assert not [thread for thread in threading.enumerate() if thread.name == "collector"]


def test_a_collector_process_that_is_killed_is_noticed(
    tutorial: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = tutorial.CollectorSide.start

    def start_and_kill(self: Any) -> None:
        start(self)
        self._side.kill()

    monkeypatch.setattr(tutorial.CollectorSide, "start", start_and_kill)
    with pytest.raises(RuntimeError, match="collector is gone"):
        tutorial.main([*SHORT, "--output", str(tmp_path)])


def test_an_interrupted_learner_stops_the_collector(
    tutorial: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tutorial, "write_priorities", interrupt)

    with pytest.raises(KeyboardInterrupt):
        tutorial.main([*IN_A_THREAD, "--output", str(tmp_path)])
    assert not [thread for thread in threading.enumerate() if thread.name == "collector"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--capacity", "32"), "--capacity must hold one batch of 64 frames, got 32."),
        (("--frames", "100"), "--frames must fill the buffer of 512 slots, got 100."),
        (("--delay", "-1"), "--delay must not be negative, got -1."),
    ],
)
def test_an_impossible_schedule_is_refused(
    tutorial: ModuleType, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as left:
        tutorial.main(options)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_over_ray_too_only_the_raw_run_puts_priorities_on_other_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes into the home folder
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # sockets: a short path
        monkeypatch.setenv("RAY_TMPDIR", folder)
        done = subprocess.run(
            [sys.executable, RAY_SCRIPT, "--steps", "40", "--output", tmp_path],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    assert done.returncode == 0, done.stderr
    header, *lines = (line.split() for line in done.stdout.splitlines()[-3:])
    assert header == ["run", "frames", "sent", "stale", "misapplied"]
    counts = {name: [int(n.replace(",", "")) for n in numbers] for name, *numbers in lines}
    assert counts["raw"][1] == counts["conditional"][1] == (40 - 10) * 128
    assert counts["raw"][2] == counts["raw"][3] > 0
    assert counts["conditional"][2] > 0
    assert counts["conditional"][3] == 0
    assert (tmp_path / "ray_prioritized_dqn.png").stat().st_size > 0
