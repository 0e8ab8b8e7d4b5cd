"""Section recomputed: a step with recomputed outputs, compared with stored outputs."""

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


def recomputed_table(results: Results) -> str:
    """Step time with recomputed outputs over step time with stored outputs: ratios within a round."""

    def row(case: Case) -> list[str]:
        if "skipped" in case:
            return [case["network"], case["skipped"], ""]
        return [case["network"], shape_of(case), spread(ratios(case, "recomputed", "fused"))]

    return table(["network", "batch", "step recomputed / fused"], map(row, of_section(results, "recomputed")))


TABLES = {"recomputed": recomputed_table}
