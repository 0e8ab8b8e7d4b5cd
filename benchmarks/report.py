"""Tables and charts of recorded results; measures nothing.

    python -m benchmarks.report build/bench/results.json
    python -m benchmarks.report benchmarks/results/*.json --into docs/benchmarks.md README.md --charts docs/charts

All figures that a run can change are made here, for the end of a run and for these pages.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from . import charts
from .core.disturbance import QUIET_CORES
from .core.machine import exchange_of
from .core.tables import Results, quartiles, table
from .cpu.report import anew_table, host_table, local_table, ops_table, process_table, stored_table
from .ranks.report import (
    compiled_table,
    exchange_table,
    headline_table,
    layers_table,
    peers_table,
    phases_table,
    summary_table,
    training_table,
)

_BLOCK = re.compile(r"(<!-- begin (?P<file>\S+) (?P<table>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def machine_table(results: Results) -> str:
    machine, versions, settings = results["machine"], results["versions"], results["settings"]
    foreign = [case["foreign_cores"] for case in results["cases"] if case.get("foreign_cores") is not None]
    dropped = sum(case.get("dropped", 0) for case in results["cases"])
    devices = ", ".join(machine.get("devices", []))
    rows = [
        ["measured", f"{results['date']}, {settings['minutes']:g} minutes"],
        ["processor", f"{machine['processor']}, {machine['cores']} cores{', virtual' * machine['virtual']}"],
        *([["GPUs", devices]] if devices else []),
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["small messages", exchange_of(results)],
        ["malloc", "keeps freed memory" if settings["keeps_memory"] else "the system's defaults"],
    ]
    if dropped:
        rows.append(["rounds dropped", f"{dropped}, because memory was mapped in them"])
    if foreign:
        quiet = f"at most {max(foreign):.2f}, on average over a case; {quartiles(foreign)[1]:.2f} in half of them"
        rows.append(["cores used by others", quiet])
        if quartiles(foreign)[1] > QUIET_CORES:
            rows.append(["**disturbed**", "in most cases: small differences mean nothing here, and times little"])
    return table(["", ""], rows)


# Each with the section that it needs.
TABLES: dict[str, tuple[str | None, Callable[[Results], str]]] = {
    "machine": (None, machine_table),
    "process": ("local", process_table),
    "host": ("host", host_table),
    "stored": ("stored", stored_table),
    "anew": ("anew", anew_table),
    "ops": ("ops", ops_table),
    "local": ("local", local_table),
    "peers": ("peers", peers_table),
    "exchange": ("exchange", exchange_table),
    "headline": ("layers", headline_table),
    "summary": ("layers", summary_table),
    "layers": ("layers", layers_table),
    "phases": ("layers", phases_table),
    "compiled": ("compiled", compiled_table),
    "training": ("training", training_table),
}

# Not for the end of a run: tables with a row for each case.
DETAILS = ("ops", "local", "layers", "phases")


def table_names(results: Results) -> list[str]:
    """Returns the tables that these results have data for."""
    measured = {case["section"] for case in results["cases"]}
    return [name for name, (section, _) in TABLES.items() if section is None or section in measured]


def report(results: Results, leave_out: tuple[str, ...] = ()) -> str:
    """Returns the tables, each under its name and what it shows."""
    parts = []
    for name in (name for name in table_names(results) if name not in leave_out):
        make = TABLES[name][1]
        parts.append("\n\n".join([f"## {name}", (make.__doc__ or "").strip(), make(results)]))
    return "\n\n".join(parts) + "\n"


def update_page(text: str, results: dict[str, Results]) -> str:
    """Replaces what stands between ``<!-- begin FILE TABLE -->`` and ``<!-- end -->``, for the files in ``results``."""

    def replace(block: re.Match[str]) -> str:
        if block["file"] not in results:
            return block[0]
        return f"{block[1]}\n{TABLES[block['table']][1](results[block['file']])}\n\n{block[4]}"

    return _BLOCK.sub(replace, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--into", nargs="+", type=Path, metavar="PAGE", help="write the tables into these, print none")
    parser.add_argument("--charts", type=Path, metavar="DIRECTORY", help="draw the charts there")
    arguments = parser.parse_args()
    results = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in arguments.files}
    for page in arguments.into or ():
        page.write_text(update_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    if arguments.into is None:
        for name, recorded in results.items():
            print(f"# {name}\n\n{report(recorded)}")
    if arguments.charts is not None:
        for recorded in results.values():
            charts.draw_all(recorded, arguments.charts)


if __name__ == "__main__":
    main()
