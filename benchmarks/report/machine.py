"""When and where results were measured, how disturbed, and which peers took part."""

from .. import peers
from ..rounds import QUIET_CORES
from . import cells
from .cells import Results


def machine_table(results: Results) -> str:
    machine, versions, settings = results["machine"], results["versions"], results["settings"]
    foreign = [case["foreign_cores"] for case in results["cases"] if case.get("foreign_cores") is not None]
    timed = [case for case in results["cases"] if "microseconds" in case]
    faults = [case["faults"] for case in timed]
    rounds = sorted(len(case["microseconds"]["copy"]) for case in timed if "copy" in case["microseconds"])
    dropped = sum(case["dropped"] for case in timed)
    devices = ", ".join(machine.get("devices", []))
    rows = [
        ["measured", f"{results['date']}, {settings['minutes']:g} minutes"],
        ["processor", f"{machine['processor']}, {machine['cores']} cores{', virtual' * machine['virtual']}"],
        ["caches", ", ".join(machine["caches"]) or "unknown"],
        *([["GPUs", devices]] if devices else []),
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["malloc", "keeps freed memory" if settings["keeps_memory"] else "the system's defaults"],
    ]
    if rounds:
        counted = f"{rounds[0]} to {rounds[-1]}; {dropped} in all dropped because memory was mapped in them"
        rows += [["rounds of a case", counted], ["page faults of a round", f"{min(faults)} to {max(faults)} (medians)"]]
    if foreign:
        quiet = f"at most {max(foreign):.2f}, on average over a case; {cells.quartiles(foreign)[1]:.2f} in half of them"
        rows.append(["cores used by others", quiet])
        if cells.quartiles(foreign)[1] > QUIET_CORES:
            rows.append(["**disturbed**", "in most cases: small differences mean nothing here, and times little"])
    return cells.table(["", ""], rows)


def peers_table(results: Results) -> str:
    """Which peers were measured with how many ranks, and why the others were not."""
    jobs = cells.cases(results, "peers")

    def row(name: str, what: str) -> list[str]:
        measured = ", ".join(str(job["ranks"]) for job in jobs if name in job["measured"]) or "none"
        reasons = sorted({job["skipped"][name] for job in jobs if name in job["skipped"]})
        return [name, what, measured, "; ".join(f"`{reason}`" for reason in reasons)]

    return cells.table(
        ["peer", "what it is", "measured on ranks", "skipped because"], [row(*peer) for peer in peers.PEERS.items()]
    )
