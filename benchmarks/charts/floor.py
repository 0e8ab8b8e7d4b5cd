"""Distance to the floor: the step over the time that its bytes and its messages need on their own."""

import statistics
from typing import Any

from matplotlib.figure import Figure

from ..core import cases as recorded
from ..core.cases import floor_ratios, of_section
from ..ranks.report import measured_peers
from . import common
from .peers import first_layout


def draw(figure: Figure, results: dict[str, Any]) -> bool:
    chosen = [
        case
        for case in of_section(results, "layers")
        if case["ranks"] in (1, 2) and case["threads"] == 1 and case["layout"] == first_layout(case)
    ]
    counts = sorted({case["ranks"] for case in chosen})
    if not chosen:
        return False
    panels = figure.subplots(1, len(counts), sharey=True, sharex=True, squeeze=False)[0]
    for axes, ranks in zip(panels, counts, strict=True):
        cases = sorted((case for case in chosen if case["ranks"] == ranks), key=recorded.elements)
        for name in ["local", *measured_peers(results)]:
            title, color, marker = common.PEERS[name]
            values = [
                1 / statistics.median(floor_ratios(case, name)) if name in case["microseconds"] else float("nan")
                for case in cases
            ]
            # The dash of the one that does not synchronize needs some weight to be seen.
            size, edge = (9, 2.5) if name == "local" else (7, 1)
            axes.plot(
                values, range(len(cases)), marker, color=color, label=title, markersize=size, markeredgewidth=edge
            )
        axes.axvline(1, color="black", linewidth=1.2)
        axes.set_xscale("log")
        common.log_axis(axes.xaxis)
        axes.set_yticks(range(len(cases)), [common.shape_of(case) for case in cases])
        axes.set_xlabel("forward + backward / floor (logarithmic)")
        axes.set_title("one rank" if ranks == 1 else f"{ranks} ranks, the floor includes two collectives", fontsize=10)
    panels[0].set_ylabel("input of each rank, by size", labelpad=8)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(
        "Distance to the floor: copying 8 times the input's size (line at 1), and the collectives alone\n"
        f"{common.where(results)}",
        fontsize=12,
    )
    return True
