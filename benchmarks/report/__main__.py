"""Tables and charts of recorded results; measures nothing.

python -m benchmarks.report build/bench/results.json
python -m benchmarks.report benchmarks/results/*.json --into docs/benchmarks.md docs/benchmark_tables.md \\
    --charts docs/charts
"""

import argparse
import json
from pathlib import Path

from .. import charts
from . import report, update_page


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
