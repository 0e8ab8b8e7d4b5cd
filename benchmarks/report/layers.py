"""Tables of the section layers: what synchronization costs, where it goes, and what is counted."""

import statistics

from . import cells
from .cells import Case, Results

# Counts do not depend on the size of the input but through that of the messages: one shape says it all.
_COUNTED = (8, 64, 56, 56)

_SYNCED = ("ours", "naive", "fairscale", "torch_sync", "bagua_contrib", "inplace_abn")


def measured_peers(results: Results) -> list[str]:
    """Returns the synchronized peers that any case has."""
    names = {name for case in cells.cases(results, "layers") for name in case["microseconds"]}
    return [name for name in _SYNCED if name in names]


def _ranks(case: Case, results: Results) -> str:
    """Marks jobs with less than a core for each rank."""
    return f"{case['ranks']}{'*' if case['ranks'] > results['machine']['cores'] else ''}"


def headline_table(results: Results) -> str:
    """Over all inputs that were measured with so many ranks of one thread: geometric mean (smallest to largest)."""
    peers = measured_peers(results)
    shown = [case for case in cells.cases(results, "layers") if case["threads"] == 1]

    def cell(cases: list[Case], name: str, other: str) -> str:
        medians = [statistics.median(cells.ratios(case, name, other)) for case in cases if name in case["microseconds"]]
        if not medians:
            return ""
        return f"{statistics.geometric_mean(medians):.2f} ({min(medians):.2f} to {max(medians):.2f})"

    def row(ranks: int) -> list[str]:
        cases = [case for case in shown if case["ranks"] == ranks]
        pairs = [(name, "local") for name in peers]
        pairs += [("ours", name) for name in peers if name != "ours"]
        return [_ranks(cases[0], results), str(len(cases)), *(cell(cases, *pair) for pair in pairs)]

    header = ["ranks", "inputs", *(f"{name} / local" for name in peers)]
    header += [f"ours / {name}" for name in peers if name != "ours"]
    return cells.table(header, map(row, sorted({case["ranks"] for case in shown})))


def layers_table(results: Results) -> str:
    """Each peer's step over that of the layer that does not synchronize, and over each other; ratios first."""
    peers = measured_peers(results)

    def row(case: Case) -> list[str]:
        present = [name for name in ["local", *peers] if name in case["microseconds"]]
        shown = [cells.spread(cells.ratios(case, name, "local")) if name in present else "" for name in peers]
        others = [name for name in peers if name != "ours"]
        shown += [
            f"{statistics.median(cells.ratios(case, 'ours', name)):.2f}" if name in present else "" for name in others
        ]
        floor = f"{statistics.median(cells.floor_ratios(case, 'ours')):.2f}"
        times = [cells.milliseconds(case, name) for name in ("ours", "local")]
        return [_ranks(case, results), *cells.key(case), *shown, floor, *times]

    header = ["ranks", "input of each", "layout", "threads each", *(f"{name} / local" for name in peers)]
    header += [f"ours / {name}" for name in peers if name != "ours"] + ["floor / ours", "ours, ms", "local, ms"]
    return cells.table(header, map(row, cells.cases(results, "layers")))


def phases_table(results: Results) -> str:
    """Forward + backward in milliseconds, and the share of both that the host spent in collectives."""
    peers = ["local", *measured_peers(results)]

    def cell(case: Case, name: str) -> str:
        times = case["microseconds"]
        if name not in times:
            return ""
        passes = [cells.milliseconds(case, f"{name} {part}") for part in ("forward", "backward")]
        shares = [
            (forward + backward) / total
            for forward, backward, total in zip(
                times[f"{name} forward collectives"], times[f"{name} backward collectives"], times[name], strict=True
            )
        ]
        return f"{passes[0]} + {passes[1]}" + (f" ({statistics.median(shares):.0%})" if name != "local" else "")

    def row(case: Case) -> list[str]:
        alone = cells.milliseconds(case, "collectives") if case["ranks"] > 1 else ""
        return [
            _ranks(case, results), cells.shape_of(case), case["layout"], *(cell(case, name) for name in peers), alone
        ]  # fmt: skip

    shown = [case for case in cells.cases(results, "layers") if case["threads"] == 1]
    return cells.table(["ranks", "input of each", "layout", *peers, "our collectives alone"], map(row, shown))


def counts_table(results: Results) -> str:
    """What was counted in one step of each peer, forward + backward."""
    counted = [case for case in cells.cases(results, "layers") if "counts" in case and case["layout"] == "planar"]
    chosen = [case for case in counted if tuple(case["shape"]) == _COUNTED] or counted
    first_of_ranks = {case["ranks"]: case for case in reversed(chosen)}

    def row(case: Case, name: str) -> list[str]:
        counts = case["counts"][name]
        forward, backward = counts["forward"], counts["backward"]
        fields = ("collectives", "payload", "written", "waits", "reads", "ops", "large")
        both = [f"{forward[field]} + {backward[field]}".replace("None", "?") for field in fields]
        return [str(case["ranks"]), name, *both, f"{counts['peak'] / counts['input']:.2f}"]

    header = ["ranks", "peer", "collectives", "payload, bytes", "written, bytes", "waits", "reads", "dispatched ops"]
    header += ["large allocations", "peak memory / input"]
    rows = [row(case, name) for _, case in sorted(first_of_ranks.items()) for name in case["counts"]]
    return cells.table(header, rows)
