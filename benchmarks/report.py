"""Makes tables and charts of recorded results.

    python -m benchmarks.report build/bench/results.json
    python -m benchmarks.report benchmarks/results/*.json --into docs/benchmarks.md README.md --charts docs/charts

Generates all measured figures on these pages.
"""

import argparse
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

from .recorded import Results
from .sections import SECTIONS

_BLOCK = re.compile(r"(<!-- begin (?P<file>\S+) (?P<table>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def machine_line(results: Results) -> str:
    """The machine, its software and settings."""
    machine, versions, settings = results["machine"], results["versions"], results["settings"]
    devices = [
        f"{machine['processor']}, {machine['cores']} cores{', virtual' * machine['virtual']}",
        *machine.get("devices", []),
    ]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{results['date']}, {', '.join(devices)}; {software}; messages {settings['exchange']}."


def tables(results: Results) -> dict[str, Callable[[Results], str]]:
    """Returns the tables for which ``results`` has data, in the order of the sections."""
    measured = {case["section"] for case in results["cases"]}
    found = {"machine": machine_line}
    for section in filter(measured.__contains__, SECTIONS):
        found |= SECTIONS[section].TABLES
    return found


def report(results: Results) -> str:
    """Returns the tables, each with its name and description."""
    return "".join(
        f"## {name}\n\n{inspect.getdoc(make)}\n\n{make(results)}\n\n" for name, make in tables(results).items()
    )


def update_page(text: str, results: dict[str, Results]) -> str:
    """Fills the blocks from ``<!-- begin FILE TABLE -->`` to ``<!-- end -->`` of each FILE in ``results``."""

    def replace(block: re.Match[str]) -> str:
        if block["file"] not in results:
            return block[0]
        return f"{block[1]}\n{tables(results[block['file']])[block['table']](results[block['file']])}\n\n{block[4]}"

    return _BLOCK.sub(replace, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--into", nargs="+", type=Path, metavar="PAGE", help="fill in the tables here instead of printing"
    )
    parser.add_argument("--charts", type=Path, metavar="DIRECTORY", help="draw the charts here")
    arguments = parser.parse_args()
    results = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in arguments.files}
    for page in arguments.into or ():
        page.write_text(update_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    if arguments.into is None:
        for name, recorded in results.items():
            print(f"# {name}\n\n{report(recorded)}")
    if arguments.charts is not None:
        from .charts import draw_all  # needs matplotlib

        for recorded in results.values():
            draw_all(recorded, arguments.charts)


if __name__ == "__main__":
    main()
