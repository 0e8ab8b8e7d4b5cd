"""The five kernels of ATen that torch.nn.SyncBatchNorm calls, with the arguments that it gives them."""

from typing import Any

import torch
from torch import Tensor

from bagua_syncbn.ops import reference


class Kernels:
    """Calls of each, for the parameters and statistics of one layer.

    Args:
        functions: where the five are; torch, or a stand-in for it on a device that they do not run on.
    """

    def __init__(self, functions: Any, layer: dict[str, Tensor], eps: float, momentum: float) -> None:
        self._functions, self._layer, self._eps, self._momentum = functions, layer, eps, momentum
        self._one_rank = {name: layer[name].view(1, -1) for name in ("mean", "invstd")}
        count = layer["count"]
        self._counts = count.view(1).float()  # as the running statistics
        self._int_count = count.view(1).int()

    def stats(self, x: Tensor, dy: Tensor) -> Any:
        return self._functions.batch_norm_stats(x, self._eps)

    def gather_stats(self, x: Tensor, dy: Tensor) -> Any:
        running = self._layer["running_mean"], self._layer["running_var"]
        factors = self._momentum, self._eps
        return self._functions.batch_norm_gather_stats_with_counts(
            x, self._one_rank["mean"], self._one_rank["invstd"], *running, *factors, self._counts
        )

    def elemt(self, x: Tensor, dy: Tensor) -> Any:
        factors = (self._layer[name] for name in ("weight", "bias", "mean", "invstd"))
        return self._functions.batch_norm_elemt(x, *factors, self._eps)

    def backward_reduce(self, x: Tensor, dy: Tensor) -> Any:
        factors = (self._layer[name] for name in ("mean", "invstd", "weight"))
        return self._functions.batch_norm_backward_reduce(dy, x, *factors, True, True, True)

    def backward_elemt(self, x: Tensor, dy: Tensor) -> Any:
        factors = (self._layer[name] for name in ("mean", "invstd", "weight"))
        sums = self._layer["sums"].chunk(2)
        return self._functions.batch_norm_backward_elemt(dy, x, *factors, *sums, self._int_count)


class StandIn:
    """The five for dry runs on a CPU, by our own definitions of the ops."""

    @staticmethod
    def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        packed = reference.batch_norm_stats(x)
        mean, var = packed[: 2 * x.size(1)].chunk(2)
        return mean, (var + eps).rsqrt()

    @staticmethod
    def batch_norm_gather_stats_with_counts(x: Tensor, mean: Tensor, invstd: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return mean[0].clone(), invstd[0].clone()

    @staticmethod
    def batch_norm_elemt(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
        return reference.batch_norm_elemt(x, weight, bias, mean, invstd)

    @staticmethod
    def batch_norm_backward_reduce(
        dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *_: bool
    ) -> Any:
        sums, *grads = reference.batch_norm_backward_reduce(dy, x, mean, invstd, weight)
        return *sums.chunk(2), *grads

    @staticmethod
    def batch_norm_backward_elemt(
        dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, sum_dy: Tensor, sum_dy_xmu: Tensor,
        count: Tensor,
    ) -> Tensor:  # fmt: skip
        sums = torch.cat([sum_dy, sum_dy_xmu])
        return reference.batch_norm_backward_elemt(dy, x, weight, mean, invstd, sums, count.long()[0])
