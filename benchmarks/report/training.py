"""Table of the section training."""

import statistics

from ..training import TARGET, steps_to_target
from . import cells
from .cells import Case, Results


def seconds_to_target(case: Case, name: str) -> float | None:
    """Returns the time of the steps until the loss was down to the target; None if it never was."""
    steps = steps_to_target(case["losses"][name])
    return None if steps is None else sum(case["milliseconds"][name][:steps]) / 1e3


def step_times(results: Results) -> dict[int, dict[str, list[float]]]:
    """Returns the milliseconds of all steps of all seeds, by number of ranks and peer."""
    times: dict[int, dict[str, list[float]]] = {}
    for case in cells.cases(results, "training"):
        for name, values in case["milliseconds"].items():
            times.setdefault(case["ranks"], {}).setdefault(name, []).extend(values)
    return times


def training_table(results: Results) -> str:
    runs = cells.cases(results, "training")

    def row(ranks: int, name: str, times: dict[str, list[float]]) -> list[str]:
        own, local = times[name], statistics.median(times["local"])
        low, median, high = cells.quartiles(own)
        reached = [seconds_to_target(case, name) for case in runs if case["ranks"] == ranks]
        seconds = [value for value in reached if value is not None]
        steps = [steps_to_target(case["losses"][name]) for case in runs if case["ranks"] == ranks]
        taken = sorted(step for step in steps if step is not None)
        shown = f"{statistics.median(seconds):.3g} ({min(seconds):.3g}-{max(seconds):.3g})" if seconds else "never"
        return [
            f"{ranks}{'*' if ranks > results['machine']['cores'] else ''}",
            name,
            f"{median / local:.2f} ({low / local:.2f}-{high / local:.2f})",
            f"{1e3 / median:.3g} ({1e3 / high:.3g}-{1e3 / low:.3g})",
            shown,
            f"{taken[0]}-{taken[-1]}" if taken else "",
            f"{len(seconds)} of {len(reached)}",
        ]

    header = ["ranks", "peer", "step / local", "steps a second", f"seconds to a loss of {TARGET:g}", "steps", "runs"]
    return cells.table(
        header, [row(ranks, name, times) for ranks, times in step_times(results).items() for name in times]
    )
