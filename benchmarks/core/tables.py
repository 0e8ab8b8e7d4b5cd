"""Statistics of samples, and tables in Markdown."""

import statistics
from collections.abc import Iterable
from typing import Any

Results = dict[str, Any]
Case = dict[str, Any]


def table(header: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |" for line in lines)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Returns lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def spread(values: list[float]) -> str:
    low, median, high = quartiles(values)
    return f"{median:.2f} ({min(values):.2f}; {low:.2f}-{high:.2f})"


def across_cases(medians: list[float]) -> str:
    if not medians:
        return ""
    return f"{statistics.geometric_mean(medians):.2f} ({min(medians):.2f} to {max(medians):.2f})"
