"""What a launched process guarded, and the last line that sums it up over all processes."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from ..core.result import Tally, stats_of


class Report:
    """What this process guarded. The buffers' own locks guard the tallies; its own, the rest."""

    def __init__(self) -> None:
        self.tallies: set[Tally] = set()
        self.begin()

    def begin(self) -> None:
        """Begins to report, at first and in a process that was forked."""
        self.lock = threading.Lock()
        self.guarded: Counter[str] = Counter()
        self.unguarded: Counter[str] = Counter()
        self.unchecked = 0  # calls that wrote priorities by slot
        for tally in self.tallies:
            tally.reset()

    def built(self, name: str, guards: bool) -> None:
        """Notes a prioritized buffer that this process built, by its class, and if it guards."""
        with self.lock:
            (self.guarded if guards else self.unguarded)[name] += 1

    def counts(self, tally: Tally) -> None:
        """Notes where a buffer that was built here, copied or sent here counts its updates."""
        with self.lock:
            self.tallies.add(tally)

    def called_unchecked(self) -> None:
        """Notes a call that wrote priorities by slot."""
        with self.lock:
            self.unchecked += 1

    def as_dict(self) -> dict[str, Any]:
        """Returns what :func:`summary` takes."""
        with self.lock:
            counts = stats_of(self.tallies) if self.tallies else {}
            return {
                "guarded": dict(self.guarded),
                "unguarded": dict(self.unguarded),
                "unchecked": self.unchecked,
                "applied": counts.get("updates_applied", 0),
                "stale": counts.get("updates_stale", 0),
            }


REPORT = Report()


def summary(reports: list[dict[str, Any]], silent: int = 0, failed: bool = False) -> str:
    """The last line of a run.

    Args:
        reports (list of dict): what :meth:`Report.as_dict` gave in each process.
        silent (int): how many processes ended without one. Defaults to 0.
        failed (bool): whether the script ended with an error. Defaults to False.

    Examples:
        >>> summary([{"guarded": {"TensorDictPrioritizedReplayBuffer": 1}, "unguarded": {},
        ...           "unchecked": 0, "applied": 60, "stale": 4}])
        'generations: guarded 1 TensorDictPrioritizedReplayBuffer; 4 of 64 priorities were stale'
    """
    guarded, unguarded = (
        sum((Counter(each[kind]) for each in reports), Counter())
        for kind in ("guarded", "unguarded")
    )
    unchecked, applied, stale = (
        sum(each[kind] for each in reports) for kind in ("unchecked", "applied", "stale")
    )
    sent = applied + stale
    parts = [f"guarded {_listed(guarded)}"] if guarded else []
    if sent:
        parts.append(f"{stale:,} of {sent:,} priorities were stale")
    elif guarded or unguarded or unchecked:
        parts.append("checked nothing")
    else:
        parts.append("no prioritized buffer was built")
    if unguarded:
        parts.append(f"not guarded: {_listed(unguarded)}")
    if unchecked:
        parts.append(f"calls that wrote priorities by slot, unchecked: {unchecked:,}")
    if silent:
        parts.append(f"children that ended without a report: {silent:,}")
    if failed:
        parts.append("the run failed")
    return "generations: " + "; ".join(parts)


def _listed(names: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
