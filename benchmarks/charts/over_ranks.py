"""Cost over ranks: the step of each peer, in steps of the layer that does not synchronize, for 1 to 8 ranks."""

from typing import Any

from matplotlib.figure import Figure

from ..core import cases as recorded
from ..core.cases import of_section, ratios
from ..core.tables import quartiles
from ..ranks.report import measured_peers
from . import common
from .peers import first_layout

_PANELS = 4


def draw(figure: Figure, results: dict[str, Any]) -> bool:
    by_shape: dict[str, list[dict[str, Any]]] = {}
    for case in sorted(of_section(results, "layers"), key=recorded.elements):
        if case["threads"] == 1 and case["layout"] == first_layout(case):
            by_shape.setdefault(recorded.shape_of(case), []).append(case)
    most = max((len(cases) for cases in by_shape.values()), default=0)
    shapes = [shape for shape, cases in by_shape.items() if len(cases) == most]
    if most < 2:
        return False
    # From the smallest to the largest that were measured on all numbers of ranks.
    panels = min(_PANELS, len(shapes))
    shapes = [shapes[round(i * (len(shapes) - 1) / max(1, panels - 1))] for i in range(panels)]
    rows = figure.subplots(1, panels, sharey=True, squeeze=False)
    for axes, shape in zip(rows[0], shapes, strict=True):
        cases = sorted(by_shape[shape], key=lambda case: case["ranks"])
        for name in measured_peers(results):
            title, color, marker = common.PEERS[name]
            shown = [case for case in cases if name in case["microseconds"]]
            values = [quartiles(ratios(case, name, "local")) for case in shown]
            spread = [[m - low for low, m, _ in values], [high - m for _, m, high in values]]
            axes.errorbar(
                [case["ranks"] for case in shown], [m for _, m, _ in values], spread, color=color, marker=marker,
                label=title, capsize=2, linewidth=1.4,
            )  # fmt: skip
        ranks = [case["ranks"] for case in cases]
        axes.axhline(1, color="black", linewidth=1.2)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set_xlim(ranks[0] / 1.3, ranks[-1] * 1.3)
        common.log_axis(axes.yaxis)
        common.shade_shared_cores(axes, results["machine"]["cores"], ranks[-1] * 1.3)
        axes.set_title(shape.replace("x", " x "), fontsize=10)
        axes.set_xlabel("ranks")
    rows[0][0].set_ylabel("forward + backward, ratio to nn.BatchNorm\nthat does not synchronize (logarithmic)")
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(
        f"Cost over ranks, one thread each; above each panel the input of a rank\n{common.where(results)}",
        fontsize=12,
    )
    return True
