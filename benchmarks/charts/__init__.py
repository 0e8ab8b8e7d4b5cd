"""Charts of recorded results, one file each: a function that draws on a figure, or returns False for lack of data."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from . import floor, over_ranks, peers, scale, training

CHARTS: dict[str, Callable[[Figure, dict[str, Any]], bool]] = {
    "peers": peers.draw,
    "ranks": over_ranks.draw,
    "floor": floor.draw,
    "training": training.draw,
    "scale": scale.draw,
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
    """Draws each chart that there are data for, as SVG and PNG, and returns the paths of the files."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(_STYLE):
        for name, draw in CHARTS.items():
            figure = Figure(figsize=(10, 5.6), layout="constrained")
            if not draw(figure, results):
                continue
            stem = directory / name
            figure.savefig(
                stem.with_suffix(".svg"), metadata={"Date": None, "Description": f"results {digest(results)}"}
            )
            figure.savefig(stem.with_suffix(".png"), dpi=110)
            paths += [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    return paths
