"""One input through the five ops and through ATen's five kernels: whether they agree, and how long each takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bagua_syncbn import ops

from ..core.timing import Function
from . import aten
from .inputs import Cycle, Pool
from .shapes import OPS, Case
from .timer import measure

EPS, MOMENTUM = 1e-5, 0.1
# Between kernels that add up and round in different ways, relative to the largest value.
AGREEMENT = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


def make_layer(case: Case, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Parameters and buffers in float32, and the statistics and sums of ``x`` and ``dy``."""
    weight, bias = torch.randn(2, case.channels).to(x.device).unbind()
    layer = {
        "weight": weight,
        "bias": bias,
        "running_mean": torch.zeros_like(weight),
        "running_var": torch.ones_like(weight),
        "num_batches_tracked": torch.tensor(0, device=x.device),
        "packed": ops.batch_norm_stats(x)[None],
    }
    layer["mean"], layer["invstd"], layer["count"] = ops.batch_norm_gather_stats(
        layer["packed"], None, None, None, MOMENTUM, EPS
    )
    layer["sums"] = ops.batch_norm_backward_reduce(dy, x, layer["mean"], layer["invstd"], weight)[0]
    return layer


class Ours:
    """Calls of the five ops, as :class:`aten.Kernels` has them."""

    def __init__(self, layer: dict[str, Tensor]) -> None:
        self._layer = layer

    def stats(self, x: Tensor, dy: Tensor) -> Any:
        return ops.batch_norm_stats(x)

    def gather_stats(self, x: Tensor, dy: Tensor) -> Any:
        buffers = (self._layer[name] for name in ("running_mean", "running_var", "num_batches_tracked"))
        return ops.batch_norm_gather_stats(self._layer["packed"], *buffers, MOMENTUM, EPS)

    def elemt(self, x: Tensor, dy: Tensor) -> Any:
        return ops.batch_norm_elemt(x, *(self._layer[name] for name in ("weight", "bias", "mean", "invstd")))

    def backward_reduce(self, x: Tensor, dy: Tensor) -> Any:
        return ops.batch_norm_backward_reduce(dy, x, *(self._layer[name] for name in ("mean", "invstd", "weight")))

    def backward_elemt(self, x: Tensor, dy: Tensor) -> Any:
        factors = (self._layer[name] for name in ("weight", "mean", "invstd", "sums", "count"))
        return ops.batch_norm_backward_elemt(dy, x, *factors)


def disagreements(case: Case, ours: Ours, theirs: aten.Kernels, x: Tensor, dy: Tensor) -> list[str]:
    """The kernels whose results are further apart than rounding explains: what is wrong is not worth timing."""

    def far(actual: Tensor, expected: Tensor, scale: float) -> bool:
        scale = max(scale, float(expected.float().abs().max()))
        return not bool((actual.float() - expected.float()).abs().max() <= AGREEMENT[case.dtype] * scale)

    mean, invstd = theirs.stats(x, dy)
    packed = ours.stats(x, dy)
    our_invstd = (packed[case.channels : 2 * case.channels] + EPS).rsqrt()
    sums = ours.backward_reduce(x, dy)[0], torch.cat(theirs.backward_reduce(x, dy)[:2])
    # The values have a deviation of 1. Sums of them cancel: they are off by a part of what is added up.
    pairs = {
        "stats": [(packed[: case.channels], mean, 1.0), (our_invstd, invstd, 1.0)],
        "elemt": [(ours.elemt(x, dy), theirs.elemt(x, dy), 1.0)],
        "backward_reduce": [(*sums, case.values / case.channels / 100)],
        "backward_elemt": [(ours.backward_elemt(x, dy), theirs.backward_elemt(x, dy), 1.0)],
    }
    return [name for name, of_one in pairs.items() if any(far(*pair) for pair in of_one)]


def measure_ops(case: Case, pool: Pool, seconds: float) -> dict[str, Any]:
    """Returns the samples of one case, taken in about so many seconds."""
    cycle, functions = Cycle(pool.sets(case)), torch if pool.device.type == "cuda" else aten.StandIn
    layer = make_layer(case, *cycle.first)
    ours, theirs = Ours(layer), aten.Kernels(functions, layer, EPS, MOMENTUM)

    def on_next(call: Callable[[Tensor, Tensor], Any]) -> Function:
        return lambda: call(*cycle.next())

    with torch.no_grad():
        wrong = disagreements(case, ours, theirs, *cycle.first)
        calls = {f"{side} {name}": on_next(getattr(kernels, name))
                 for name in OPS for side, kernels in (("ours", ours), ("aten", theirs))}  # fmt: skip
        samples, behind = measure(calls, pool.device, runs_ahead=True, seconds=seconds)
    return {"kind": "ops", **case.record(), "microseconds": samples, "behind": behind, "disagreements": wrong}


def measure_copy(device: torch.device, size: int, seconds: float) -> dict[str, Any]:
    """Copies ``size`` bytes within the device's memory: as fast as reading and writing get."""
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    samples, _ = measure({"copy": lambda: target.copy_(source)}, device, runs_ahead=True, seconds=seconds)
    return {"kind": "copy", "bytes": 2 * size, "microseconds": samples}
