"""The compared layers."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua_syncbn
from bagua_syncbn.communicators import TorchCommunicator

# Makes a layer for this number of channels and input dimensions; may raise ImportError.
Maker = Callable[[int, int], nn.Module]

OVER_GLOO = "ours over gloo"
_LOCAL = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class NaiveSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A straightforward implementation: sums and counts through a differentiable all-reduce; autograd does the rest.

    It deliberately has the two common flaws that docs/benchmarks.md names.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        reduced = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = input.new_full((1,), input.numel() / input.size(1))
        sums = torch.cat([input.sum(reduced), input.square().sum(reduced), count])
        total = _AllReduce.apply(sums) if dist.is_initialized() else sums
        mean, square, count = total.split([input.size(1), input.size(1), 1])
        mean, square = mean / count, square / count
        var = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked.add_(1)
        scale = self.weight * (var + self.eps).rsqrt()
        return input * scale.view(shape) + (self.bias - mean * scale).view(shape)


def _ours(channels: int, dimensions: int, process_group: Any = None) -> nn.Module:
    return bagua_syncbn.convert_sync_batchnorm(_LOCAL[dimensions](channels), process_group)


def _fairscale(channels: int, dimensions: int) -> nn.Module:
    from fairscale.experimental.nn import SyncBatchNorm

    layer: nn.Module = SyncBatchNorm(channels)
    return layer


MAKERS: dict[str, Maker] = {
    "ours": _ours,
    # Unsynchronized: the lower bound.
    "local": lambda channels, dimensions: _LOCAL[dimensions](channels),
    "naive": lambda channels, dimensions: NaiveSyncBatchNorm(channels),
    "fairscale": _fairscale,
    "torch_sync": lambda channels, dimensions: nn.SyncBatchNorm(channels),  # refuses CPU input
}


def find(device: torch.device) -> dict[str, Maker]:
    """Trains each layer on a small batch. Returns the layers that work on ``device``; rank 0 prints the others' errors.

    All ranks of the job must call it.
    """
    makers: dict[str, Maker] = {}
    candidates = dict(MAKERS)
    if device.type == "cpu":  # without shared memory, like BAGUA_SYNCBN_EXCHANGE=collectives
        candidates[OVER_GLOO] = partial(_ours, process_group=TorchCommunicator(dist.new_group()))
    for name, make in candidates.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                x = torch.randn(2, 4, 3, 3, device=device, requires_grad=True)
                torch.autograd.grad(make(4, 4).to(device)(x).square().sum(), x)
        except Exception as error:  # any error means that the layer is skipped
            if dist.get_rank() == 0:
                first_line = str(error).strip().partition("\n")[0]
                print(f"skipped {name}: {type(error).__name__}: {first_line}", file=sys.stderr)
        else:
            makers[name] = make
    return makers
