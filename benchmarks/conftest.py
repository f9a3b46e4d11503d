"""Collects the ratios of a run and prints them as one table at its end."""

from __future__ import annotations

import pytest

_ratios: list[tuple[str, float, float, float]] = []


@pytest.fixture
def record_ratio(request):
    """Call it with the medians in seconds: ours, stock, and stock again as the A/A control."""

    def record(ours: float, stock: float, control: float) -> None:
        _ratios.append((request.node.name, ours * 1e6, ours / stock, control / stock))

    return record


def pytest_terminal_summary(terminalreporter):
    if not _ratios:
        return
    terminalreporter.section("ours / stock TorchRL, medians of alternating rounds in one run")
    width = max(len(name) for name, *_ in _ratios)
    terminalreporter.write_line(f"{'':{width}}  ours, us   ratio   A/A control")
    for name, micros, ratio, control in _ratios:
        terminalreporter.write_line(f"{name:{width}} {micros:9.1f}   {ratio:.3f}   {control:.3f}")
