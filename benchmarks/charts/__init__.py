"""Charts of recorded results, one file each: a function that returns a picture, or None for lack of data."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import peers, stored
from .picture import Picture

CHARTS: dict[str, Callable[[dict[str, Any]], Picture | None]] = {
    "peers": peers.draw,
    "stored": stored.draw,
}


def digest(results: dict[str, Any]) -> str:
    """Identifies results. Each SVG carries that of the results that it shows."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def draw_all(results: dict[str, Any], directory: Path) -> list[Path]:
    """Draws each chart that there are data for, and returns the paths of the files."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in CHARTS.items():
        picture = draw(results)
        if picture is not None:
            paths.append(directory / f"{name}.svg")
            paths[-1].write_text(picture.svg(f"results {digest(results)}"), encoding="utf-8")
    return paths
