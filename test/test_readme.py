"""The README's first screen does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchrl.data.replay_buffers import generations

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
REFERENCE = (ROOT / "docs/source/reference/data_replaybuffers.rst").read_text()
QUICK_START = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[0]


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
