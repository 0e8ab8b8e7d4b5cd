"""Latency and bandwidth of gloo's collectives on this machine, fitted to those that were measured.

gloo runs both as rings: with W ranks and n bytes a rank, an all-gather takes W - 1 steps of n bytes and an all-reduce
2 (W - 1) steps of n / W. For each, seconds = base + steps * latency + bytes / bandwidth, by least squares of the
relative deviation, without negative parameters. Only jobs with a core for each rank are fitted: where ranks share
cores, what is measured is the scheduler, and it is shown how far off that is.
"""

import itertools
import statistics
from typing import Any, NamedTuple

import numpy as np


class Point(NamedTuple):
    collective: str
    ranks: int
    size: int  # bytes of a rank
    seconds: float  # median


class Fit(NamedTuple):
    base: float
    latency: float
    seconds_per_byte: float

    def predict(self, collective: str, ranks: int, size: int) -> float:
        return float(np.dot(_terms(collective, ranks, size), self))


def points(results: dict[str, Any]) -> list[Point]:
    found = []
    for case in results["cases"]:
        if case["section"] == "collectives":
            for name, size in (("all_gather", 8 * case["channels"] + 8), ("all_reduce", 8 * case["channels"])):
                seconds = statistics.median(case["microseconds"][name]) * 1e-6
                found.append(Point(name, case["ranks"], size, seconds))
    return found


def _terms(collective: str, ranks: int, size: int) -> tuple[float, float, float]:
    if collective == "all_gather":
        return 1.0, ranks - 1, (ranks - 1) * size
    return 1.0, 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size


def fit(measured: list[Point], collective: str, cores: int) -> Fit | None:
    """Returns the fit of one collective; None if fewer points than parameters have a core for each rank."""
    used = [p for p in measured if p.collective == collective and p.ranks <= cores]
    if len(used) < 3:
        return None
    # Relative deviations: large messages would decide alone otherwise.
    rows = np.array([_terms(collective, p.ranks, p.size) for p in used]) / np.array([[p.seconds] for p in used])
    best: tuple[float, tuple[float, ...]] | None = None
    for kept in itertools.product((False, True), repeat=3):  # of three parameters, all choices of those above zero
        columns = [i for i in range(3) if kept[i]]
        if not columns:
            continue
        scale = np.abs(rows[:, columns]).max(axis=0)
        solution = np.linalg.lstsq(rows[:, columns] / scale, np.ones(len(used)), rcond=None)[0] / scale
        error = float(np.square(rows[:, columns] @ solution - 1).sum())
        if (solution >= 0).all() and (best is None or error < best[0]):
            parameters = [0.0, 0.0, 0.0]
            for column, value in zip(columns, solution, strict=True):
                parameters[column] = float(value)
            best = error, tuple(parameters)
    assert best is not None  # each parameter alone fits with a positive value
    return Fit(*best[1])


def fits(results: dict[str, Any]) -> dict[str, Fit]:
    measured, cores = points(results), results["machine"]["cores"]
    found = {name: fit(measured, name, cores) for name in ("all_gather", "all_reduce")}
    return {name: fitted for name, fitted in found.items() if fitted is not None}
