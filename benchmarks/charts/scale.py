"""The model of scale: steps over GPUs with global groups and groups per node, and how far the model is off."""

from typing import Any

from matplotlib.figure import Figure

from ..report import cells
from ..scale import measured, model, networks, published
from . import common

_LINES = ((networks.H100, "#0072B2"), (networks.V100, "#D55E00"))
_EXCESS = 0.1


def draw(figure: Figure, results: dict[str, Any]) -> bool:
    if not cells.cases(results, "collectives"):
        return False
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    job = model.RESNET50
    for network, color in _LINES:
        for group, style in (("global", "-"), ("node", "--")):
            steps = [1e3 * job.step(network, ranks, model.PER_NODE, group) for ranks in model.RANKS]
            what = "one global group" if group == "global" else f"groups of a node, {model.PER_NODE} GPUs"
            left.plot(model.RANKS, steps, style, color=color, label=f"{network.name.split(' ')[0]} class: {what}")
        ranks = model.crossover(job, network, _EXCESS)
        if ranks is not None:
            left.plot(ranks, 1e3 * job.step(network, ranks, model.PER_NODE, "global"), "o", color=color)
            left.annotate(
                f"+{_EXCESS:.0%}\nfrom {ranks} GPUs", (ranks, 1e3 * job.step(network, ranks, 8, "global")), color=color,
                xytext=(0, 14 if network is networks.V100 else -34), textcoords="offset points", ha="right", fontsize=9,
            )  # fmt: skip
    left.set_xscale("log", base=2)
    left.set_xticks(model.RANKS, [str(ranks) for ranks in model.RANKS], rotation=45)
    left.set_ylim(bottom=0)
    left.set_xlabel("GPUs (logarithmic)")
    left.set_ylabel("milliseconds a step")
    left.set_title("ResNet-50, 100 ms a step without synchronization (assumed)", fontsize=10)
    left.legend(loc="upper left", fontsize=9)

    compared = [*measured.comparisons(results), *published.comparisons()]
    values = [c.predicted / c.published for c in compared]
    bars = right.barh(range(len(compared)), [value - 1 for value in values], left=1, color="0.55")
    right.bar_label(bars, [f"{value - 1:+.0%}" for value in values], padding=3, fontsize=9)
    right.set_yticks(range(len(compared)), [c.case.replace(", ", ",\n", 1) for c in compared], fontsize=8.5)
    right.invert_yaxis()
    right.set_xscale("log")
    right.set_xlim(min(0.02, min(values) / 3), max(3, 3 * max(values)))
    common.log_axis(right.xaxis)
    right.axvline(1, color="black", linewidth=1.2)
    right.grid(axis="y", visible=False)
    right.set_xlabel("model / measured (logarithmic)")
    right.set_title("How far the model is off", fontsize=10)
    figure.suptitle(
        "A model, not a measurement: collectives by NCCL's own constants, nothing waits for slow ranks", fontsize=12
    )
    return True
