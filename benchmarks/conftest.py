"""Collects the ratios of a run; at its end, a table on the terminal and a plot in ``outputs/``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

OUTPUTS = Path(__file__).parent.parent / "outputs"
_rows: list[dict[str, float | str | None]] = []


@pytest.fixture
def record_ratio(request):
    """Call it with the medians in seconds: ours, stock, stock again as the A/A control.

    And, where there is such a thing, stock with its own tracking and a guard written by hand.
    """

    def record(ours: float, stock: float, control: float, tracked: float | None = None) -> None:
        _rows.append(
            {
                "name": request.node.name.removeprefix("test_"),
                "us": ours * 1e6,
                "ratio": ours / stock,
                "control": control / stock,
                "tracked": None if tracked is None else tracked / stock,
            }
        )

    return record


def pytest_terminal_summary(terminalreporter):
    if not _rows:
        return
    terminalreporter.section(
        "medians of alternating rounds in one run, as a ratio to stock TorchRL"
    )
    width = max(len(row["name"]) for row in _rows)
    head = f"{'':{width}}  ours, us   ours   A/A control   TorchRL's own tracking"
    terminalreporter.write_line(head)
    for row in _rows:
        tracked = "" if row["tracked"] is None else f"{row['tracked']:.3f}"
        terminalreporter.write_line(
            f"{row['name']:{width}} {row['us']:9.1f}  {row['ratio']:.3f}  "
            f"{row['control']:.3f}         {tracked}"
        )
    OUTPUTS.mkdir(exist_ok=True)
    (OUTPUTS / "benchmark.json").write_text(json.dumps(_rows, indent=1))
    _plot(OUTPUTS / "benchmark.png")
    terminalreporter.write_line(f"Also in {OUTPUTS}: benchmark.json, benchmark.png")


def _plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = _rows[::-1]
    height = 1 + 0.18 * len(rows)
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    places = range(len(rows))
    axes.axvline(1, color="gray", linewidth=1)
    axes.plot([row["control"] for row in rows], places, "|", color="gray", label="stock, again")
    axes.plot(
        [row["tracked"] for row in rows],
        places,
        "x",
        color="tab:orange",
        label="TorchRL's tracking",
    )
    axes.plot([row["ratio"] for row in rows], places, "o", color="tab:blue", label="this project")
    axes.set_yticks(places, [row["name"] for row in rows], fontsize=7)
    axes.set_xlabel("time per call, as a ratio to TorchRL without tracking")
    axes.set_ylim(-1, len(rows))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1 + 0.6 / height), ncols=3)
    figure.savefig(path, dpi=120)
