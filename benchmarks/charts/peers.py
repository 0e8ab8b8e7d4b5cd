"""Bars per peer: what a step costs with two ranks, in steps of the layer that does not synchronize."""

from typing import Any

from matplotlib.figure import Figure

from ..core import cases as recorded
from ..core.cases import of_section, ratios
from ..core.tables import quartiles
from ..ranks.report import measured_peers
from . import common


def draw(figure: Figure, results: dict[str, Any]) -> bool:
    chosen = [
        case
        for case in of_section(results, "layers")
        if case["ranks"] == 2 and case["threads"] == 1 and case["layout"] == first_layout(case)
    ]
    if not chosen:
        return False
    chosen.sort(key=recorded.elements)
    peers = measured_peers(results)
    axes = figure.subplots()
    height = 0.8 / len(peers)
    for i, name in enumerate(peers):
        title, color, _ = common.PEERS[name]
        rows = [(y, quartiles(ratios(case, name, "local"))) for y, case in enumerate(chosen)
                if name in case["microseconds"]]  # fmt: skip
        positions = [y + (i - (len(peers) - 1) / 2) * height for y, _ in rows]
        medians = [values[1] for _, values in rows]
        spread = [[m - low for _, (low, m, _) in rows], [high - m for _, (_, m, high) in rows]]
        error = {"elinewidth": 1, "ecolor": "0.35"}
        # From the line at 1 on: the length of a bar is then what the logarithm says, wherever the axis begins.
        widths = [median - 1 for median in medians]
        axes.barh(positions, widths, height * 0.92, 1, color=color, label=title, xerr=spread, error_kw=error)
    axes.axvline(1, color="black", linewidth=1.2)
    axes.set_yticks(range(len(chosen)), [common.shape_of(case) for case in chosen])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xscale("log")
    common.log_axis(axes.xaxis)
    axes.set_xlabel("forward + backward, ratio to nn.BatchNorm that does not synchronize (line at 1; logarithmic)")
    axes.set_ylabel("input of each rank, by size", labelpad=8)
    axes.set_title("Two ranks, gloo, one thread each; medians and quartiles of the rounds", fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(peers))
    figure.suptitle(f"What synchronization costs\n{common.where(results)}", fontsize=12)
    return True


def first_layout(case: dict[str, Any]) -> str:
    """The rows of (N, C) are interleaved, all others are shown planar."""
    return "interleaved" if len(case["shape"]) == 2 else "planar"
