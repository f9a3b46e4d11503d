"""The README's first screen does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from common import readme_example
from torchrl.data.replay_buffers import generations

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
REFERENCE = (ROOT / "docs/source/reference/data_replaybuffers.rst").read_text()
QUICK_START = readme_example("num_stale")


def test_quick_start_has_at_most_twenty_lines():
    assert len(QUICK_START.splitlines()) <= 20


def test_quick_start_updates_the_records_still_there_and_no_other(tmp_path):
    script = tmp_path / "quick_start.py"
    script.write_text(f'{QUICK_START}\nprint(int((sample["index"] >= 500).sum()))\n')

    run = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr
    printed = run.stdout.splitlines()[-2:]  # TorchRL logs to stdout too
    num_updated, num_stale, num_still_there = map(int, " ".join(printed).split())
    assert num_updated == num_still_there
    assert num_stale == 32 - num_still_there


COLLECTING = """
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyMemmapStorage
from torchrl.data.replay_buffers.generations import TensorDictPrioritizedReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import RandomPolicy


def make_env():
    return GymEnv("CartPole-v1")


if __name__ == "__main__":
    import time

    policy = RandomPolicy(make_env().action_spec)
{}
    while rb.write_count < 256:
        time.sleep(0.01)
    sample = rb.sample()
    sample["td_error"] = sample["next", "reward"]
    assert rb.update_tensordict_priority_if_present(sample).num_updated > 0
    collector.shutdown()
"""


def test_collectors_in_other_processes_fill_the_buffer_of_the_example(tmp_path):
    script = tmp_path / "collecting.py"
    example = textwrap.indent(readme_example("MultiAsyncCollector"), "    ")
    script.write_text(COLLECTING.format(example))

    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr


def test_every_example_is_run_by_a_test():
    run_in = {
        "num_stale": "docs/test_readme.py",
        "MultiAsyncCollector": "docs/test_readme.py",
        'service_backend="ray"': "remote/test_remote.py",
        "DQNTrainer": "training/test_trainers.py",
    }
    assert len(re.findall("^```python$", README, re.MULTILINE)) == len(run_in)
    for marker, file in run_in.items():
        assert readme_example(marker)
        assert "readme_example(" in (ROOT / "test" / file).read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_make_commands_exist(page):
    named = set(re.findall(r"^\s*make ([\w-]+)", (ROOT / page).read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    assert {"test"} <= named <= targets


def test_demo_script_exists():
    (script,) = re.findall(r"^demo:.*\n\t\S+ (\S+)", MAKEFILE, re.MULTILINE)
    assert (ROOT / script).is_file()


@pytest.mark.parametrize("name", generations.__all__)
def test_readme_and_reference_page_name_every_public_name(name):
    assert f"`{name}`" in README
    assert re.search(rf"^    {name}$", REFERENCE, re.MULTILINE)
