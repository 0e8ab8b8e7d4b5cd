"""What the kernels set out to reach on a card of the H100's class, and whether recorded measurements reach it.

A function of the recorded data alone. What was not measured is neither met nor missed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from statistics import geometric_mean, median
from typing import Any

from shapes import OPS, VALUE_BYTES

# Bytes that an op must move, in sizes of the input: what the bandwidth of copying is compared with.
PASSES = {"stats": 1, "elemt": 2, "backward_reduce": 2, "backward_elemt": 3}
LARGE = 4  # caches
SMALL = 4_000_000  # bytes


@dataclass(frozen=True)
class Target:
    """A bound and what was measured: at least ``bound`` (at most, where ``at_most``); None if nothing was."""

    what: str
    bound: float
    measured: float | None
    where: str = ""
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: "not measured"}[self.met]


def size(case: dict[str, Any]) -> int:
    """Bytes of the input of a recorded case."""
    return prod(case["shape"]) * VALUE_BYTES[case["dtype"]]


def name(case: dict[str, Any]) -> str:
    return f"{'x'.join(map(str, case['shape']))} {case['dtype']} {case['layout']}"


def of_kind(results: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [case for case in results["cases"] if case["kind"] == kind]


def copy_bandwidth(results: dict[str, Any]) -> float | None:
    """Bytes per microsecond, read and written."""
    copies = of_kind(results, "copy")
    return max((c["bytes"] / median(c["microseconds"]["copy"]) for c in copies), default=None)


def fraction_of_copy(case: dict[str, Any], op: str, bandwidth: float, side: str = "ours") -> float:
    """How fast an op moves the bytes that it must, beside copying."""
    return PASSES[op] * size(case) / bandwidth / median(case["microseconds"][f"{side} {op}"])


def ratio_to_aten(case: dict[str, Any]) -> float:
    """How many times as long ATen's five kernels take together."""
    times = case["microseconds"]
    return sum(median(times[f"aten {op}"]) for op in OPS) / sum(median(times[f"ours {op}"]) for op in OPS)


def ratio_to_torch(case: dict[str, Any], part: str = "step") -> float:
    """How many times as long torch's layer takes."""
    return median(case["microseconds"][f"torch {part}"]) / median(case["microseconds"][f"ours {part}"])


def _least(pairs: Iterable[tuple[float, str]]) -> tuple[float | None, str]:
    return min(pairs, default=(None, ""))


def judge(results: dict[str, Any]) -> list[Target]:
    """Returns every target with its measured value."""
    ops, layers, bandwidth = of_kind(results, "ops"), of_kind(results, "layer"), copy_bandwidth(results)
    cache = results.get("machine", {}).get("l2_bytes") or 0
    large = [case for case in ops if size(case) >= LARGE * cache] if cache and bandwidth else []
    fractions = ((fraction_of_copy(c, op, bandwidth or 1), f"{op} {name(c)}") for c in large for op in PASSES)
    targets = [Target("each op at four caches and more, of the copy bandwidth", 0.85, *_least(fractions))]
    for layout, bound in (("planar", 2.0), ("interleaved", 1.25)):
        ratios = [ratio_to_aten(case) for case in ops if case["layout"] == layout]
        mean = geometric_mean(ratios) if ratios else None
        targets.append(Target(f"ATen's five kernels / ours, {layout}, mean", bound, mean, f"{len(ratios)} inputs"))
    targets.append(Target("ATen's five kernels / ours, least", 1.0, *_least((ratio_to_aten(c), name(c)) for c in ops)))
    small = ((ratio_to_torch(case), name(case)) for case in layers if size(case) < SMALL)
    targets.append(Target("torch's layer / ours, a step, input below 4 MB, least", 3.0, *_least(small)))
    return targets + _count_targets(of_kind(results, "counts"))


def _count_targets(cases: list[dict[str, Any]]) -> list[Target]:
    targets = []
    for part, launches in (("forward", 3), ("backward", 2)):
        counts = [counted for case in cases if (counted := case["counts"][f"ours {part}"])["runtime"]]
        bounds = {"kernels": launches, "collectives": 1, "waits": 0}
        for what, bound in bounds.items():
            most = max((c[what] for c in counts), default=None)
            targets.append(Target(f"{what} in a {part} pass of a layer, most", bound, most, at_most=True))
    return targets
