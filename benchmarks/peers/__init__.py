"""The layers that are compared. Each file has a ``make(channels, dimensions)`` and may fail to import or to run."""

import importlib
import warnings
from collections.abc import Callable

import torch
from torch import nn

# Makes a layer for so many channels and input of so many dimensions.
Maker = Callable[[int, int], nn.Module]

# Name, as in the results, and what it is. The first two are compared with all.
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
    for name in PEERS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make: Maker = importlib.import_module(f"{__name__}.{name}").make
                x = torch.randn(2, 4, 3, 3, device=device, requires_grad=True)
                torch.autograd.grad(make(4, 4).to(device)(x).square().sum(), x)
        except Exception as error:  # whatever it is, this is the reason, and the next layer is tried
            text = str(error).strip().splitlines() or [""]
            skipped[name] = f"{type(error).__name__}: {text[0]}"
        else:
            makers[name] = make
    return makers, skipped
