"""The model against this machine: steps of the network of the section training, with the fitted collectives."""

import statistics
from typing import Any, NamedTuple

from .fit import Fit, fits
from .model import Job
from .published import Comparison

# Channels of the 15 batch normalizations of training.make_network.
CHANNELS = [16] * 5 + [32] * 5 + [64] * 5


class Gloo(NamedTuple):
    """The collectives as they were fitted. All ranks are on one machine: nodes make no difference."""

    name: str
    gather: Fit
    reduce: Fit

    def all_gather(self, ranks: int, nodes: int, size: int) -> float:
        return self.gather.predict("all_gather", ranks, size)

    def all_reduce(self, ranks: int, nodes: int, size: int) -> float:
        return self.reduce.predict("all_reduce", ranks, size)


def network(results: dict[str, Any]) -> Gloo | None:
    """Returns gloo on the machine of these results, if enough was measured to fit it."""
    fitted = fits(results)
    if len(fitted) < 2:
        return None
    return Gloo("gloo, this machine's loopback", fitted["all_gather"], fitted["all_reduce"])


def comparisons(results: dict[str, Any]) -> list[Comparison]:
    """Predicts our step as that of the unsynchronized network plus the collectives of 15 layers."""
    gloo, found = network(results), []
    runs = [case for case in results["cases"] if case["section"] == "training" and case["ranks"] > 1]
    for ranks in sorted({case["ranks"] for case in runs}) if gloo else ():
        times: dict[str, list[float]] = {"ours": [], "local": []}
        for case in runs:
            if case["ranks"] == ranks:
                for name, values in times.items():
                    values += case["milliseconds"][name]
        ours, local = (statistics.median(times[name]) for name in ("ours", "local"))
        job = Job("digits", CHANNELS, local / 1e3)
        predicted = 1e3 * job.step(gloo, ranks, ranks, "global")
        shared = "" if ranks <= results["machine"]["cores"] else " that share cores"
        found.append(Comparison(f"digits, {ranks} ranks of this machine{shared}", "ms of a step", ours, predicted))
    return found
