"""Tables of the model of scale: the fit and its deviation, predicted steps, and published figures."""

import statistics

from ..scale import fit, measured, model, networks, published
from . import cells
from .cells import Results

EXCESSES = (0.01, 0.05, 0.1, 1.0)
NETWORKS = (networks.H100, networks.V100)


def collectives_table(results: Results) -> str:
    """The measured collectives beside the fit. Jobs with less than a core for each rank are not fitted."""
    fits, cores = fit.fits(results), results["machine"]["cores"]

    def row(point: fit.Point) -> list[str]:
        fitted = fits.get(point.collective)
        predicted = fitted.predict(point.collective, point.ranks, point.size) if fitted else None
        shown = ["", ""] if predicted is None else [f"{1e6 * predicted:.0f}", f"{predicted / point.seconds - 1:+.0%}"]
        alone = "" if point.ranks <= cores else "*"
        return [point.collective, f"{point.ranks}{alone}", str(point.size), f"{1e6 * point.seconds:.0f}", *shown]

    header = ["collective", "ranks", "bytes of a rank", "measured, µs", "fit, µs", "deviation"]
    return cells.table(header, map(row, sorted(fit.points(results))))


def fit_table(results: Results) -> str:
    def row(name: str, fitted: fit.Fit) -> list[str]:
        rate = fitted.seconds_per_byte
        deviations = [
            abs(fitted.predict(p.collective, p.ranks, p.size) / p.seconds - 1)
            for p in fit.points(results)
            if p.collective == name and p.ranks <= results["machine"]["cores"]
        ]
        return [
            name,
            f"{1e6 * fitted.base:.0f}",
            f"{1e6 * fitted.latency:.0f}",
            f"{1e-9 / rate:.2g}" if rate else "not seen",
            f"{statistics.median(deviations):.0%}; at most {max(deviations):.0%}",
        ]

    header = ["collective", "base, µs", "each step, µs", "bandwidth, GB/s", "deviation of fitted points"]
    return cells.table(header, (row(*item) for item in fit.fits(results).items()))


def scale_table(results: Results) -> str:
    """Predicted milliseconds of synchronization a step of ResNet-50, and what they add to an assumed step."""
    job, gloo = model.RESNET50, measured.network(results)
    shown_networks = [*NETWORKS, *([gloo] if gloo else [])]

    def row(ranks: int) -> list[str]:
        shown = [str(ranks)]
        for network in shown_networks:
            steps = {group: job.step(network, ranks, model.PER_NODE, group) for group in ("global", "node")}
            shown += [f"{1e3 * (step - job.compute):.3g}" for step in steps.values()]
            shown.append(f"{steps['global'] / steps['node']:.2f}")
        return shown

    header = ["ranks"]
    for network in shown_networks:
        name = network.name.split(" ")[0].rstrip(",")
        header += [f"{name}: global, ms", "node, ms", "steps, global / node"]
    return cells.table(header, map(row, model.RANKS))


def crossover_table(results: Results) -> str:
    """From how many GPUs on a global group costs so much more than groups of a node."""

    def row(network: networks.Nccl) -> list[str]:
        found = [model.crossover(model.RESNET50, network, excess) for excess in EXCESSES]
        limits = [model.gather_limit(network, channels) for channels in (64, 256, 2048)]
        return [network.name, *(str(ranks or "never") for ranks in (*found, *limits))]

    header = ["network", *(f"+{excess:.0%}" for excess in EXCESSES)]
    return cells.table([*header, *(f"gather > reduce, C = {c}" for c in (64, 256, 2048))], map(row, NETWORKS))


def deviation_table(results: Results) -> str:
    """The model against the steps measured here, and against what others have published."""
    rows = [
        [c.case, c.quantity, f"{c.published:.3g}", f"{c.predicted:.3g}", f"{c.deviation:+.0%}"]
        for c in (*measured.comparisons(results), *published.comparisons())
    ]
    return cells.table(["case", "quantity", "measured or published", "model", "deviation"], rows)
