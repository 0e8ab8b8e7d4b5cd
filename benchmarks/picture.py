"""Small SVG pictures whose text stays text and whose colors follow the reader's light or dark mode."""

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 520  # such that text can be read on a phone

# Okabe and Ito's colors, which can be told apart with any kind of color vision; the second of each is for dark mode.
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


def _style() -> str:
    rules = [
        "text{font:13px system-ui,sans-serif;fill:var(--text)}.small{font-size:11px;fill:var(--muted)}"
        ".title{font-size:14px;font-weight:600}",
        *(f".{name}{{fill:var(--{name})}}.line-{name}{{stroke:var(--{name});fill:none}}" for name in _COLORS),
    ]
    for mode, query in enumerate(("{}", "@media(prefers-color-scheme:dark){{{}}}")):
        colors = ";".join(f"--{name}:{pair[mode]}" for name, pair in _COLORS.items())
        rules.append(query.format(f"svg{{{colors}}}"))
    return "<style>" + "".join(rules) + "</style>"


class Picture:
    """Shapes from top to bottom; ``height`` grows with what is drawn."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.parts: list[str] = []
        self.title = title
        self.text(12, 24, title, "title")
        self.text(12, 42, subtitle, "small")
        self.height = 56.0

    def text(self, x: float, y: float, text: str, style: str = "text", anchor: str = "start") -> None:
        if text:
            self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, style: str) -> None:
        self.parts.append(f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" class="{style}"/>')

    def line(self, points: Iterable[tuple[float, float]], style: str, width: float = 1, dashes: str = "") -> None:
        path = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(f'<polyline points="{path}" class="line-{style}" stroke-width="{width:g}"{dashed}/>')

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """Adds a line of colors and names."""
        x = 12.0
        for style, name in entries:
            self.rectangle(x, self.height, 12, 12, style)
            self.text(x + 17, self.height + 10.5, name)
            x += 36 + 7.4 * len(name)
        self.height += 26

    def bars(self, label: str, values: Sequence[tuple[str, float, str]], full: float, left: float = 170) -> None:
        """Adds a group of bars: style, length as a share of ``full``, text behind it."""
        room = WIDTH - left - 62
        self.text(left - 8, self.height + 7 * len(values) + 4, label, anchor="end")
        for style, value, shown in values:
            width = max(1.0, room * value / full)
            self.rectangle(left, self.height, width, 12, style)
            self.text(left + width + 5, self.height + 10, shown, "small")
            self.height += 14
        self.height += 8

    def svg(self, source: str) -> str:
        """Returns the file, which says what it shows the data of."""
        size = f'width="{WIDTH}" height="{self.height:g}" viewBox="0 0 {WIDTH} {self.height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        notes = f"<title>{escape(self.title)}</title><desc>{escape(source)}</desc>"
        paper = '<rect width="100%" height="100%" rx="6" class="paper"/>'
        return "\n".join([head, notes, _style(), paper, *self.parts, "</svg>"]) + "\n"
