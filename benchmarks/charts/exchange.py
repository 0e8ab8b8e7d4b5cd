"""One message between two ranks of a host: through shared memory and through the group's collectives."""

from statistics import median
from typing import Any

from ..core.cases import of_section
from ..core.machine import where
from .picture import Picture

_WAYS = {"collectives": ("collectives of gloo", "muted"), "shared memory": ("shared memory", "blue")}
_KINDS = ("gather", "sum")


def draw(results: dict[str, Any]) -> Picture | None:
    cases = [case for case in of_section(results, "exchange") if case["ranks"] == 2]
    cases = [case for case in cases if all(f"gather, {way}" in case["microseconds"] for way in _WAYS)]
    if not cases:
        return None
    picture = Picture("One message between two ranks of a host, in µs", f"medians; {where(results)}")
    picture.legend([(style, name) for name, style in _WAYS.values()])
    times = [{(kind, way): median(case["microseconds"][f"{kind}, {way}"]) for kind in _KINDS for way in _WAYS}
             for case in cases]  # fmt: skip
    full = max(max(each.values()) for each in times)
    for case, each in zip(cases, times, strict=True):
        for kind in _KINDS:
            values = [(style, each[kind, way], f"{each[kind, way]:.0f}") for way, (_, style) in _WAYS.items()]
            picture.bars(f"{kind}, {case['bytes']:,} bytes", values, full)
    return picture
