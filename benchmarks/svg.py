"""Charts as small SVG files, with selectable text and colors for light and dark mode.

Imports matplotlib, which measurements do not need.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 520  # readable on a phone
_ABOVE, _BELOW = 84, 34  # title and legend; tick labels

# Okabe and Ito's colors, distinguishable with any color vision: (light mode, dark mode).
_COLORS = {
    "paper": ("#ffffff", "#14171c"),
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9da7b3"),
    "grid": ("#d8dee4", "#30363d"),
    "blue": ("#0072b2", "#56a9e0"),
    "sky": ("#9ccbe8", "#2f5f80"),
    "orange": ("#d97706", "#f0a030"),
    "red": ("#c2410c", "#f2784b"),
}
COLORS = {name: light for name, (light, _) in _COLORS.items()}
_FONT = "DejaVu Sans"  # matplotlib positions text with this font's metrics
_STYLE = {
    "font.sans-serif": [_FONT],
    "font.size": 11,
    "text.color": COLORS["text"],
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.xmargin": 0.0,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "grid.color": COLORS["grid"],
    **{f"{axis}tick.{part}": 0 for axis in "xy" for part in ("major.size", "minor.size")},
    "xtick.labelcolor": COLORS["muted"],
    "ytick.labelcolor": COLORS["text"],
    "svg.fonttype": "none",
    "svg.hashsalt": "bagua_syncbn",
}


def _round(tag: re.Match[str]) -> str:
    """Rounds the coordinates in a tag, because more digits differ between versions of matplotlib."""
    return re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", tag[0])


@contextmanager
def chart(path: Path, title: str, note: str, source: str, height: float, left: float) -> Iterator[Axes]:
    """Yields axes with this ``height`` and ``left`` margin, and writes the file at the end.

    ``note`` is the line below the title; ``source`` identifies the data in the file's description.
    """
    full = height + _ABOVE + _BELOW
    with rc_context(_STYLE):
        figure = Figure((WIDTH / 72, full / 72), dpi=72, facecolor=COLORS["paper"])
        figure.text(12 / WIDTH, 1 - 24 / full, title, fontsize=14, fontweight="bold")
        figure.text(12 / WIDTH, 1 - 42 / full, note, color=COLORS["muted"])
        axes = figure.add_axes((left / WIDTH, _BELOW / full, 1 - (left + 20) / WIDTH, height / full))
        yield axes
        where = {"loc": "upper left", "bbox_to_anchor": (6 / WIDTH, 1 - 50 / full), "ncols": 4}
        figure.legend(**where, frameon=False, handlelength=1.4, handletextpad=0.5, columnspacing=1.4)
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    body = drawn.getvalue().partition("<defs>")[2].replace(f"'{_FONT}', sans-serif", "system-ui, sans-serif")
    for name, color in COLORS.items():
        body = body.replace(color, f"var(--{name})")
    body = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", body)
    body = re.sub(r"<[^>]*>", _round, body)
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    light, dark = (";".join(f"--{name}:{pair[mode]}" for name, pair in _COLORS.items()) for mode in (0, 1))
    path.write_text(
        f'<svg {names} width="{WIDTH}" height="{full:g}" viewBox="0 0 {WIDTH} {full:g}" role="img">\n'
        f"<title>{escape(title)}</title><desc>{escape(source)}</desc>\n"
        f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>\n<defs>{body}",
        encoding="utf-8",
    )
