"""The five kernels of ATen that torch.nn.SyncBatchNorm calls, with the arguments that it gives them."""

from typing import Any

import torch
from torch import Tensor


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
        layer = self._layer
        return self._functions.batch_norm_elemt(
            x, layer["weight"], layer["bias"], layer["mean"], layer["invstd"], self._eps
        )

    def backward_reduce(self, x: Tensor, dy: Tensor) -> Any:
        layer = self._layer
        return self._functions.batch_norm_backward_reduce(
            dy, x, layer["mean"], layer["invstd"], layer["weight"], True, True, True
        )

    def backward_elemt(self, x: Tensor, dy: Tensor) -> Any:
        layer = self._layer
        sum_dy, sum_dy_xmu = layer["sums"].chunk(2)
        return self._functions.batch_norm_backward_elemt(
            dy, x, layer["mean"], layer["invstd"], layer["weight"], sum_dy, sum_dy_xmu, self._int_count
        )


class StandIn:
    """The five in plain torch, for dry runs."""

    @staticmethod
    def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(x.float(), [d for d in range(x.dim()) if d != 1], correction=0)
        return mean, (var + eps).rsqrt()

    @staticmethod
    def batch_norm_gather_stats_with_counts(
        x: Tensor, mean: Tensor, invstd: Tensor, running_mean: Tensor, running_var: Tensor,
        momentum: float, eps: float, counts: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return mean[0].clone(), invstd[0].clone()

    @staticmethod
    def batch_norm_elemt(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
        mean, scale, bias = (across(t, x) for t in (mean, invstd * weight, bias))
        return ((x.float() - mean) * scale + bias).to(x.dtype)

    @staticmethod
    def batch_norm_backward_reduce(
        dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *needed: bool
    ) -> tuple[Tensor, ...]:
        dims = [d for d in range(x.dim()) if d != 1]
        sum_dy = dy.float().sum(dims)
        sum_dy_xmu = (dy.float() * (x.float() - across(mean, x))).sum(dims)
        return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()

    @staticmethod
    def batch_norm_backward_elemt(
        dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor,
        sum_dy: Tensor, sum_dy_xmu: Tensor, count: Tensor,
    ) -> Tensor:  # fmt: skip
        mean_dy, projection = sum_dy / count, sum_dy_xmu / count * invstd.square()
        centered = dy.float() - across(mean_dy, x) - (x.float() - across(mean, x)) * across(projection, x)
        return (centered * across(invstd * weight, x)).to(x.dtype)


def across(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(-1, *[1] * (x.dim() - 2))
