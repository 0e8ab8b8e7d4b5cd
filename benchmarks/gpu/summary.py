"""Tables of recorded results, in Markdown. ``python benchmarks/gpu/summary.py results.json`` prints all of them."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import targets
from shapes import DTYPES, LAYOUTS, OPS


def table(header: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine_table(results: dict[str, Any]) -> str:
    machine = {"date": results.get("date"), "commit": results.get("commit"), **results.get("machine", {})}
    bandwidth = targets.copy_bandwidth(results)
    if bandwidth is not None:
        machine["copy bandwidth, measured"] = f"{bandwidth / 1e6:.2f} TB/s, read and written"
    return table(["", ""], machine.items())


def parts_table(results: dict[str, Any]) -> str:
    rows = ([part["name"], part["outcome"], f"{part['seconds']:.0f} s"] for part in results.get("parts", []))
    return table(["part", "outcome", "took"], rows)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def targets_table(results: dict[str, Any]) -> str:
    rows = (
        [target.what, f"{'at most' if target.at_most else 'at least'} {target.bound}", number(target.measured),
         target.verdict, target.where]
        for target in targets.judge(results)
    )  # fmt: skip
    return table(["target", "bound", "measured", "", "where"], rows)


def networks_table(results: dict[str, Any]) -> str:
    """How many times as long ATen's kernels and torch's layer take: the mean over the inputs of each network."""
    ops, layers = targets.of_kind(results, "ops"), targets.of_kind(results, "layer")
    networks = list(dict.fromkeys(case["network"] for case in ops + layers))
    columns = [(layout, dtype) for layout in LAYOUTS for dtype in DTYPES]

    def cell(network: str, layout: str, dtype: str) -> str:
        def mean(cases: list[dict[str, Any]], ratio: Any) -> str:
            chosen = [c for c in cases if (c["network"], c["layout"], c["dtype"]) == (network, layout, dtype)]
            return f"{geometric_mean(ratio(case) for case in chosen):.2f}" if chosen else "-"

        return f"{mean(ops, targets.ratio_to_aten)}, {mean(layers, targets.ratio_to_torch)}"

    rows = ([network, *(cell(network, *column) for column in columns)] for network in networks)
    return table(["kernels, layer", *(f"{layout} {dtype}" for layout, dtype in columns)], rows)


def ops_table(results: dict[str, Any]) -> str:
    """Every input: medians in microseconds with their spread, and for ours the part of the copy bandwidth."""
    bandwidth = targets.copy_bandwidth(results)
    rows = []
    for case in targets.of_kind(results, "ops"):
        cells = []
        for op in OPS:
            ours, theirs = (case["microseconds"][f"{side} {op}"] for side in ("ours", "aten"))
            spread = f"{median(ours):.1f} ({min(ours):.1f} to {max(ours):.1f})"
            if bandwidth is not None and op in targets.PASSES:
                spread += f", {targets.fraction_of_copy(case, op, bandwidth):.0%}"
            cells.append(f"{spread}; {median(theirs):.1f}")
        notes = [f"disagrees: {n}" for n in case["disagreements"]] + [f"host-bound: {n}" for n in case["behind"]]
        rows.append([targets.name(case), *cells, f"{targets.ratio_to_aten(case):.2f}", "; ".join(notes)])
    return table(["input", *(f"{op}: ours; ATen's" for op in OPS), "ATen's / ours", ""], rows)


def layers_table(results: dict[str, Any]) -> str:
    rows = []
    for case in targets.of_kind(results, "layer"):
        times = {key: median(samples) for key, samples in case["microseconds"].items()}
        cells = [f"{times[f'{side} {part}']:.1f}" for part in ("forward", "step") for side in ("ours", "torch")]
        rows.append([targets.name(case), *cells, f"{targets.ratio_to_torch(case):.2f}"])
    header = ["layer on", "forward, us", "torch's", "step, us", "torch's", "torch's / ours"]
    return table(header, rows)


def counts_table(results: dict[str, Any]) -> str:
    kinds = ("kernels", "copies", "fills", "collectives", "waits")
    rows = (
        [targets.name(case), which, *(counted[kind] for kind in kinds)]
        for case in targets.of_kind(results, "counts")
        for which, counted in case["counts"].items()
    )
    return table(["layer on", "pass", *kinds], rows)


def short(results: dict[str, Any]) -> str:
    """What ``make gpu`` ends with."""
    errors = [f"{e['what']}: {e['error']}" for e in targets.of_kind(results, "error")]
    wrong = [f"{targets.name(c)}: {', '.join(c['disagreements'])}"
             for c in targets.of_kind(results, "ops") if c["disagreements"]]  # fmt: skip
    blocks = [machine_table(results), parts_table(results), targets_table(results), networks_table(results)]
    if results.get("dry_run"):
        blocks.insert(0, "DRY RUN on a CPU, with stand-ins for what needs a GPU: these figures mean nothing.")
    failed = [part for part in results.get("parts", []) if part["details"]]
    for part in failed:
        blocks.append(f"{part['name']}: {part['outcome']}\n" + "\n".join(part["details"].splitlines()[-5:]))
    if wrong:
        blocks.append("Kernels that disagree with ATen's:\n" + "\n".join(wrong))
    if errors:
        blocks.append("Cases that raised:\n" + "\n".join(errors))
    return "\n\n".join(blocks)


def full(results: dict[str, Any]) -> str:
    blocks = [short(results), ops_table(results), layers_table(results), counts_table(results)]
    return "\n\n".join(blocks)


def main() -> None:
    for path in sys.argv[1:]:
        print(full(json.loads(Path(path).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
