"""Draws the losses of ``make demo`` for README:

make demo && python -m benchmarks.demo build/demo/results.json docs/pictures/demo.svg
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from .svg import COLORS, chart

_RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "unsynced": ("4 ranks, nn.BatchNorm", {"color": COLORS["orange"], "linewidth": 1.8}),
    "reference": ("one process", {"color": COLORS["sky"], "linewidth": 5}),
    "synced": ("4 ranks, synchronized", {"color": COLORS["blue"], "linewidth": 1.5, "dashes": (3.3, 2)}),
}
_WINDOW = 12


def draw(results: dict[str, Any], path: Path) -> None:
    title = "Four synchronized ranks train like one process"
    note = f"handwritten digits, 8 images per step in total; training loss, means over {_WINDOW} steps"
    with chart(path, title, note, "make demo", 190, 34) as axes:
        for name, (label, style) in _RUNS.items():
            losses = results[name]["losses"]
            ends = range(_WINDOW, len(losses) + 1, _WINDOW)
            axes.plot(ends, [mean(losses[end - _WINDOW : end]) for end in ends], label=label, **style)
        axes.grid(axis="y")
        axes.grid(visible=False, axis="x")
        axes.set_xlim(0, len(results["reference"]["losses"]))
        axes.set_ylim(bottom=0)


if __name__ == "__main__":
    recorded, target = map(Path, sys.argv[1:])
    draw(json.loads(recorded.read_text(encoding="utf-8")), target)
