"""Tables of recorded results of ``make gpu``, and what was measured beside the targets: functions of data alone."""

import json
from collections.abc import Iterable, Iterator
from math import inf, nan, prod
from statistics import geometric_mean, median
from typing import Any

from ..recorded import Case, Results, table
from .shapes import OPS, PASSES, PUBLISHED, VALUE_BYTES


def of_kind(results: Results, kind: str) -> list[Case]:
    """Recorded cases, with a name, the bytes of the input and the medians of the samples."""
    found = []
    for case in (case for case in results["cases"] if case["kind"] == kind):
        times = {name: median(samples) for name, samples in case["microseconds"].items()}
        shape = case.get("shape", [])
        size = prod(shape) * VALUE_BYTES.get(case.get("dtype"), 1)
        name = f"{'x'.join(map(str, shape))} {case.get('dtype')} {case.get('layout')}"
        found.append(case | {"times": times, "size": size, "name": name})
    return found


def together(case: Case, side: str, names: Iterable[str]) -> float:
    """Microseconds of several calls of a side; nan where one was not measured."""
    return sum(case["times"].get(f"{side} {name}", nan) for name in names)


def targets(results: Results) -> Iterator[list[str]]:
    """The times that the kernels set out to reach on a card of the H100's class, beside what was measured."""
    ops, cache = of_kind(results, "ops"), results["machine"].get("l2_bytes", inf)
    copying = max((c["bytes"] / c["times"]["copy"] for c in of_kind(results, "copy")), default=nan)

    def judge(what: str, bound: float, found: list[tuple[float, str]], choose: Any = min) -> list[str]:
        found = [pair for pair in found if pair[0] == pair[0]]
        measured, where = choose(found) if found else (nan, "")
        verdict = "met" if measured >= bound else "MISSED" if found else "not measured"
        return [what, f"at least {bound}", f"{measured:.2f}" if found else "", verdict, where]

    def mean(found: list[tuple[float, str]]) -> tuple[float, str]:
        return geometric_mean(ratio for ratio, _ in found), f"{len(found)} inputs"

    large = [(op, c) for c in ops for op in PASSES if c["size"] >= 4 * cache]
    shares = [(PASSES[op] * c["size"] / copying / together(c, "ours", [op]), f"{op} {c['name']}") for op, c in large]
    yield judge("an op at four caches and more, of the copy bandwidth, least", 0.85, shares)
    ratios = [(together(c, "aten", OPS) / together(c, "ours", OPS), c["name"]) for c in ops]
    for layout, bound in (("planar", 2.0), ("interleaved", 1.25)):
        chosen = [pair for pair in ratios if pair[1].endswith(layout)]
        yield judge(f"ATen's five kernels / ours, {layout}, mean", bound, chosen, mean)
    yield judge("ATen's five kernels / ours, least", 1.0, ratios)
    small = [c for c in of_kind(results, "layer") if c["size"] < 4_000_000]
    steps = [(together(c, "torch", ["step"]) / together(c, "ours", ["step"]), c["name"]) for c in small]
    yield judge("torch's layer / ours, a step, input below 4 MB, least", 3.0, steps)


def tables(results: Results, every_input: bool = False) -> str:
    ops = of_kind(results, "ops")
    forward = []
    for case in (case for case in ops if "F.batch_norm" in case["times"]):
        times = *(together(case, side, OPS[:3]) for side in ("ours", "aten")), case["times"]["F.batch_norm"]
        forward.append([case["name"], *(f"{time:.1f}" for time in times), PUBLISHED[tuple(case["shape"])] or ""])
    parts = ([part["name"], part["outcome"], f"{part['seconds']:.0f} s"] for part in results["parts"])
    blocks = ["DRY RUN on a CPU: these figures mean nothing."] if results["dry_run"] else []
    blocks += [table(["", ""], results["machine"].items()), table(["part", "outcome", "took"], parts)]
    blocks += [table(["target", "bound", "measured", "", "where"], targets(results))]
    blocks += [table(["forward, us", "ours", "ATen's three", "F.batch_norm", "published"], forward)]
    blocks += [f"differs from ATen's: {c['name']}: {', '.join(c['disagreements'])}" for c in ops if c["disagreements"]]
    blocks += [json.dumps(case) for case in results["cases"] if case["kind"] in ("error", "left out")]
    for kind in ("ops", "layer") if every_input else ():
        names = list(dict.fromkeys(name for case in of_kind(results, kind) for name in case["times"]))
        rows = [[c["name"], *(f"{c['times'].get(n, nan):.1f}" for n in names)] for c in of_kind(results, kind)]
        blocks.append(table([f"{kind}, us", *names], rows))
    return "\n\n".join(blocks)
