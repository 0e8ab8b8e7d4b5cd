"""What all tables are made of: ratios within a round, medians with their spread, Markdown."""

import math
import statistics
from collections.abc import Iterable
from typing import Any

Results = dict[str, Any]
Case = dict[str, Any]

ELEMENT_SIZE = 4  # all inputs are float32

# Sizes of the input that each op must read or write; a copy does two.
MOVED = {"stats": 1, "elemt": 2, "backward_reduce": 2, "backward_elemt": 3}
COPY_MOVES = 2
# The whole step does each of them once.
STEP_COPIES = sum(MOVED.values()) / COPY_MOVES


def elements(case: Case) -> int:
    return math.prod(case["shape"])


def shape_of(case: Case) -> str:
    return "x".join(map(str, case["shape"]))


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


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Returns lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def spread(values: list[float], bound: float | None = None) -> str:
    """Median, minimum and quartiles; bold where the median misses its bound."""
    low, median, high = quartiles(values)
    shown = f"{median:.2f}"
    # As it is shown: nothing is a miss that reads like the bound.
    if bound is not None and float(shown) > bound:
        shown = f"**{shown}**"
    return f"{shown} ({min(values):.2f}; {low:.2f}-{high:.2f})"


def milliseconds(case: Case, name: str) -> str:
    return f"{statistics.median(case['microseconds'][name]) / 1e3:.3g}"


def over(values: list[float], bound: float | None) -> str:
    if bound is None:
        return ""
    excess = float(f"{statistics.median(values):.2f}") - bound
    return f"+{excess:.2f}" if excess > 1e-9 else "met"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |" for line in lines)


def cases(results: Results, section: str) -> list[Case]:
    return [case for case in results["cases"] if case["section"] == section]


def key(case: Case) -> list[str]:
    return [shape_of(case), case["layout"], str(case["threads"])]
