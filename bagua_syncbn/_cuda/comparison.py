"""Compares the native CUDA kernels with plain torch."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from .._errors import raise_if_out_of_memory
from .._ops import HEADER_SUMS_SIZE, accumulate_dtype, reduced_dims, reference
from .._ops.moments import Moments
from .._torch.autograd import outside_of_modes
from .._torch.modules import pytree
from .exercise import Exercise, OpCall

# Tolerance for rounding to the accumulate dtype, relative to the largest value of a channel.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}

# Number of cases in which the kernels agreed with plain torch, by device.
agreed: Counter[torch.device] = Counter()


def wait_for(device: torch.device) -> None:
    """Waits for the current stream. After a failure on the device, this and every later call raises."""
    with outside_of_modes():
        torch.ones((), device=device).item()


def find_difference(native: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns how ``native`` ops fail or differ from plain torch in float64, as text; None if they agree."""
    wide: dict[int, tuple[Tensor, Tensor]] = {}  # tensors and their copies, by id of the tensor

    def widened(tensor: Tensor) -> Tensor:
        if id(tensor) not in wide:
            wide_dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
            wide[id(tensor)] = tensor, tensor.to(wide_dtype, copy=True)
        return wide[id(tensor)][1]

    with outside_of_modes():
        for call in Exercise(device, dtype).calls():
            expected = _outcome(reference, pytree.tree_map_only(Tensor, widened, call))
            try:
                actual = _outcome(native, call)
            except RuntimeError as error:
                raise_if_out_of_memory(error)  # the kernels may be right
                wait_for(device)
                return f"{call.op} for {dtype} fails: {error}"
            for result, wanted in zip(actual, expected, strict=True):
                if not _agree(result, wanted, dtype):
                    difference, largest = (result - wanted).abs().max().item(), wanted.abs().max().item()
                    return (
                        f"{call.op} for {dtype} differs from float64 by {difference:.3g}, "
                        f"where values reach {largest:.3g}"
                    )
            agreed[device] += 1
    return None


def _outcome(ops: Any, call: OpCall) -> list[Tensor]:
    """Runs a call. Returns the results, followed by the tensors that the call writes to."""
    made = getattr(ops, call.op)(*call.arguments, **call.options)
    results = [made] if isinstance(made, Tensor) else [*made]
    if call.op == "batch_norm_stats" and call.arguments[-1] is True:  # rounded sums would hide a wrong variance
        results = [*Moments.of_sums(made[:-HEADER_SUMS_SIZE]), made[-HEADER_SUMS_SIZE:]]
    return [*results, *call.written]


def _agree(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a result of an op for ``dtype`` is right, up to rounding.

    Allows rounding to the result's dtype, by a unit of subnormal numbers, and to the accumulate dtype relative to the
    largest value of a channel.
    """
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    limits, rounding = torch.finfo(actual.dtype), _ROUNDING[accumulate_dtype(dtype)]
    if actual.dim() < 2:  # overflows like the reference
        expected = expected.where(expected.isnan() | expected.to(actual.dtype).isfinite(), expected * torch.inf)
    # Replaces infinities with the largest float64, so that they compare equal, and NaN with a number that no result
    # has.
    actual, expected = (values.double().nan_to_num(4099) for values in (actual, expected))
    size = expected.abs()
    largest = size.amax(reduced_dims(size), keepdim=True) if size.dim() > 1 else size
    allowed = size * (limits.eps / 2) + largest * rounding + limits.smallest_normal * limits.eps
    return bool(((actual - expected).abs() <= allowed).all())
