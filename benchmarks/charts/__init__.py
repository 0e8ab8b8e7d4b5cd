"""Charts of recorded results, one file each: a function that draws on a figure, or returns False for lack of data."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from . import peers, samples

CHARTS: dict[str, Callable[[Figure, dict[str, Any]], bool]] = {
    "peers": peers.draw,
    "samples": samples.draw,
}

_STYLE = {
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be searched, and the file is small
    "svg.hashsalt": "bagua_syncbn",
}


def digest(results: dict[str, Any]) -> str:
    """Identifies results. Each SVG carries that of the results that it shows."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def draw_all(results: dict[str, Any], directory: Path) -> list[Path]:
    """Draws each chart that there are data for, and returns the paths of the files."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(_STYLE):
        for name, draw in CHARTS.items():
            figure = Figure(figsize=(10, 5.6), layout="constrained")
            if not draw(figure, results):
                continue
            paths.append(directory / f"{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None, "Description": f"results {digest(results)}"})
    return paths
