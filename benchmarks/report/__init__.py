"""Markdown tables of recorded results. All figures that a run can change are made here, for the two pages of docs/."""

import re
from collections.abc import Callable

from .cells import Results
from .kernels import local_table, ops_table, summary
from .layers import counts_table, headline_table, layers_table, phases_table
from .machine import machine_table, peers_table
from .scale import collectives_table, crossover_table, deviation_table, fit_table, scale_table
from .training import training_table

_BLOCK = re.compile(r"(<!-- begin (?P<file>\S+) (?P<table>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES: dict[str, Callable[[Results], str]] = {
    "machine": machine_table,
    "summary": summary,
    "ops": ops_table,
    "local": local_table,
    "peers": peers_table,
    "headline": headline_table,
    "layers": layers_table,
    "phases": phases_table,
    "counts": counts_table,
    "training": training_table,
    "fit": fit_table,
    "collectives": collectives_table,
    "scale": scale_table,
    "crossover": crossover_table,
    "deviation": deviation_table,
}

# The section that a table needs, where it is not that of its name.
_NEEDS = {
    "headline": "layers",
    "phases": "layers",
    "counts": "layers",
    "fit": "collectives",
    "scale": "collectives",
    "crossover": "collectives",
    "deviation": "collectives",
}
_ALWAYS = ("machine", "summary")

# Tables with a row for each case: too long and too wide for the end of a run.
DETAILS = ("ops", "local", "layers", "phases", "collectives")


def table_names(results: Results) -> list[str]:
    """Returns the tables that these results have data for."""
    measured = {case["section"] for case in results["cases"]}
    return [name for name in TABLES if name in _ALWAYS or _NEEDS.get(name, name) in measured]


def report(results: Results, leave_out: tuple[str, ...] = ()) -> str:
    """Returns the tables, each under its name and what it shows."""
    parts = []
    for name in (name for name in table_names(results) if name not in leave_out):
        what = (TABLES[name].__doc__ or "").strip()
        parts.append("\n\n".join(filter(None, [f"## {name}", what, TABLES[name](results)])))
    return "\n\n".join(parts) + "\n"


def update_page(text: str, results: dict[str, Results]) -> str:
    """Replaces what stands between ``<!-- begin FILE TABLE -->`` and ``<!-- end -->``, for the files in ``results``."""

    def replace(block: re.Match[str]) -> str:
        if block["file"] not in results:
            return block[0]
        return f"{block[1]}\n{TABLES[block['table']](results[block['file']])}\n\n{block[4]}"

    return _BLOCK.sub(replace, text)
