"""End to end: steps a second over ranks, and the loss over time."""

from typing import Any

from matplotlib.figure import Figure

from ..core.cases import of_section
from ..core.tables import quartiles
from ..ranks.report import step_times
from ..ranks.training import BATCH_SIZE, BOUT, TARGET
from . import common


def draw(figure: Figure, results: dict[str, Any]) -> bool:
    times = step_times(results)
    if not times:
        return False
    cores = results["machine"]["cores"]
    left, right = figure.subplots(1, 2)
    for name in next(iter(times.values())):
        title, color, marker = common.PEERS[name]
        values = [quartiles(times[ranks][name]) for ranks in times]
        rates = [1e3 / median for _, median, _ in values]
        spread = [[1e3 / m - 1e3 / high for _, m, high in values], [1e3 / low - 1e3 / m for low, m, _ in values]]
        marker = "x" if name == "local" else marker
        left.errorbar(list(times), rates, spread, color=color, marker=marker, label=title, capsize=2)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(list(times), [str(ranks) for ranks in times])
    left.set_xlim(min(times) / 1.3, max(times) * 1.3)
    common.log_axis(left.yaxis)
    common.shade_shared_cores(left, cores, max(times) * 1.3)
    left.set_xlabel(f"ranks, which share {BATCH_SIZE} images a step")
    left.set_ylabel("steps a second (logarithmic)")
    left.set_title("Speed; medians and quartiles of the steps", fontsize=10)

    ranks = max(count for count in times if count <= cores)
    run = next(case for case in of_section(results, "training") if case["ranks"] == ranks)
    for name, losses in run["losses"].items():
        seconds, elapsed, smooth = 0.0, [], []
        for step, milliseconds in enumerate(run["milliseconds"][name], 1):
            seconds += milliseconds / 1e3
            if step >= BOUT:
                elapsed.append(seconds)
                smooth.append(sum(losses[step - BOUT : step]) / BOUT)
        right.plot(elapsed, smooth, color=common.PEERS[name][1], linewidth=1.6)
    right.axhline(TARGET, color="0.5", linestyle=":")
    right.text(1, TARGET, f"a loss of {TARGET:g}", transform=right.get_yaxis_transform(), ha="right", va="bottom")
    right.set_yscale("log")
    common.log_axis(right.yaxis)
    right.set_xlabel("seconds of training")
    right.set_ylabel(f"training loss, mean of {BOUT} steps (logarithmic)")
    right.set_title(f"{ranks} ranks, seed 0", fontsize=10)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Training a small ResNet on digits, data parallel\n{common.where(results)}", fontsize=12)
    return True
