"""Section stored: memory that a forward pass stores for backward, and time of a step with recomputed outputs."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bagua_syncbn

from ..recorded import Case, Results, of_section, ratios, shape_of, spread, table
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
    stored = {variant: stored_bytes(model, batch) for variant, model in models.items()}
    case = {"network": name, "shape": tuple(batch.shape), "bytes": stored}
    if name in TIMED:
        case |= time_workload({name: partial(step, models[name], batch) for name in ("fused", "recomputed")}, job)
    return case


def stored_table(results: Results) -> str:
    """Memory that a forward pass stores for backward: MiB with torch's layers, and its share with in-place activations,
    with fused activations, and with recomputed outputs.
    """

    def row(case: Case) -> list[str]:
        plain, *others = case["bytes"].values()
        return [case["network"], shape_of(case), f"{plain / 2**20:.1f}", *(f"{other / plain:.2f}" for other in others)]

    header = ["network", "batch", "stored, MiB", "in place", "fused", "recomputed"]
    return table(header, map(row, of_section(results, "stored")))


def recomputed_table(results: Results) -> str:
    """Step time with recomputed outputs, relative to stored outputs: median (minimum; quartiles)."""
    timed = [case for case in of_section(results, "stored") if "microseconds" in case]
    rows = ([case["network"], shape_of(case), spread(ratios(case, "recomputed", "fused"))] for case in timed)
    return table(["network", "batch", "step recomputed / fused"], rows)


TABLES = {"stored": stored_table, "recomputed": recomputed_table}
