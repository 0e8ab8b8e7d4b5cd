"""Section anew: what a step takes where outputs are made anew, beside one where they are stored."""

from functools import partial
from typing import Any

from ..recorded import Case, Results, of_section, ratios, shape_of, spread, table
from ..timing import time_workload
from . import stored
from .networks import QUICK


def cases(job: dict[str, Any]) -> list[tuple[str]]:
    return [(name,) for name in (QUICK if job["quick"] else (*QUICK, "ResNet-50"))]


def measure(name: str, job: dict[str, Any]) -> Case:
    case, batch, models = stored.prepare(name, job["quick"])
    workload = {variant: partial(stored.step, models[variant], batch) for variant in ("fused", "recomputed") if models}
    return case | (time_workload(workload, job) if workload else {})


def anew_table(results: Results) -> str:
    """The time of a step where outputs are made anew, over that where they are stored: of the least times, and median
    (minimum; quartiles) of the ratios in a round.
    """

    def row(case: Case) -> list[str]:
        if "skipped" in case:
            return [case["network"], case["skipped"], "", ""]
        times = case["microseconds"]
        least = f"{min(times['recomputed']) / min(times['fused']):.2f}"
        return [case["network"], shape_of(case), least, spread(ratios(case, "recomputed", "fused"))]

    header = ["network", "batch", "step recomputed / fused", "in a round"]
    return table(header, map(row, of_section(results, "anew")))


TABLES = {"anew": anew_table}
