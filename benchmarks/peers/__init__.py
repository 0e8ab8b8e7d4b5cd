"""The layers that are compared."""

import warnings
from collections.abc import Callable

import torch
from torch import nn

import bagua_syncbn

from .naive import NaiveSyncBatchNorm

# Makes a layer for so many channels and input of so many dimensions; may fail to import it.
Maker = Callable[[int, int], nn.Module]

_LOCAL = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _fairscale(channels: int, dimensions: int) -> nn.Module:
    from fairscale.experimental.nn import SyncBatchNorm

    layer: nn.Module = SyncBatchNorm(channels)
    return layer


MAKERS: dict[str, Maker] = {
    # As users make it: by conversion.
    "ours": lambda channels, dimensions: bagua_syncbn.convert_sync_batchnorm(_LOCAL[dimensions](channels)),
    # Does not synchronize: the least that one has to pay.
    "local": lambda channels, dimensions: _LOCAL[dimensions](channels),
    "naive": lambda channels, dimensions: NaiveSyncBatchNorm(channels),
    "fairscale": _fairscale,
    # Refuses input on CPU.
    "torch_sync": lambda channels, dimensions: nn.SyncBatchNorm(channels),
}

# Descriptions for tables. The first two are compared with all.
PEERS = {
    "ours": "bagua_syncbn",
    "local": "torch.nn.BatchNorm (not synchronized)",
    "naive": "a differentiable all-reduce of sums, written here",
    "fairscale": "fairscale.experimental.nn.SyncBatchNorm",
    "torch_sync": "torch.nn.SyncBatchNorm",
}


def find(device: torch.device) -> tuple[dict[str, Maker], dict[str, str]]:
    """Tries each on a small batch; returns those that train on ``device`` in this job, and why any other does not.

    All ranks of the job must call it.
    """
    makers: dict[str, Maker] = {}
    skipped: dict[str, str] = {}
    for name, make in MAKERS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                x = torch.randn(2, 4, 3, 3, device=device, requires_grad=True)
                torch.autograd.grad(make(4, 4).to(device)(x).square().sum(), x)
        except Exception as error:  # whatever it is, this is the reason, and the next layer is tried
            text = str(error).strip().splitlines() or [""]
            skipped[name] = f"{type(error).__name__}: {text[0]}"
        else:
            makers[name] = make
    return makers, skipped
