"""Tables of recorded results, in Markdown, with the targets: ``python -m benchmarks.gpu.report results.json``.

Functions of the recorded data alone. What was not measured is neither met nor missed.
"""

import json
import sys
from collections.abc import Iterable
from math import prod
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from ..core.tables import Case, Results, table
from .shapes import DTYPES, LAYOUTS, OPS, PASSES, VALUE_BYTES

_LARGE = 4  # caches
_SMALL = 4_000_000  # bytes


def size(case: Case) -> int:
    """Bytes of the input of a recorded case."""
    return prod(case["shape"]) * VALUE_BYTES[case["dtype"]]


def name(case: Case) -> str:
    return f"{'x'.join(map(str, case['shape']))} {case['dtype']} {case['layout']}"


def of_kind(results: Results, kind: str) -> list[Case]:
    return [case for case in results["cases"] if case["kind"] == kind]


def copy_bandwidth(results: Results) -> float | None:
    """Bytes per microsecond, read and written."""
    copies = of_kind(results, "copy")
    return max((c["bytes"] / median(c["microseconds"]["copy"]) for c in copies), default=None)


def fraction_of_copy(case: Case, op: str, bandwidth: float) -> float:
    """How fast an op moves the bytes that it must, beside copying."""
    return PASSES[op] * size(case) / bandwidth / median(case["microseconds"][f"ours {op}"])


def ratio_to_aten(case: Case) -> float:
    """How many times as long ATen's five kernels take together."""
    times = case["microseconds"]
    return sum(median(times[f"aten {op}"]) for op in OPS) / sum(median(times[f"ours {op}"]) for op in OPS)


def ratio_to_torch(case: Case, other: str = "torch") -> float:
    """How many times as long a step of torch's layer takes."""
    return median(case["microseconds"][f"{other} step"]) / median(case["microseconds"]["ours step"])


class Target(NamedTuple):
    """A bound and what was measured: at least ``bound`` (at most, where ``at_most``); None if nothing was."""

    what: str
    bound: float
    measured: float | None
    where: str = ""
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        met = self.measured <= self.bound if self.at_most else self.measured >= self.bound
        return "met" if met else "MISSED"


def judge(results: Results) -> list[Target]:
    """Returns what the kernels set out to reach on a card of the H100's class, beside what was measured."""

    def least(pairs: Iterable[tuple[float, str]]) -> tuple[float | None, str]:
        return min(pairs, default=(None, ""))

    ops, layers, bandwidth = of_kind(results, "ops"), of_kind(results, "layer"), copy_bandwidth(results)
    cache = results["machine"].get("l2_bytes")
    large = [case for case in ops if cache and size(case) >= _LARGE * cache]
    fractions = [(fraction_of_copy(c, op, bandwidth), f"{op} {name(c)}") for c in large for op in PASSES if bandwidth]
    targets = [Target("each op at four caches and more, of the copy bandwidth", 0.85, *least(fractions))]
    for layout, bound in (("planar", 2.0), ("interleaved", 1.25)):
        ratios = [ratio_to_aten(case) for case in ops if case["layout"] == layout]
        mean = geometric_mean(ratios) if ratios else None
        targets.append(Target(f"ATen's five kernels / ours, {layout}, mean", bound, mean, f"{len(ratios)} inputs"))
    targets.append(Target("ATen's five kernels / ours, least", 1.0, *least((ratio_to_aten(c), name(c)) for c in ops)))
    small = [(ratio_to_torch(case), name(case)) for case in layers if size(case) < _SMALL]
    targets.append(Target("torch's layer / ours, a step, input below 4 MB, least", 3.0, *least(small)))
    for part, launches in (("forward", 3), ("backward", 3)):  # backward one of them is of OneRankGroup
        counts = [case["counts"][f"ours {part}"] for case in of_kind(results, "counts") if visible(case)]
        for what, most in {"kernels": launches, "collectives": 1, "waits": 0}.items():
            measured = max((counted[what] for counted in counts), default=None)
            targets.append(Target(f"{what} in a {part} pass of a layer, most", most, measured, at_most=True))
    return targets


def visible(case: Case) -> bool:
    """Whether the profiler saw the device; where it does not, the counts mean nothing."""
    return any(counted["runtime"] for counted in case["counts"].values())


def machine_table(results: Results) -> str:
    machine = {"date": results.get("date"), "commit": results.get("commit"), **results["machine"]}
    bandwidth = copy_bandwidth(results)
    if bandwidth is not None:
        machine["copy bandwidth, measured"] = f"{bandwidth / 1e6:.2f} TB/s, read and written"
    return table(["", ""], machine.items())


def targets_table(results: Results) -> str:
    rows = []
    for target in judge(results):
        measured = "" if target.measured is None else f"{target.measured:.2f}".removesuffix(".00")
        bound = f"{'at most' if target.at_most else 'at least'} {target.bound:g}"
        rows.append([target.what, bound, measured, target.verdict, target.where])
    return table(["target", "bound", "measured", "", "where"], rows)


def networks_table(results: Results) -> str:
    """How many times as long ATen's kernels and torch's layer take: the mean over the inputs of each network."""
    ops, layers = of_kind(results, "ops"), of_kind(results, "layer")
    columns = [(layout, dtype) for layout in LAYOUTS for dtype in DTYPES]

    def mean(cases: list[Case], ratio: Any, *key: str) -> str:
        chosen = [ratio(case) for case in cases if (case["network"], case["layout"], case["dtype"]) == key]
        return f"{geometric_mean(chosen):.2f}" if chosen else "-"

    def cell(network: str, layout: str, dtype: str) -> str:
        key = (network, layout, dtype)
        return f"{mean(ops, ratio_to_aten, *key)}, {mean(layers, ratio_to_torch, *key)}"

    networks = dict.fromkeys(case["network"] for case in ops + layers)
    rows = [[network, *(cell(network, *column) for column in columns)] for network in networks]
    return table(["kernels, layer", *(f"{layout} {dtype}" for layout, dtype in columns)], rows)


def ops_table(results: Results) -> str:
    """Every input: medians in microseconds with their spread, and for ours the part of the copy bandwidth."""
    bandwidth = copy_bandwidth(results)

    def cell(case: Case, op: str) -> str:
        ours, theirs = (case["microseconds"][f"{side} {op}"] for side in ("ours", "aten"))
        part = f", {fraction_of_copy(case, op, bandwidth):.0%}" if bandwidth and op in PASSES else ""
        return f"{median(ours):.1f} ({min(ours):.1f} to {max(ours):.1f}){part}; {median(theirs):.1f}"

    rows = []
    for case in of_kind(results, "ops"):
        notes = [f"disagrees: {n}" for n in case["disagreements"]] + [f"host-bound: {n}" for n in case["behind"]]
        rows.append([name(case), *(cell(case, op) for op in OPS), f"{ratio_to_aten(case):.2f}", "; ".join(notes)])
    return table(["input", *(f"{op}: ours; ATen's" for op in OPS), "ATen's / ours", ""], rows)


def layers_table(results: Results, kind: str = "layer", other: str = "torch") -> str:
    rows = []
    for case in of_kind(results, kind):
        times = {key: median(samples) for key, samples in case["microseconds"].items()}
        cells = [f"{times[f'{side} {part}']:.1f}" for part in ("forward", "step") for side in ("ours", other)]
        rows.append([name(case), *cells, f"{ratio_to_torch(case, other):.2f}"])
    return table([f"{kind} on", "forward, us", other, "step, us", other, f"{other} / ours"], rows)


def counts_table(results: Results) -> str:
    kinds = ("kernels", "copies", "fills", "collectives", "waits")
    rows = (
        [name(case), which, *(counted[kind] for kind in kinds)]
        for case in of_kind(results, "counts") if visible(case) for which, counted in case["counts"].items()
    )  # fmt: skip
    return table(["layer on", "pass", *kinds], rows)


def short(results: Results) -> str:
    """What ``make gpu`` ends with."""
    parts = [[part["name"], part["outcome"], f"{part['seconds']:.0f} s"] for part in results["parts"]]
    blocks = [machine_table(results), table(["part", "outcome", "took"], parts)]
    blocks += [targets_table(results), networks_table(results)]
    if results.get("dry_run"):
        blocks.insert(0, "DRY RUN on a CPU, with stand-ins for what needs a GPU: these figures mean nothing.")
    for part in results["parts"]:
        if part["details"]:
            blocks.append(f"{part['name']}: {part['outcome']}\n" + "\n".join(part["details"].splitlines()[-5:]))
    unseen = [case for case in of_kind(results, "counts") if not visible(case)]
    wrong = [f"{name(c)}: {', '.join(c['disagreements'])}" for c in of_kind(results, "ops") if c["disagreements"]]
    errors = [f"{case['what']}: {case['error']}" for case in of_kind(results, "error")]
    if unseen:
        blocks.append("Launches could not be counted: torch's profiler does not see the device here.")
    if wrong:
        blocks.append("Kernels that disagree with ATen's:\n" + "\n".join(wrong))
    if errors:
        blocks.append("Cases that raised:\n" + "\n".join(errors))
    return "\n\n".join(blocks)


def full(results: Results) -> str:
    layers = [layers_table(results), layers_table(results, "fused"), layers_table(results, "masked", "unmasked")]
    return "\n\n".join([short(results), ops_table(results), *layers, counts_table(results)])


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(full(json.loads(Path(path).read_text(encoding="utf-8"))))
