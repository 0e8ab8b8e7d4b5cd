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
        ".title{font-size:14px;font-weight:600}text.on{fill:var(--paper)}",
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

    def box(self, x: float, width: float, name: str, note: str = "", filled: bool = False, height: float = 40) -> None:
        """Adds a box with a line or two of text at the present height, which stays."""
        style = "blue" if filled else "line-grid"
        corners = f'rx="5" class="{style}"'
        self.parts.append(f'<rect x="{x:g}" y="{self.height:g}" width="{width:g}" height="{height:g}" {corners}/>')
        middle = self.height + height / 2 + 4.5
        self.text(x + width / 2, middle - (7 if note else 0), name, "on" if filled else "text", "middle")
        self.text(x + width / 2, middle + 9, note, "on" if filled else "small", "middle")

    def arrow(self, x: float, y: float, note: str = "") -> None:
        """Adds an arrow of 18 pixels down from a point."""
        self.line([(x, y), (x, y + 14)], "muted", 1.4)
        self.parts.append(f'<path d="M{x - 4:g} {y + 12:g}L{x:g} {y + 18:g}L{x + 4:g} {y + 12:g}Z" class="muted"/>')
        self.text(x + 8, y + 13, note, "small")

    def arrow_right(self, x: float, y: float, length: float, note: str = "") -> None:
        """Adds an arrow to the right from a point."""
        end = x + length
        self.line([(x, y), (end - 4, y)], "muted", 1.4)
        self.parts.append(f'<path d="M{end - 6:g} {y - 4:g}L{end:g} {y:g}L{end - 6:g} {y + 4:g}Z" class="muted"/>')
        self.text(x + 3, y - 4, note, "small")

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
