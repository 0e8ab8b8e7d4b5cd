"""Charts of recorded results."""

import hashlib
import json
from pathlib import Path

from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter, StrMethodFormatter

from .batches import layouts
from .peers import OVER_GLOO
from .recorded import Results, elements, of_section, quartiles, ratios, where
from .sections.layers import synchronized
from .svg import COLORS, chart

_ROW = 22
_PEERS = {
    "ours": ("bagua_syncbn", "blue"),
    OVER_GLOO: ("over gloo", "sky"),
    "naive": ("naive all-reduce", "orange"),
    "fairscale": ("fairscale", "red"),
    "torch_sync": ("nn.SyncBatchNorm", "muted"),
}
_VARIANTS = {
    "plain": ("torch's layers", "muted"),
    "fused": ("fuse_activations", "sky"),
    "recomputed": ("recompute_outputs too", "blue"),
}


def peers(results: Results, path: Path, source: str) -> bool:
    """Draws the step time of each peer over two ranks, relative to the unsynchronized layer."""
    names, measured = synchronized(results)
    chosen = [case for case in measured if case["ranks"] == 2 and case["layout"] == layouts(case["shape"])[0]]
    if not chosen:
        return False
    chosen.sort(key=elements)
    note = f"{where(results)}; medians and quartiles of the rounds"
    with chart(
        path, "Step time over two ranks, relative to nn.BatchNorm", note, source, _ROW * len(chosen), 130
    ) as axes:
        axes.set_xscale("log", base=2)
        axes.axvline(1, color=COLORS["text"], linewidth=1)
        ends = []
        for number, name in enumerate(names):
            rows = [row for row, case in enumerate(chosen) if name in case["microseconds"]]
            low, middle, high = zip(*(quartiles(ratios(chosen[row], name, "local")) for row in rows), strict=True)
            heights = [row + 0.8 / len(names) * (number - (len(names) - 1) / 2) for row in rows]
            ends += [*low, *high]
            label, color = _PEERS[name]
            axes.hlines(heights, low, high, COLORS[color], linewidth=2)
            axes.plot(middle, heights, "s", color=COLORS[color], markersize=6, markeredgewidth=0, label=label)
        axes.set_yticks(range(len(chosen)), [" x ".join(map(str, case["shape"])) for case in chosen])
        axes.set_ylim(len(chosen) - 0.5, -0.5)
        axes.set_xlim(min(ends) / 1.1, max(ends) * 1.1)
        axes.xaxis.set_major_locator(LogLocator(2, numticks=20))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    return True


def stored(results: Results, path: Path, source: str) -> bool:
    """Draws the memory stored for backward, relative to torch's layers, for each network."""
    measured = of_section(results, "stored")
    if not measured:
        return False
    with chart(path, "Stored for the backward pass", where(results), source, 2 * _ROW * len(measured), 160) as axes:
        for number, (variant, (label, color)) in enumerate(_VARIANTS.items()):
            shares = [case["bytes"][variant] / case["bytes"]["plain"] for case in measured]
            heights = [row + 0.28 * (number - 1) for row in range(len(measured))]
            bars = axes.barh(heights, shares, 0.24, color=COLORS[color], label=label)
            axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=4, color=COLORS["muted"])
        axes.set_yticks(range(len(measured)), [case["network"] for case in measured])
        axes.set_ylim(len(measured) - 0.5, -0.5)
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
    return True


CHARTS = {"peers": peers, "stored": stored}


def draw_all(results: Results, directory: Path) -> list[Path]:
    """Draws each chart whose data is in ``results``. Returns the paths; each file contains a digest of the results."""
    directory.mkdir(parents=True, exist_ok=True)
    source = f"results {hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]}"
    paths = {directory / f"{name}.svg": draw for name, draw in CHARTS.items()}
    return [path for path, draw in paths.items() if draw(results, path, source)]
