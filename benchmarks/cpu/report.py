"""Tables of the sections ops, local, host, stored and anew."""

from statistics import median

from ..core.cases import (
    COPY_MOVES,
    MOVED,
    STEP_COPIES,
    elements,
    floor_ratios,
    key,
    milliseconds,
    of_section,
    ratios,
    shape_of,
)
from ..core.tables import Case, Results, across_cases, spread, table

_ELEMENT_SIZE = 4  # all inputs are float32


def op_ratios(case: Case, op: str) -> list[float]:
    """Returns time of an op over time to copy as many bytes as it must move."""
    return ratios(case, op, "copy", COPY_MOVES / MOVED[op])


def ops_table(results: Results) -> str:
    """Each op over copying as many bytes as it must move: median (minimum; quartiles)."""

    def row(case: Case) -> list[str]:
        rate = COPY_MOVES * _ELEMENT_SIZE * elements(case) / median(case["microseconds"]["copy"]) / 1e3
        return [*key(case), *(spread(op_ratios(case, op)) for op in MOVED), f"{rate:.3g}"]

    return table(["input", "layout", "threads", *MOVED, "copy, GB/s"], map(row, of_section(results, "ops")))


def local_table(results: Results) -> str:
    """A step of one process over that of F.batch_norm, and over the floor: median (minimum; quartiles)."""

    def row(case: Case) -> list[str]:
        floor = [median(floor_ratios(case, "torch")), median(ratios(case, "ours", "copy", 1 / STEP_COPIES))]
        times = [milliseconds(case, name) for name in ("ours", "torch")]
        return [*key(case), case["path"], spread(ratios(case, "ours", "torch")), *(f"{f:.2f}" for f in floor), *times]

    header = ["input", "layout", "threads", "computed by", "ours / torch", "floor / torch", "ours / floor"]
    return table([*header, "ours, ms", "torch, ms"], map(row, of_section(results, "local")))


def host_table(results: Results) -> str:
    """A step of so small an input that the host is what is timed: of the layer, and of a bare autograd function with
    the same five ops. Least times, and the ratio within a round: median (minimum; quartiles).
    """

    def row(case: Case) -> list[str]:
        least = [f"{min(case['microseconds'][name]):.1f}" for name in ("layer", "bare")]
        ratio = float(least[0]) / float(least[1])
        return [shape_of(case), *least, f"{ratio:.2f}", spread(ratios(case, "layer", "bare"))]

    header = ["input", "layer, µs", "bare function, µs", "ratio of these", "ratio in a round"]
    return table(header, map(row, of_section(results, "host")))


def stored_table(results: Results) -> str:
    """Memory that a forward pass stores for the backward pass, and the peak of a step: MiB with torch's
    layers, and shares of it with activations in place, with those that the layers compute, and with outputs that are
    made anew.
    """

    def shares(measured: dict[str, int | None]) -> list[str]:
        plain, *others = measured.values() or [None] * 4
        if plain is None:
            return [""] * 4
        return [f"{plain / 2**20:.1f}", *(f"{(other or 0) / plain:.2f}" for other in others)]

    def row(case: Case) -> list[str]:
        if "skipped" in case:
            return [case["network"], case["skipped"], *[""] * 8]
        return [case["network"], shape_of(case), *shares(case["bytes"]), *shares(case["peaks"])]

    variants = ["in place", "fused", "recomputed"]
    header = ["network", "batch", "stored, MiB", *variants, "peak, MiB", *variants]
    return table(header, map(row, of_section(results, "stored")))


def anew_table(results: Results) -> str:
    """The time of a step where outputs are made anew, over that where they are stored: of the least times, and median
    (minimum; quartiles) of the ratios in a round.
    """

    def row(case: Case) -> list[str]:
        times = case["microseconds"]
        least = f"{min(times['recomputed']) / min(times['fused']):.2f}"
        return [case["network"], shape_of(case), least, spread(ratios(case, "recomputed", "fused"))]

    header = ["network", "batch", "step recomputed / fused", "in a round"]
    return table(header, map(row, of_section(results, "anew")))


def process_table(results: Results) -> str:
    """One process in a few lines: geometric mean over the inputs (smallest to largest)."""
    ops, local = of_section(results, "ops"), of_section(results, "local")
    kinds = {
        "a million values and more, planar": [c for c in local if elements(c) >= 1e6 and c["layout"] == "planar"],
        "a million values and more, interleaved": [c for c in local if elements(c) >= 1e6 and c["layout"] != "planar"],
        "fewer values": [c for c in local if elements(c) < 1e6],
    }
    rows = [
        [
            f"step / `F.batch_norm`, {what}",
            len(cases),
            across_cases([median(ratios(case, "ours", "torch")) for case in cases]),
            across_cases([median(floor_ratios(case, "torch")) for case in cases]),
        ]
        for what, cases in kinds.items()
        if cases
    ]
    if ops:
        copied = [median(op_ratios(case, op)) for case in ops for op in MOVED]
        rows.insert(0, ["each op / copying as many bytes", len(ops), across_cases(copied), ""])
    return table(["", "inputs", "ratio", "floor / `F.batch_norm`"], rows)
