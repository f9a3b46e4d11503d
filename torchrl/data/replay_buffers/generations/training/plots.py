"""A figure of what became of the priorities of a training run. Needs matplotlib."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure

from .hooks import LOGGED


def plot_priority_updates(folder: str | Path) -> Figure:
    """Plots what :class:`.LogPriorityUpdates` wrote with TorchRL's :class:`CSVLogger`.

    Args:
        folder (str or Path): the logger's ``experiment.log_dir``.

    Returns:
        Figure: applied and stale priorities over the frames collected, and below them the stale
        share of each stretch between two entries.

    Raises:
        FileNotFoundError: if the folder has no log of priority updates.

    Examples:
        >>> import tempfile
        >>> from torchrl.record.loggers.csv import CSVLogger
        >>> logger = CSVLogger("run", log_dir=tempfile.mkdtemp())
        >>> for frames, applied, stale in ((0, 0, 0), (100, 32, 0), (200, 48, 16)):
        ...     logger.log_scalar("updates_applied", applied, step=frames)
        ...     logger.log_scalar("updates_stale", stale, step=frames)
        >>> figure = plot_priority_updates(logger.experiment.log_dir)
        >>> counts, share = figure.axes
        >>> share.lines[0].get_xydata().tolist()
        [[100.0, 0.0], [200.0, 0.5]]
    """
    folder = Path(folder)
    applied, stale = (_read(folder, name) for name in LOGGED[:2])
    figure = Figure(figsize=(8, 6), layout="constrained")
    counts, share = figure.subplots(2, 1, sharex=True)
    for label, values in (("applied", applied), ("stale", stale)):
        counts.plot(list(values), list(values.values()), label=label)
    counts.set_ylabel("priorities since the reset")
    counts.legend(loc="upper left")

    frames = sorted(applied.keys() & stale.keys())
    shares = {}
    for before, after in pairwise(frames):
        # A count that fell has begun at zero again.
        steps = [
            values[after] - (values[before] if values[before] <= values[after] else 0)
            for values in (applied, stale)
        ]
        if sum(steps):
            shares[after] = steps[1] / sum(steps)
    share.plot(list(shares), list(shares.values()))
    share.set_ylabel("stale share")
    share.set_xlabel("frames collected")
    for axes in (counts, share):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    return figure


def _read(folder: Path, name: str) -> dict[int, float]:
    path = folder / "scalars" / f"{name}.csv"
    if not path.exists():
        raise FileNotFoundError(
            f"plot_priority_updates() needs a log of priority updates: got no {path}. Register "
            "LogPriorityUpdates(replay_buffer) with a trainer that has a CSVLogger."
        )
    with path.open(newline="") as rows:
        return {int(frames): float(value) for frames, value in csv.reader(rows)}
