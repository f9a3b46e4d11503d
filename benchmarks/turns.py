"""How the benchmarks compare: the sides take turns in random order, and medians are compared."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from time import perf_counter


def take_turns(*sides: Callable[[], float], rounds: int) -> list[float]:
    """Returns the median of what each side measures, one turn of each in every round.

    Nobody always runs after the same neighbour, who leaves his data in the caches. A tenth of the
    rounds comes on top, before any counts.
    """
    measured: list[list[float]] = [[] for _ in sides]
    order = random.Random(0)
    warm_up = max(1, rounds // 10)
    for _ in range(warm_up + rounds):
        for side in order.sample(range(len(sides)), len(sides)):
            measured[side].append(sides[side]())
    return [statistics.median(series[warm_up:]) for series in measured]


def timed(call: Callable[[], object], calls: int) -> Callable[[], float]:
    """Returns a side: seconds per call, over some calls in a row."""

    def turn() -> float:
        start = perf_counter()
        for _ in range(calls):
            call()
        return (perf_counter() - start) / calls

    return turn
