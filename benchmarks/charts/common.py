"""What the charts share: a color and a name for each peer, where and when it was measured, axes of ratios."""

from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Colors that can be told apart with any kind of color vision (Okabe and Ito), and a marker for those who print in gray.
PEERS = {
    "ours": ("bagua_syncbn", "#0072B2", "o"),
    "local": ("nn.BatchNorm, not synchronized", "#000000", "_"),
    "naive": ("naive all-reduce", "#E69F00", "s"),
    "fairscale": ("fairscale", "#D55E00", "^"),
    "torch_sync": ("nn.SyncBatchNorm", "#009E73", "D"),
}


def where(results: dict[str, Any]) -> str:
    """Returns machine, version and date in one line."""
    machine = results["machine"]
    return f"{machine['processor']}, {machine['cores']} cores, torch {results['versions']['torch']}, {results['date']}"


def shape_of(case: dict[str, Any]) -> str:
    return " x ".join(map(str, case["shape"]))


def log_axis(axis: Any, format_string: str = "{:g}") -> None:
    """Plain numbers on a logarithmic axis, at 1, 2 and 5."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_string.format(value)))
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_minor_formatter(NullFormatter())
