"""Bars per peer: what a step costs with two ranks, in steps of the layer that does not synchronize."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..core import cases as recorded
from ..core.batches import layouts
from ..core.cases import of_section, ratios
from ..core.machine import where
from ..core.tables import quartiles
from ..ranks.report import measured_peers

# Colors that can be told apart with any kind of color vision (Okabe and Ito).
PEERS = {
    "ours": ("bagua_syncbn", "#0072B2"),
    "naive": ("naive all-reduce", "#E69F00"),
    "fairscale": ("fairscale", "#D55E00"),
    "torch_sync": ("nn.SyncBatchNorm", "#009E73"),
}


def draw(figure: Figure, results: dict[str, Any]) -> bool:
    chosen = [
        case
        for case in of_section(results, "layers")
        if case["ranks"] == 2 and case["threads"] == 1 and case["layout"] == layouts(case["shape"])[0]
    ]
    if not chosen:
        return False
    chosen.sort(key=recorded.elements)
    peers = measured_peers(results)
    axes = figure.subplots()
    height = 0.8 / len(peers)
    for i, name in enumerate(peers):
        title, color = PEERS[name]
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
    axes.set_yticks(range(len(chosen)), [" x ".join(map(str, case["shape"])) for case in chosen])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("forward + backward, ratio to nn.BatchNorm that does not synchronize (line at 1; logarithmic)")
    axes.set_ylabel("input of each rank, by size", labelpad=8)
    axes.set_title("Two ranks, gloo, one thread each; medians and quartiles of the rounds", fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(peers))
    figure.suptitle(f"What synchronization costs\n{where(results)}", fontsize=12)
    return True
