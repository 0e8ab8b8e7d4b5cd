"""Compares the native CUDA kernels with plain torch on a device, before the first call with each dtype."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import raise_torchs
from ..ops import DTYPES, HEADER_SUMS_SIZE, accumulate_dtype, reduced_dims, reference
from ..ops.moments import Moments
from ..torch_internals.autograd import is_capturing, is_transforming, outside_of_modes
from .exercise import Call, Exercise
from .fallback import HAS_NATIVE, cuda_kernels, cuda_problem, turn_off

# Tolerance for rounding to the accumulate dtype, relative to the largest value of a channel.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}

_log = logging.getLogger("bagua_syncbn")
_checked: set[tuple[torch.device, torch.dtype]] = set()


def check_kernels(input: Tensor) -> bool:
    """Checks the kernels for the device and dtype of ``input``, once. Returns False if the check must wait for a later
    call.

    Raises:
        RuntimeError: a graph is being captured, so kernels cannot be compared; or a kernel broke CUDA.
    """
    key = input.device, input.dtype
    if key in _checked:
        return True
    if type(input) is not Tensor or is_transforming():
        return False
    if is_capturing():
        if not HAS_NATIVE:  # ATen's kernels need no comparison
            return False
        raise RuntimeError(
            f"the first call with {input.dtype} on {input.device} compares kernels, which is impossible while a graph "
            "is captured; call the layer once first"
        )
    check_kernels_on(*key)
    _checked.add(key)
    return True


def check_kernels_on(device: torch.device, dtype: torch.dtype) -> None:
    """Compares the native kernels with plain torch on ``device``; if they differ, ATen's replace them."""
    index = device.index or 0
    compared = ""
    if dtype in DTYPES and cuda_problem(index) is None:
        _wait_for(device)  # raises errors of earlier kernels
        try:
            difference = find_difference(torch.ops.bagua_syncbn, device, dtype)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"comparing the CUDA kernels of bagua_syncbn with plain torch for {dtype} failed on {device}, which "
                f"may be unusable in this process now: {error}. To run without them, set BAGUA_SYNCBN_KERNELS=aten"
            ) from error
        if difference is not None:
            turn_off(index, f"on {torch.cuda.get_device_name(index)}, {difference}")
        compared = f", compared with plain torch for {dtype}"
    _log.info("kernels on cuda:%d%s: %s", index, compared, cuda_kernels(index))


def _wait_for(device: torch.device) -> None:
    """Waits for the current stream. After a failure on the device, this and every later call raises."""
    with outside_of_modes():
        torch.ones((), device=device).item()


def find_difference(native: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns a description of how ``native`` ops differ from float64 in plain torch, or fail; None if they agree."""
    wide: _Wide = {}
    with torch.no_grad(), outside_of_modes():
        for call in Exercise(device, dtype).calls():
            expected = _outcome(reference, call, lambda tensor: _widened(tensor, wide))
            try:
                actual = _outcome(native, call, lambda tensor: tensor)
            except RuntimeError as error:
                raise_torchs(error)  # out of memory: the kernels may be right
                _wait_for(device)
                return f"{call.op} for {dtype} fails: {error}"
            for result, wanted in zip(actual, expected, strict=True):
                if not _agree(result, wanted, dtype):
                    difference, largest = (result - wanted).abs().max().item(), wanted.abs().max().item()
                    return (
                        f"{call.op} for {dtype} differs from float64 by {difference:.3g}, "
                        f"where values reach {largest:.3g}"
                    )
    return None


_Wide = dict[int, tuple[Tensor, Tensor]]  # tensors and their copies, by id of the tensor


def _widened(tensor: Tensor, wide: _Wide) -> Tensor:
    """Returns the copy of ``tensor`` in ``wide``, in float64 if it has floats. Adds the copy if it is missing."""
    if id(tensor) not in wide:
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        wide[id(tensor)] = tensor, tensor.to(dtype, copy=True)
    return wide[id(tensor)][1]


def _outcome(ops: Any, call: Call, replace: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Runs a call with copies of its tensors. Returns the results, followed by the tensors that it writes to."""
    arguments = (replace(each) if isinstance(each, Tensor) else each for each in call.arguments)
    options = {name: replace(each) for name, each in call.options.items()}
    made = getattr(ops, call.op)(*arguments, **options)
    results = [made] if isinstance(made, Tensor) else [*made]
    if call.op == "batch_norm_stats" and call.arguments[-1] is True:  # rounded sums would hide a wrong variance
        results = [*Moments.of_sums(made[:-HEADER_SUMS_SIZE]), made[-HEADER_SUMS_SIZE:]]
    return [*results, *map(replace, call.written)]


def _agree(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a result of an op for ``dtype`` is right, up to rounding.

    Allows rounding to the result's dtype, and to the accumulate dtype relative to the largest value of a channel.
    """
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    unit, rounding = torch.finfo(actual.dtype).eps, _ROUNDING[accumulate_dtype(dtype)]
    if actual.dim() < 2:  # overflows like the reference
        expected = expected.where(expected.isnan() | expected.to(actual.dtype).isfinite(), expected * torch.inf)
    # Replaces infinities with the largest float64, so that they compare equal, and NaN with a number that no result
    # has.
    actual, expected = (values.double().nan_to_num(4099) for values in (actual, expected))
    size = expected.abs()
    largest = size.amax(reduced_dims(size), keepdim=True) if size.dim() > 1 else size
    return bool(((actual - expected).abs() <= size * (unit / 2) + largest * rounding).all())
