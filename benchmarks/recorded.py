"""Recorded results: files, the measured commit, ratios within a round, and Markdown tables. Needs only Python."""

import json
import math
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

Results = dict[str, Any]
Case = dict[str, Any]


def write(results: Results, path: Path) -> None:
    """Writes the results, one case per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {name: value for name, value in results.items() if name != "cases"}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in results["cases"])
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n{lines}\n]}}\n', encoding="utf-8")


def find_commit() -> str | None:
    """Returns the checked-out commit, with a note if the package has changes; None outside of a checkout."""

    def git(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    try:
        commit = git("rev-parse", "--short", "HEAD")
        if commit.returncode:
            return None
        changed = git("diff", "--quiet", "HEAD", "--", "bagua_syncbn", "csrc").returncode
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + (" and changes" if changed else "")


def of_section(results: Results, section: str) -> list[Case]:
    return [case for case in results["cases"] if case["section"] == section]


def elements(case: Case) -> int:
    return math.prod(case["shape"])


def shape_of(case: Case) -> str:
    return "x".join(map(str, case["shape"]))


def ratios(case: Case, name: str, other: str, factor: float = 1.0) -> list[float]:
    """Returns the ratio of two functions' times in each round."""
    times = case["microseconds"]
    return [factor * a / b for a, b in zip(times[name], times[other], strict=True)]


def marked(ranks: int, results: Results) -> str:
    """Returns ``ranks``, marked if there are fewer cores than ranks."""
    return f"{ranks}{'*' if ranks > results['machine']['cores'] else ''}"


def where(results: Results) -> str:
    """Returns machine, torch version and date in one line."""
    machine = results["machine"]
    return f"{machine['processor']}, {machine['cores']} cores, torch {results['versions']['torch']}, {results['date']}"


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


def table_of_ratios(cases: list[Case], base: str) -> str:
    """Returns a table of the cases, with the ratios of each function's times to those of ``base`` in the same round."""
    fields = [name for name in ("ranks", "shape", "layout", "dtype", "threads") if any(name in case for case in cases)]
    names = [name for name in dict.fromkeys(name for case in cases for name in case["microseconds"]) if name != base]

    def row(case: Case) -> list[object]:
        times = case["microseconds"]
        shown = [spread(ratios(case, name, base)) if name in times and base in times else "" for name in names]
        least = f"{min(times[base]) / 1e3:.3g}" if base in times else ""
        return [*((case | {"shape": shape_of(case)})[field] for field in fields), *shown, least]

    return table([*fields, *(f"{name} / {base}" for name in names), f"{base}, least ms"], map(row, cases))


def across_cases(medians: list[float]) -> str:
    if not medians:
        return ""
    return f"{statistics.geometric_mean(medians):.2f} ({min(medians):.2f}-{max(medians):.2f})"
