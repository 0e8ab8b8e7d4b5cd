"""Section stored: what a forward pass leaves in memory for the backward pass, and what a step takes."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bagua_syncbn

from ..core import timing

CHANNELS = 16
GIGABYTES = 16  # of a GPU, in which samples are to fit


class Bottleneck(nn.Module):
    """Of ResNet-50: the sum at its end is stored in any case."""

    def __init__(self, channels: int, narrow: int, stride: int = 1) -> None:
        super().__init__()
        wide = 4 * narrow
        self.conv1, self.bn1 = nn.Conv2d(channels, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2, self.bn2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv3, self.bn3 = nn.Conv2d(narrow, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if channels != wide:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        output: Tensor = self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))
        return output


def _resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, 64 << stage, stride))
            channels = 256 << stage
    return nn.Sequential(*layers, *_head(channels, 1000))


def _chain(activation: Callable[[], nn.Module]) -> nn.Module:
    layers = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), activation()
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4) for layer in layers), *_head(CHANNELS, 10))


def _head(channels: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    sample: tuple[int, int, int] = (CHANNELS, 48, 48)


NETWORKS = {
    "convolution, norm, ReLU": Network(partial(_chain, nn.ReLU)),
    "the same, ReLU in place": Network(partial(_chain, partial(nn.ReLU, inplace=True))),
    "convolution, norm, SiLU": Network(partial(_chain, nn.SiLU)),
    "ResNet-50": Network(_resnet50, (3, 224, 224)),
}
BATCH, QUICK_SIDE = 4, 48

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


def samples_that_fit(stored: int, batch: int) -> float:
    """Returns of how many samples the memory holds what a forward pass stores, if it stores so much of a batch."""
    return GIGABYTES * 2**30 * batch / stored


def cases(job: dict[str, Any]) -> list[str]:
    return list(NETWORKS) if "stored" in job["sections"] else []


def measure(name: str, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    network = NETWORKS[name]
    side = min(QUICK_SIDE, network.sample[1]) if job["quick"] else network.sample[1]
    shape = (BATCH, network.sample[0], side, side)
    batch, model = torch.randn(shape), network.make()
    models = {variant: prepare(copy.deepcopy(model)) for variant, prepare in VARIANTS.items()}
    workload = {variant: lambda each=each: each(batch).square().mean().backward() for variant, each in models.items()}
    return {
        "section": "stored",
        "network": name,
        "shape": shape,
        "bytes": {variant: stored_bytes(each, batch) for variant, each in models.items()},
        **timing.time_alone(workload, job),
    }


def measure_all(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for network in cases(job):
        yield measure(network, job)
