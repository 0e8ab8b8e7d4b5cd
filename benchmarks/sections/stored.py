"""Section stored: memory that a forward pass stores for backward, peak memory and time of a step.

Peaks come from separate processes for each network and variant:

    python -m benchmarks.sections.stored NETWORK VARIANT
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bagua_syncbn

from .. import machine
from ..recorded import ROOT, Case, Results, of_section, ratios, shape_of, spread, table
from ..timing import time_workload
from .networks import NETWORKS, QUICK

QUICK_SIDE = 48
TIMED = (*QUICK, "ResNet-50")


def _in_place(model: nn.Module, in_place: bool = True) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = in_place
    return model


def _fused(model: nn.Module) -> nn.Module:
    return bagua_syncbn.fuse_activations(bagua_syncbn.convert_sync_batchnorm(model))


VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: _in_place(model, False),
    "in place": _in_place,
    "fused": _fused,
    "recomputed": lambda model: bagua_syncbn.recompute_outputs(_fused(model)),
}


class Storages(TorchDispatchMode):
    """Tracks allocated storages."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._noted[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def sizes_alive(self, known: Iterable[Tensor] = ()) -> list[int]:
        """Returns the size in bytes of each live storage, except those of earlier tensors."""
        before = {tensor.untyped_storage()._cdata for tensor in known}
        noted = self._noted.items()
        return [size for key, (storage, size) in noted if key not in before and not storage.expired()]


def stored_bytes(model: nn.Module, batch: Tensor) -> int:
    """Returns the bytes that a forward pass stores while its loss is alive."""
    with Storages() as storages:
        loss = model(batch).square().mean()
        alive = sum(storages.sizes_alive([batch, *model.parameters(), *model.buffers()]))
    del loss
    return alive


def step(model: nn.Module, batch: Tensor) -> None:
    model(batch).square().mean().backward()


def _resident(name: str) -> int:
    """Returns VmRSS (resident memory) or VmHWM (its peak) in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def _print_peak(network: str, variant: str) -> None:
    """Prints the resident memory that a second step adds; the first step allocates gradients and library caches."""
    torch.set_num_threads(1)
    batch, model = torch.randn(NETWORKS[network].shape()), VARIANTS[variant](NETWORKS[network].make())
    step(model, batch)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = _resident("VmHWM")
    step(model, batch)
    print(_resident("VmHWM") - before)


def peak_bytes(network: str, variant: str) -> int | None:
    """Returns the peak memory of a step; None if the system does not report it."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, "-m", "benchmarks.sections.stored", network, variant]
    environment = {name: value for name, value in os.environ.items() if name not in machine.KEEP_MEMORY}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # larger blocks return to the system when freed
    return int(subprocess.run(command, env=environment, cwd=ROOT, stdout=-1, text=True, check=True).stdout)


def cases(job: dict[str, Any]) -> list[tuple[str]]:
    """Returns the networks whose packages are installed."""
    return [(name,) for name in (QUICK if job["quick"] else NETWORKS) if find_spec(NETWORKS[name].needs)]


def prepare(name: str, quick: bool) -> tuple[Tensor, dict[str, nn.Module]]:
    """Returns a batch, and the network in each variant."""
    network = NETWORKS[name]
    torch.set_num_threads(1)
    batch, model = torch.randn(network.shape(QUICK_SIDE if quick else None)), network.make()
    models = {variant: make(copy.deepcopy(model)) for variant, make in VARIANTS.items()}
    return batch, models


def measure(name: str, job: dict[str, Any]) -> Case:
    batch, models = prepare(name, job["quick"])
    peaks = {} if job["quick"] else {variant: peak_bytes(name, variant) for variant in VARIANTS}
    stored = {variant: stored_bytes(model, batch) for variant, model in models.items()}
    case = {"network": name, "shape": tuple(batch.shape), "bytes": stored, "peaks": peaks}
    if name in TIMED:
        case |= time_workload({name: partial(step, models[name], batch) for name in ("fused", "recomputed")}, job)
    return case


def stored_table(results: Results) -> str:
    """Memory that a forward pass stores for backward, and the peak of a step: MiB with torch's layers, and its share
    with in-place activations, with fused activations, and with recomputed outputs.
    """

    def shares(measured: dict[str, int | None]) -> list[str]:
        plain, *others = measured.values() or [None] * 4
        if plain is None:
            return [""] * 4
        return [f"{plain / 2**20:.1f}", *(f"{(other or 0) / plain:.2f}" for other in others)]

    def row(case: Case) -> list[str]:
        return [case["network"], shape_of(case), *shares(case["bytes"]), *shares(case["peaks"])]

    variants = ["in place", "fused", "recomputed"]
    header = ["network", "batch", "stored, MiB", *variants, "peak, MiB", *variants]
    return table(header, map(row, of_section(results, "stored")))


def recomputed_table(results: Results) -> str:
    """Step time with recomputed outputs over step time with stored outputs: median (minimum; quartiles)."""
    timed = [case for case in of_section(results, "stored") if "microseconds" in case]
    rows = ([case["network"], shape_of(case), spread(ratios(case, "recomputed", "fused"))] for case in timed)
    return table(["network", "batch", "step recomputed / fused"], rows)


TABLES = {"stored": stored_table, "recomputed": recomputed_table}


if __name__ == "__main__":
    _print_peak(*sys.argv[1:])
