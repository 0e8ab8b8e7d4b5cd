"""Section stored: what a forward pass leaves in memory for the backward pass, and what a step takes."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bagua_syncbn

from ..core import timing

BATCH = (4, 16, 48, 48)
CHANNELS = BATCH[1]


class Bottleneck(nn.Module):
    """As in ResNet-50: the sum at its end is stored in any case."""

    def __init__(self) -> None:
        super().__init__()
        narrow = CHANNELS // 4
        self.conv1, self.bn1 = nn.Conv2d(CHANNELS, narrow, 1), nn.BatchNorm2d(narrow)
        self.conv2, self.bn2 = nn.Conv2d(narrow, narrow, 3, padding=1), nn.BatchNorm2d(narrow)
        self.conv3, self.bn3 = nn.Conv2d(narrow, CHANNELS, 1), nn.BatchNorm2d(CHANNELS)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        output: Tensor = self.relu(self.bn3(self.conv3(y)) + x)
        return output


def _chain(activation: Callable[[], nn.Module]) -> nn.Module:
    layers = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), activation()
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4) for layer in layers), *_head())


def _head() -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolution, norm, ReLU": partial(_chain, nn.ReLU),
    "the same, ReLU in place": partial(_chain, partial(nn.ReLU, inplace=True)),
    "convolution, norm, SiLU": partial(_chain, nn.SiLU),
    "residual bottlenecks": lambda: nn.Sequential(*(Bottleneck() for _ in range(4)), *_head()),
}

VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ours": bagua_syncbn.convert_sync_batchnorm,
    "fused": lambda model: bagua_syncbn.fuse_activations(bagua_syncbn.convert_sync_batchnorm(model)),
}
# One after the other, as each needs what the one before it gives.
VARIANTS["recomputed"] = lambda model: bagua_syncbn.recompute_outputs(VARIANTS["fused"](model))


class _Storages(TorchDispatchMode):
    """Notes what is allocated, and can say how much of it there still is."""

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

    def bytes_alive(self, known: list[Tensor]) -> int:
        """Returns the bytes in memory, less those of tensors that were there before."""
        before = {tensor.untyped_storage()._cdata for tensor in known}
        noted = self._noted.items()
        return sum(size for key, (storage, size) in noted if key not in before and not storage.expired())


def stored_bytes(model: nn.Module, batch: Tensor) -> int:
    """Returns the bytes that a forward pass leaves, as long as its loss is there."""
    with _Storages() as storages:
        loss = model(batch).square().mean()
        alive = storages.bytes_alive([batch, *model.parameters(), *model.buffers()])
    del loss
    return alive


def cases(job: dict[str, Any]) -> list[str]:
    return list(NETWORKS) if "stored" in job["sections"] else []


def measure(network: str, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    batch, model = torch.randn(BATCH), NETWORKS[network]()
    models = {name: prepare(copy.deepcopy(model)) for name, prepare in VARIANTS.items()}
    workload = {name: lambda each=each: each(batch).square().mean().backward() for name, each in models.items()}
    return {
        "section": "stored",
        "network": network,
        "shape": BATCH,
        "bytes": {name: stored_bytes(each, batch) for name, each in models.items()},
        **timing.time_alone(workload, job),
    }


def measure_all(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for network in cases(job):
        yield measure(network, job)
