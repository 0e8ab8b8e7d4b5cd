"""Losses of ``make demo``, for the first page of the documentation:

make demo && python -m benchmarks.demo build/demo/results.json docs/pictures/demo.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

from .picture import WIDTH, Picture

_RUNS = {
    "unsynced": ("4 ranks, nn.BatchNorm", "orange", 1.8, ""),
    "reference": ("one process", "sky", 5.0, ""),
    "synced": ("4 ranks, synchronized", "blue", 1.5, "5 3"),
}
_WINDOW, _LEFT, _HEIGHT = 12, 40, 190


def draw(results: dict[str, Any]) -> Picture:
    picture = Picture("Four synchronized ranks train like one process", "handwritten digits, 8 images a step in all")
    picture.legend([(style, name) for name, style, *_ in _RUNS.values()])
    losses = {name: results[name]["losses"] for name in _RUNS}
    means = {
        name: [sum(values[i : i + _WINDOW]) / _WINDOW for i in range(0, len(values) - _WINDOW + 1, _WINDOW)]
        for name, values in losses.items()
    }
    points = len(means["reference"])
    bottom, right = picture.height + _HEIGHT, WIDTH - 14
    highest = max(map(max, means.values()))

    def place(number: float, loss: float) -> tuple[float, float]:
        return _LEFT + (right - _LEFT) * number / (points - 1), bottom - _HEIGHT * loss / highest

    for tick in [0.5 * half for half in range(int(2 * highest) + 1)]:
        picture.line([place(0, tick), place(points - 1, tick)], "grid")
        picture.text(_LEFT - 6, place(0, tick)[1] + 4, f"{tick:g}", "small", "end")
    for name, (_, style, width, dashes) in _RUNS.items():
        picture.line([place(*point) for point in enumerate(means[name])], style, width, dashes)
    picture.text(right, bottom + 16, f"{len(losses['reference'])} steps", "small", "end")
    picture.text(_LEFT, bottom + 16, f"training loss, means of {_WINDOW} steps", "small")
    picture.height = bottom + 26
    return picture


if __name__ == "__main__":
    recorded, target = map(Path, sys.argv[1:])
    target.write_text(draw(json.loads(recorded.read_text(encoding="utf-8"))).svg("make demo"), encoding="utf-8")
