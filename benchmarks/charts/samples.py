"""How many samples fit: of each network, plain and with outputs that are not stored."""

from typing import Any

from matplotlib.figure import Figure

from ..core.cases import of_section
from ..core.machine import where
from ..cpu.stored import GIGABYTES, samples_that_fit

_VARIANTS = {
    "plain": ("torch's layers", "#000000"),
    "fused": ("fuse_activations", "#56B4E9"),
    "recomputed": ("fuse_activations and recompute_outputs", "#0072B2"),
}


def draw(figure: Figure, results: dict[str, Any]) -> bool:
    cases = [case for case in of_section(results, "stored") if "bytes" in case]
    if not cases:
        return False
    axes = figure.subplots()
    height = 0.8 / len(_VARIANTS)
    for number, (variant, (title, color)) in enumerate(_VARIANTS.items()):
        fits = [{name: samples_that_fit(of, case["shape"][0]) for name, of in case["bytes"].items()} for case in cases]
        shares = [each[variant] / each["plain"] for each in fits]
        bars = axes.barh(
            [row + height * (number - 1) for row in range(len(cases))], shares, height, color=color, label=title
        )
        axes.bar_label(bars, [f"{each[variant]:.0f}" for each in fits], padding=4)
    axes.set_yticks(
        range(len(cases)), [f"{case['network']}\n{' x '.join(map(str, case['shape'][1:]))}" for case in cases]
    )
    axes.invert_yaxis()
    axes.set_xlabel("samples that fit, over those with torch's layers")
    figure.legend(loc="outside lower center", ncols=len(_VARIANTS))
    figure.suptitle(
        f"Samples of which {GIGABYTES} GiB hold what a forward pass stores for the backward pass\n{where(results)}",
        fontsize=12,
    )
    return True
