"""Tables of jobs of several ranks: what synchronization costs, where it goes, what is counted, and training."""

from statistics import median

from .. import peers
from ..core.cases import elements, floor_ratios, key, milliseconds, of_section, ratios, shape_of
from ..core.machine import exchange_of, where
from ..core.tables import Case, Results, across_cases, quartiles, spread, table
from .training import TARGET, steps_to_target

_SYNCED = ("ours", "naive", "fairscale", "torch_sync")


def measured_peers(results: Results) -> list[str]:
    """Returns the synchronized peers that any case has."""
    names = {name for case in of_section(results, "layers") for name in case["microseconds"]}
    return [name for name in _SYNCED if name in names]


def _marked(ranks: int, results: Results) -> str:
    """Marks jobs with less than a core for each rank."""
    return f"{ranks}{'*' if ranks > results['machine']['cores'] else ''}"


def headline_table(results: Results) -> str:
    """Over all inputs that were measured with so many ranks of one thread: geometric mean (smallest to largest)."""
    peers = measured_peers(results)
    shown = [case for case in of_section(results, "layers") if case["threads"] == 1]

    def cell(cases: list[Case], name: str) -> str:
        return across_cases([median(ratios(case, name, "local")) for case in cases if name in case["microseconds"]])

    def row(ranks: int) -> list[str]:
        cases = [case for case in shown if case["ranks"] == ranks]
        return [_marked(ranks, results), str(len(cases)), *(cell(cases, name) for name in peers)]

    header = ["ranks", "inputs", *(f"{name} / local" for name in peers)]
    return table(header, map(row, sorted({case["ranks"] for case in shown})))


def summary_table(results: Results) -> str:
    """Steps over two ranks, in steps of the layer that does not synchronize; of layers geometric means."""
    peers = measured_peers(results)
    cases = [case for case in of_section(results, "layers") if case["ranks"] == 2 and case["threads"] == 1]

    def row(what: str, chosen: list[Case]) -> list[str]:
        return [what, *(across_cases([median(ratios(case, name, "local")) for case in chosen]) for name in peers)]

    rows = []
    if times := step_times(results).get(2):
        steps = [f"{median(times[name]) / median(times['local']):.2f}" for name in peers]
        rows.append(["a small ResNet, 64 images in all", *steps])
    rows.append(row("layers, inputs of a million values and more", [case for case in cases if elements(case) >= 1e6]))
    rows.append(row("layers, smaller inputs", [case for case in cases if elements(case) < 1e6]))
    names = ["bagua_syncbn" if name == "ours" else name for name in peers]
    header = ["a step over two ranks, in steps of nn.BatchNorm", *names]
    return f"{table(header, rows)}\n\n{where(results)}; small messages {exchange_of(results)}."


def layers_table(results: Results) -> str:
    """Each peer's step over that of the layer that does not synchronize, and over each other; ratios first."""
    peers = measured_peers(results)

    def row(case: Case) -> list[str]:
        present = [name for name in ["local", *peers] if name in case["microseconds"]]
        shown = [spread(ratios(case, name, "local")) if name in present else "" for name in peers]
        others = [name for name in peers if name != "ours"]
        shown += [f"{median(ratios(case, 'ours', name)):.2f}" if name in present else "" for name in others]
        floor = f"{median(floor_ratios(case, 'ours')):.2f}"
        times = [milliseconds(case, name) for name in ("ours", "local")]
        return [_marked(case["ranks"], results), *key(case), *shown, floor, *times]

    header = ["ranks", "input of each", "layout", "threads each", *(f"{name} / local" for name in peers)]
    header += [f"ours / {name}" for name in peers if name != "ours"] + ["floor / ours", "ours, ms", "local, ms"]
    return table(header, map(row, of_section(results, "layers")))


def phases_table(results: Results) -> str:
    """Forward + backward in milliseconds, and the share of both that the host spent in collectives. Last, what of our
    step, and of a bare autograd function's, is neither in them nor in the five ops on their own.
    """
    peers = ["local", *measured_peers(results)]

    def cell(case: Case, name: str) -> str:
        times = case["microseconds"]
        if name not in times:
            return ""
        passes = [milliseconds(case, f"{name} {part}") for part in ("forward", "backward")]
        shares = [
            (forward + backward) / total
            for forward, backward, total in zip(
                times[f"{name} forward collectives"], times[f"{name} backward collectives"], times[name], strict=True
            )
        ]
        return f"{passes[0]} + {passes[1]}" + (f" ({median(shares):.0%})" if name != "local" else "")

    def row(case: Case) -> list[str]:
        alone = milliseconds(case, "collectives") if case["ranks"] > 1 else ""
        shown = [cell(case, name) for name in peers]
        last = [alone, _rest(case, "ours"), _rest(case, "bare")]
        return [_marked(case["ranks"], results), shape_of(case), case["layout"], *shown, *last]

    single = [case for case in of_section(results, "layers") if case["threads"] == 1]
    names = ["our collectives alone", "ours: neither, ms", "bare: neither, ms"]
    return table(["ranks", "input of each", "layout", *peers, *names], map(row, single))


def _rest(case: Case, name: str) -> str:
    """Milliseconds of a step in neither collectives nor ops: from the layer's call to the backend's and back."""
    times = case["microseconds"]
    if not {"ops", name} <= times.keys() or case["ranks"] == 1:
        return ""
    names = (f"{name} forward collectives", f"{name} backward collectives", "ops")
    rest = [total - sum(parts) for total, *parts in zip(times[name], *(times[n] for n in names), strict=True)]
    return f"{median(rest) / 1e3:.3f} ({min(rest) / 1e3:.3f})"


def seconds_to_target(case: Case, name: str) -> float | None:
    """Returns the time of the steps until the loss was down to the target; None if it never was."""
    steps = steps_to_target(case["losses"][name])
    return None if steps is None else sum(case["milliseconds"][name][:steps]) / 1e3


def step_times(results: Results) -> dict[int, dict[str, list[float]]]:
    """Returns the milliseconds of all steps of all seeds, by number of ranks and peer."""
    times: dict[int, dict[str, list[float]]] = {}
    for case in of_section(results, "training"):
        for name, values in case["milliseconds"].items():
            times.setdefault(case["ranks"], {}).setdefault(name, []).extend(values)
    return times


def exchange_table(results: Results) -> str:
    """One message of each rank: median microseconds, and the least."""

    def cell(case: Case, name: str) -> str:
        times = case["microseconds"].get(name)
        return f"{median(times):,.1f} ({min(times):,.1f})" if times else ""

    def row(case: Case) -> list[str]:
        return [_marked(case["ranks"], results), f"{case['bytes']:,}", *(cell(case, name) for name in names)]

    names = [f"{kind}, {way}" for kind in ("gather", "sum") for way in ("shared memory", "collectives")]
    return table(["ranks", "bytes of each", *names], map(row, of_section(results, "exchange")))


def compiled_table(results: Results) -> str:
    """A residual block: least times of a step in milliseconds, and the ratio of ours to the unsynchronized block's and
    the messages of ours together.
    """

    def row(case: Case) -> list[str]:
        least = {name: min(case["microseconds"][name]) / 1e3 for name in names}
        shown = [f"{time:.3g}" for time in least.values()]
        for kind in ("", ", compiled"):
            shown.append(f"{least[f'ours{kind}'] / (least[f'local{kind}'] + least['collectives']):.2f}")
        return [_marked(case["ranks"], results), shape_of(case), *shown]

    names = ["ours", "ours, compiled", "local", "local, compiled", "collectives"]
    header = ["ranks", "input of each", *names, "ours / (local + collectives)", "the same, compiled"]
    return table(header, map(row, of_section(results, "compiled")))


def training_table(results: Results) -> str:
    """Training on digits: step over that of the layer that does not synchronize, with quartiles, and time to a loss."""
    runs, times = of_section(results, "training"), step_times(results)
    names = list(dict.fromkeys(name for own in times.values() for name in own))
    synchronized = [name for name in names if name != "local"]

    def step(ranks: int, name: str) -> str:
        low, middle, high = (time / median(times[ranks]["local"]) for time in quartiles(times[ranks][name]))
        return f"{middle:.2f} ({low:.2f}-{high:.2f})"

    def seconds(ranks: int, name: str) -> str:
        reached = [seconds_to_target(case, name) for case in runs if case["ranks"] == ranks]
        known = [value for value in reached if value is not None]
        return f"{median(known):.3g}" if len(known) == len(reached) else "not in every run"

    def row(ranks: int) -> list[str]:
        steps = [step(ranks, name) for name in synchronized]
        return [_marked(ranks, results), *steps, *(seconds(ranks, name) for name in names)]

    header = ["ranks", *(f"{name} / local" for name in synchronized)]
    return table([*header, *(f"seconds to {TARGET:g}, {name}" for name in names)], map(row, times))


def peers_table(results: Results) -> str:
    """Which peers were measured with how many ranks, and why any was not."""
    jobs = of_section(results, "peers")

    def row(name: str, what: str) -> list[str]:
        measured = ", ".join(str(job["ranks"]) for job in jobs if name in job["measured"]) or "none"
        reasons = sorted({job["skipped"][name] for job in jobs if name in job["skipped"]})
        return [name, what, measured, "; ".join(f"`{reason}`" for reason in reasons)]

    return table(
        ["peer", "what it is", "measured on ranks", "skipped because"], [row(*peer) for peer in peers.PEERS.items()]
    )
