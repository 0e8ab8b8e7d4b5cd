"""Cases of the contract: what each rank runs, and what one process gives on the concatenated batch in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import bagua_syncbn


@dataclass(frozen=True)
class Case:
    """One layer over ``len(splits)`` ranks, for ``steps`` steps."""

    splits: tuple[int, ...]  # batch size of each rank
    shape: tuple[int, ...]  # (C, *)
    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype | None = None  # None: as dtype
    layout: str = "contiguous"
    momentum: float | None = 0.1
    eps: float = 1e-5
    affine: bool = True
    bias: bool = True
    track_running_stats: bool = True
    steps: int = 2
    mean: float = 1.0
    std: float = 2.0
    frozen: tuple[str, ...] = ()  # among "input", "weight", "bias"

    def layer(self, dtype: torch.dtype) -> bagua_syncbn.SyncBatchNorm:
        generator = torch.Generator().manual_seed(1)
        layer = bagua_syncbn.SyncBatchNorm(
            self.shape[0],
            self.eps,
            self.momentum,
            self.affine,
            self.track_running_stats,
            bias=self.bias,
            dtype=self.parameter_dtype or self.dtype,
        )
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(self.shape[0], generator=generator))
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return layer.to(dtype) if dtype == torch.float64 else layer

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns input and grad_output of all ranks together, in ``dtype``."""
        generator = torch.Generator().manual_seed(100 + step)
        size = (sum(self.splits), *self.shape)
        channel = torch.linspace(-1, 1, self.shape[0]).view(-1, *[1] * (len(self.shape) - 1))
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        input = values * self.std + self.mean + channel
        return input.to(self.dtype), torch.randn(size, generator=generator).to(self.dtype)


# Shapes, each in a layout that :func:`laid_out` takes.
SHAPES_IN_LAYOUTS = [
    ((7, 5), "contiguous"),
    ((3, 4, 33), "transposed"),
    ((2, 16, 5, 6), "channels_last"),
    ((2, 3, 5, 6), "sliced"),
    ((2, 8, 3, 4, 5), "channels_last_3d"),
]


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Returns a tensor of the same values in the given layout."""
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "channels_last_3d":
        return tensor.contiguous(memory_format=torch.channels_last_3d)
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":  # strided in every dimension, and not at the start of its storage
        wide = tensor.new_zeros([2 * size + 1 for size in tensor.shape])
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        view.copy_(tensor)
        return view
    raise ValueError(f"layout: got {layout!r}")


def run(
    case: Case, layer: Any, forward: Callable[[Tensor, int], Tensor], own: Callable[[Tensor], Tensor], needs_grad: bool
) -> dict[str, Any]:
    """Runs the steps, with ``own`` of each batch; returns outputs and gradients by step, and the buffers at the end."""
    results: dict[str, Any] = {"outputs": [], "input_grads": [], "parameter_grads": []}
    for step in range(case.steps):
        layer.zero_grad()
        input, grad_output = map(own, case.batch(step))
        # Detached after the layout is made, so that the layer's input is a leaf of just this layout.
        input = input.detach().requires_grad_(needs_grad)
        output = forward(input, step)
        if output.requires_grad:
            output.backward(grad_output)
        results["outputs"].append(output.detach())
        results["input_grads"].append(input.grad)
        results["parameter_grads"].append({name: parameter.grad for name, parameter in layer.named_parameters()})
    return results | {"buffers": dict(layer.named_buffers())}


def run_rank(case: Case, process_group: Any = None, rank: int | None = None) -> dict[str, Any]:
    """Runs ``case`` on this rank."""
    rank = dist.get_rank() if rank is None else rank
    layer = case.layer(case.dtype if case.parameter_dtype is None else case.parameter_dtype)
    layer.process_group = process_group

    def forward(input: Tensor, step: int) -> Tensor:
        output: Tensor = layer(input)
        assert output.dtype == case.dtype
        if case.layout not in ("transposed", "sliced"):  # F.batch_norm makes these contiguous
            assert output.stride() == input.stride()
        return output

    def own(batch: Tensor) -> Tensor:
        return laid_out(batch.split(case.splits)[rank], case.layout)

    return run(case, layer, forward, own, "input" not in case.frozen)


def run_reference(case: Case) -> dict[str, Any]:
    """Runs ``case`` in one process on the concatenated batch with torch's batch norm, in float64."""
    layer = case.layer(torch.float64)

    def forward(input: Tensor, step: int) -> Tensor:
        if case.track_running_stats:
            layer.num_batches_tracked.add_(1)
        momentum = 1 / (step + 1) if case.momentum is None else case.momentum
        buffers = layer.running_mean, layer.running_var
        return F.batch_norm(input, *buffers, layer.weight, layer.bias, True, momentum, case.eps)

    return run(case, layer, forward, Tensor.double, True)
