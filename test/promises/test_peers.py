"""The comparison with other replay buffers counts what it says it counts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_peers.py"


@pytest.fixture
def peers(monkeypatch):
    spec = importlib.util.spec_from_file_location("compare_peers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_peers", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CAPACITY", 2048)
    monkeypatch.setattr(module, "WRITTEN_BETWEEN", 256)
    monkeypatch.setattr(module, "DRAWS", 100)
    return module


@pytest.mark.parametrize("in_flight", [1, 4])
def test_ours_and_torchrl_differ_in_what_lands_on_a_wrong_record(peers, in_flight):
    ours, stock, guarded = (
        peers.late_priorities(make(), in_flight)
        for make in (peers.Ours, peers.TorchRL, peers.GuardedTorchRL)
    )
    assert ours["wrong"] == ours["dropped"] == 0
    assert ours["stale"] > 10
    assert ours["caller_learns"]
    assert stock["wrong"] > 10
    assert not stock["caller_learns"]
    assert (guarded["wrong"], guarded["caller_learns"]) == (0, True)


def test_priorities_that_are_dropped_are_counted(peers):
    class Forgetful(peers.Ours):
        def update(self, handle, priority):
            mask = super().update(handle[::2], priority[::2])
            return mask.repeat(2)

    found = peers.late_priorities(Forgetful(), 2)
    assert found["dropped"] > 50
    assert not found["caller_learns"]


def test_a_peer_that_is_not_installed_is_a_line_that_says_so(peers, monkeypatch):
    monkeypatch.setattr(peers.Flashbax, "needs", "no_such_module")
    line = peers.row(peers.run("flashbax"))
    assert line.split(None, 1) == ["flashbax", "not measured: no_such_module is not installed"]
