"""Recorded cases: what was measured on what input, ratios within a round, and the floor of a step."""

import math
import statistics

from .tables import Case, Results

# Sizes of the input that each op must read or write; a copy does two.
MOVED = {"stats": 1, "elemt": 2, "backward_reduce": 2, "backward_elemt": 3}
COPY_MOVES = 2
# The whole step does each of them once.
STEP_COPIES = sum(MOVED.values()) / COPY_MOVES


def of_section(results: Results, section: str) -> list[Case]:
    return [case for case in results["cases"] if case["section"] == section]


def elements(case: Case) -> int:
    return math.prod(case["shape"])


def shape_of(case: Case) -> str:
    return "x".join(map(str, case["shape"]))


def key(case: Case) -> list[str]:
    return [shape_of(case), case["layout"], str(case["threads"])]


def ratios(case: Case, name: str, other: str, factor: float = 1.0) -> list[float]:
    """Returns the ratio of two times in each round."""
    times = case["microseconds"]
    return [factor * a / b for a, b in zip(times[name], times[other], strict=True)]


def floor_ratios(case: Case, other: str) -> list[float]:
    """Returns what the ratio to ``other`` would be if the step did nothing but move its bytes as fast as a copy does.

    Where ranks take part, and nothing but exchange their messages.
    """
    times = case["microseconds"]
    messages = times.get("collectives") if case.get("ranks", 1) > 1 else None
    return [
        (STEP_COPIES * copy + message) / base
        for copy, message, base in zip(times["copy"], messages or [0.0] * len(times["copy"]), times[other], strict=True)
    ]


def milliseconds(case: Case, name: str) -> str:
    return f"{statistics.median(case['microseconds'][name]) / 1e3:.3g}"
