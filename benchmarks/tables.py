"""Markdown tables of recorded results. All that docs/benchmarks.md shows is made by these functions."""

import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

Results = dict[str, Any]
Case = dict[str, Any]

MILLION = 10**6

# Sizes of the input that each op must read or write; a copy does two.
MOVED = {"stats": 1, "elemt": 2, "backward_reduce": 2, "backward_elemt": 3}
COPY_MOVES = 2
# The whole step does each of them once.
STEP_COPIES = sum(MOVED.values()) / COPY_MOVES
ELEMENT_SIZE = 4  # all inputs are float32

OPS_BOUND = 1.25
UNSYNCED_BOUND, PEER_BOUND, SYNCED_FROM = 0.6, 0.1, 1_500_000

_BLOCK = re.compile(r"(<!-- begin (?P<file>\S+) (?P<table>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def elements(case: Case) -> int:
    product = 1
    for size in case["shape"]:
        product *= size
    return product


def local_bound(case: Case) -> float:
    """What the step of one process may take, in those of F.batch_norm."""
    if elements(case) < MILLION:
        return 0.8
    return 0.25 if case["layout"] == "planar" else 0.4


def ratios(case: Case, name: str, other: str, factor: float = 1.0) -> list[float]:
    """Returns the ratio of two times in each round."""
    times = case["microseconds"]
    return [factor * a / b for a, b in zip(times[name], times[other], strict=True)]


def op_ratios(case: Case, op: str) -> list[float]:
    """Returns time of an op over time to copy as many bytes as it must move."""
    return ratios(case, op, "copy", COPY_MOVES / MOVED[op])


def floor_ratios(case: Case, other: str) -> list[float]:
    """Returns what the ratio to ``other`` would be if the step did nothing but move its bytes as fast as a copy does.

    Where ranks take part, and nothing but exchange their messages.
    """
    times = case["microseconds"]
    messages = times.get("collectives") or [0.0] * len(times["copy"])
    return [
        (STEP_COPIES * copy + message) / base
        for copy, message, base in zip(times["copy"], messages, times[other], strict=True)
    ]


def op_is_bounded(case: Case, op: str, results: Results) -> bool:
    """Whether the bytes that the op must move exceed the last-level cache."""
    cache = results["machine"]["last_level_cache"]
    return cache is not None and MOVED[op] * elements(case) * ELEMENT_SIZE > cache


def _spread(values: list[float], bound: float | None = None) -> str:
    """Median, minimum and quartiles; bold where the median misses its bound."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    shown = f"{median:.2f}"
    # As it is shown: nothing is a miss that reads like the bound.
    if bound is not None and float(shown) > bound:
        shown = f"**{shown}**"
    return f"{shown} ({min(values):.2f}; {low:.2f}-{high:.2f})"


def _milliseconds(case: Case, name: str) -> str:
    return f"{statistics.median(case['microseconds'][name]) / 1e3:.3g}"


def _over(values: list[float], bound: float | None) -> str:
    if bound is None:
        return ""
    excess = float(f"{statistics.median(values):.2f}") - bound
    return f"+{excess:.2f}" if excess > 1e-9 else "met"


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |" for line in lines)


def _cases(results: Results, section: str) -> list[Case]:
    return [case for case in results["cases"] if case["section"] == section]


def _key(case: Case) -> list[str]:
    return ["x".join(map(str, case["shape"])), case["layout"], str(case["threads"])]


def ops_table(results: Results) -> str:
    def row(case: Case) -> list[str]:
        cells = []
        for op in MOVED:
            bounded = op_is_bounded(case, op, results)
            cell = _spread(op_ratios(case, op), OPS_BOUND if bounded else None)
            cells.append(cell if bounded else f"*{cell}*")
        moved = COPY_MOVES * ELEMENT_SIZE * elements(case)
        return [*_key(case), *cells, f"{moved / statistics.median(case['microseconds']['copy']) / 1e3:.3g}"]

    header = ["input", "layout", "threads", *MOVED, "copy, GB/s"]
    return _table(header, map(row, _cases(results, "ops")))


def local_table(results: Results) -> str:
    def row(case: Case) -> list[str]:
        values, bound = ratios(case, "ours", "torch"), local_bound(case)
        return [
            *_key(case),
            case["path"],
            _spread(values, bound),
            f"{bound:g}",
            _over(values, bound),
            f"{statistics.median(floor_ratios(case, 'torch')):.2f}",
            f"{statistics.median(ratios(case, 'ours', 'copy', 1 / STEP_COPIES)):.2f}",
            _milliseconds(case, "ours"),
            _milliseconds(case, "torch"),
        ]

    header = ["input", "layout", "threads", "computed by", "ours / torch", "bound", "over", "floor / torch"]
    return _table([*header, "ours / floor", "ours, ms", "torch, ms"], map(row, _cases(results, "local")))


def ranks_table(results: Results) -> str:
    def row(case: Case) -> list[str]:
        bounded = elements(case) >= SYNCED_FROM
        cells = _key(case)
        for other, bound in (("unsynced", UNSYNCED_BOUND), ("fairscale", PEER_BOUND)):
            if other not in case["microseconds"]:
                cells += ["not installed", ""]
                continue
            values, limit = ratios(case, "ours", other), bound if bounded else None
            cells += [_spread(values, limit), _over(values, limit)]
        names = ("ours", "unsynced", "fairscale", "collectives")
        times = [_milliseconds(case, name) if name in case["microseconds"] else "" for name in names]
        return [*cells, f"{statistics.median(floor_ratios(case, 'unsynced')):.2f}", *times]

    header = ["input of each rank", "layout", "threads each", "ours / unsynced", "over", "ours / fairscale", "over"]
    header += ["floor / unsynced", "ours, ms", "unsynced, ms", "fairscale, ms", "collectives, ms"]
    return _table(header, map(row, _cases(results, "ranks")))


def _bounds(results: Results) -> Iterable[tuple[str, float, list[list[float]], list[list[float]]]]:
    """Yields each kind of bound, the bound, the ratios of the cases it applies to, and their floors."""
    ops, local, ranks = (_cases(results, section) for section in ("ops", "local", "ranks"))
    yield (
        f"ops, more bytes than the last-level cache: at most {OPS_BOUND:g} of copying them",
        OPS_BOUND,
        [op_ratios(case, op) for case in ops for op in MOVED if op_is_bounded(case, op, results)],
        [],
    )
    for bound, what in (
        (0.25, "planar, a million elements and more"),
        (0.4, "interleaved, a million elements and more"),
        (0.8, "fewer elements"),
    ):
        bounded = [case for case in local if local_bound(case) == bound]
        yield (
            f"one process, {what}: at most {bound:g} of `F.batch_norm`",
            bound,
            [ratios(case, "ours", "torch") for case in bounded],
            [floor_ratios(case, "torch") for case in bounded],
        )
    for other, bound, what in (
        ("unsynced", UNSYNCED_BOUND, "the unsynced layer"),
        ("fairscale", PEER_BOUND, "fairscale's"),
    ):
        bounded = [case for case in ranks if elements(case) >= SYNCED_FROM and other in case["microseconds"]]
        yield (
            f"two ranks, 1.5 million elements and more: at most {bound:g} of {what}",
            bound,
            [ratios(case, "ours", other) for case in bounded],
            [floor_ratios(case, other) for case in bounded],
        )


def summary(results: Results) -> str:
    """How many bounds of each kind are met, and how many would be missed even at the floor."""

    def row(what: str, bound: float, measured: list[list[float]], floors: list[list[float]]) -> list[str]:
        medians = [float(f"{statistics.median(values):.2f}") for values in measured]
        met = sum(median <= bound for median in medians)
        above = sum(statistics.median(values) > bound for values in floors)
        shown = f"{above} of {len(floors)}" if floors else "none"
        return [what, f"{met} of {len(medians)}", f"{min(medians):.2f} to {max(medians):.2f}", shown]

    header = ["bound", "met by", "medians", "floor above the bound"]
    return _table(header, (row(*kind) for kind in _bounds(results) if kind[2]))


def machine_table(results: Results) -> str:
    machine, versions, settings = results["machine"], results["versions"], results["settings"]
    foreign = [case["foreign_cores"] for case in results["cases"] if case["foreign_cores"] is not None]
    faults = [case["faults"] for case in results["cases"]]
    dropped = sum(case["dropped"] for case in results["cases"])
    rounds = sorted(len(case["microseconds"]["copy"]) for case in results["cases"])
    rows = [
        ["measured", f"{results['date']}, {settings['minutes']:g} minutes"],
        ["processor", f"{machine['processor']}, {machine['cores']} cores{', virtual' * machine['virtual']}"],
        ["caches", ", ".join(machine["caches"]) or "unknown"],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["malloc", "keeps freed memory" if settings["keeps_memory"] else "the system's defaults"],
        [
            "rounds of a case",
            f"{rounds[0]} to {rounds[-1]}; {dropped} in all dropped because memory was mapped in them",
        ],
        ["page faults of a round", f"{min(faults)} to {max(faults)} (medians of the cases)"],
        ["cores used by others", f"at most {max(foreign):.2f}, on average over a case" if foreign else "unknown"],
    ]
    return _table(["", ""], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "machine": machine_table,
    "summary": summary,
    "ops": ops_table,
    "local": local_table,
    "ranks": ranks_table,
}


def report(results: Results) -> str:
    """Returns all tables, each under its name."""
    measured = {case["section"] for case in results["cases"]}
    names = [name for name in TABLES if name in measured or name in ("machine", "summary")]
    return "\n\n".join(f"## {name}\n\n{TABLES[name](results)}" for name in names) + "\n"


def update_page(text: str, results: dict[str, Results]) -> str:
    """Replaces what stands between ``<!-- begin FILE TABLE -->`` and ``<!-- end -->``, for the files in ``results``."""

    def replace(block: re.Match[str]) -> str:
        if block["file"] not in results:
            return block[0]
        return f"{block[1]}\n{TABLES[block['table']](results[block['file']])}\n\n{block[4]}"

    return _BLOCK.sub(replace, text)
