"""Tables of the sections ops and local, and how many bounds are met."""

import statistics
from collections.abc import Iterable

from . import cells
from .cells import COPY_MOVES, ELEMENT_SIZE, MOVED, STEP_COPIES, Case, Results, elements, floor_ratios, ratios

MILLION = 10**6

OPS_BOUND = 1.25
UNSYNCED_BOUND, PEER_BOUND, SYNCED_FROM = 0.6, 0.1, 1_500_000


def local_bound(case: Case) -> float:
    """What the step of one process may take, in those of F.batch_norm."""
    if elements(case) < MILLION:
        return 0.8
    return 0.25 if case["layout"] == "planar" else 0.4


def op_ratios(case: Case, op: str) -> list[float]:
    """Returns time of an op over time to copy as many bytes as it must move."""
    return ratios(case, op, "copy", COPY_MOVES / MOVED[op])


def op_is_bounded(case: Case, op: str, results: Results) -> bool:
    """Whether the bytes that the op must move exceed the last-level cache."""
    cache = results["machine"]["last_level_cache"]
    return cache is not None and MOVED[op] * elements(case) * ELEMENT_SIZE > cache


def ops_table(results: Results) -> str:
    def row(case: Case) -> list[str]:
        shown = []
        for op in MOVED:
            bounded = op_is_bounded(case, op, results)
            cell = cells.spread(op_ratios(case, op), OPS_BOUND if bounded else None)
            shown.append(cell if bounded else f"*{cell}*")
        moved = COPY_MOVES * ELEMENT_SIZE * elements(case)
        return [*cells.key(case), *shown, f"{moved / statistics.median(case['microseconds']['copy']) / 1e3:.3g}"]

    header = ["input", "layout", "threads", *MOVED, "copy, GB/s"]
    return cells.table(header, map(row, cells.cases(results, "ops")))


def local_table(results: Results) -> str:
    def row(case: Case) -> list[str]:
        values, bound = ratios(case, "ours", "torch"), local_bound(case)
        return [
            *cells.key(case),
            case["path"],
            cells.spread(values, bound),
            f"{bound:g}",
            cells.over(values, bound),
            f"{statistics.median(floor_ratios(case, 'torch')):.2f}",
            f"{statistics.median(ratios(case, 'ours', 'copy', 1 / STEP_COPIES)):.2f}",
            cells.milliseconds(case, "ours"),
            cells.milliseconds(case, "torch"),
        ]

    header = ["input", "layout", "threads", "computed by", "ours / torch", "bound", "over", "floor / torch"]
    return cells.table([*header, "ours / floor", "ours, ms", "torch, ms"], map(row, cells.cases(results, "local")))


def _bounds(results: Results) -> Iterable[tuple[str, float, list[list[float]], list[list[float]]]]:
    """Yields each kind of bound, the bound, the ratios of the cases it applies to, and their floors."""
    ops, local, layers = (cells.cases(results, section) for section in ("ops", "local", "layers"))
    ranks = [case for case in layers if case["ranks"] == 2]
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
        ("local", UNSYNCED_BOUND, "the layer of torch that does not synchronize"),
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
    return cells.table(header, (row(*kind) for kind in _bounds(results) if kind[2]))
