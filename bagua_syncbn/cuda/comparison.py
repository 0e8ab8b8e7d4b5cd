"""Native CUDA kernels serve a device, for each dtype, after they gave there what plain torch gives."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..ops import DTYPES, accumulate_dtype, raise_torchs, reduced_dims, reference
from ..torch_internals.autograd import is_capturing, is_transforming, outside_of_modes
from .exercise import Exercise
from .fallback import cuda_kernels, cuda_problem, may_be_native, turn_off

# By how much results may differ that are computed in an accumulate dtype, relative to the largest of a channel.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}

_log = logging.getLogger("bagua_syncbn")
_checked: set[tuple[torch.device, torch.dtype]] = set()


def check_kernels(input: Tensor) -> bool:
    """Checks the kernels for the CUDA device and the dtype of ``input``, at the first call for both.

    Not while a transform is active: then it returns False, and the next call does it.

    Raises:
        RuntimeError: a graph is captured, in which nothing can be compared; or a kernel broke CUDA.
    """
    key = input.device, input.dtype
    if key in _checked:
        return True
    if type(input) is not Tensor or is_transforming():
        return False
    if is_capturing():
        if not may_be_native(input.device.index):  # the kernels of torch need no comparison
            return False
        raise RuntimeError(
            f"input: expected a call with {input.dtype} on {input.device} before a graph is captured, because the "
            "first one compares kernels; got the first one in a capture"
        )
    check_kernels_on(*key)
    _checked.add(key)
    return True


def check_kernels_on(device: torch.device, dtype: torch.dtype) -> None:
    """Compares the native kernels with plain torch on ``device``; if they differ, ATen's compute from now on."""
    index = device.index or 0
    compared = ""
    if dtype in DTYPES and cuda_problem(index) is None:
        with _synchronization_allowed():
            _wait_for(device)  # errors of earlier kernels are raised here, not while these are compared
            try:
                difference = find_difference(torch.ops.bagua_syncbn, device, dtype)
            except RuntimeError as error:
                _raise_if_broken(device, dtype, error)
                raise
        if difference is not None:
            turn_off(index, f"on {torch.cuda.get_device_name(index)}, {difference}")
        compared = f", compared with plain torch for {dtype}"
    _log.info("kernels on cuda:%d%s: %s", index, compared, cuda_kernels(index))


def _wait_for(device: torch.device) -> None:
    """Waits for the work of the current stream; raises what torch raises if some failed, then and ever after."""
    with outside_of_modes():
        torch.ones((), device=device).item()


def _raise_if_broken(device: torch.device, dtype: torch.dtype, error: RuntimeError) -> None:
    """Says how to go on after ``error``, if the device computes nothing any more."""
    try:
        _wait_for(device)
    except torch.OutOfMemoryError:
        return
    except RuntimeError:
        raise RuntimeError(
            f"{device} failed while the CUDA kernels of bagua_syncbn were compared with plain torch for {dtype}, and "
            f"computes nothing any more in this process: {error}. Go on without them: BAGUA_SYNCBN_KERNELS=aten"
        ) from error


@contextmanager
def _synchronization_allowed() -> Iterator[None]:
    """Context in which the host may wait for the device, as comparing does."""
    mode = torch.cuda.get_sync_debug_mode()
    if not mode:  # setting it warns
        yield
        return
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def find_difference(native: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns how the ops of ``native`` differ from plain torch in float64, or why they fail; None if they agree."""
    compared: list[tuple[str, Tensor, Tensor]] = []
    with torch.no_grad(), outside_of_modes():
        ours = Exercise(device, dtype, widen=False).results(native)
        for op, expected in Exercise(device, dtype, widen=True).results(reference):
            try:
                compared.append((op, next(ours)[1], expected))
            except RuntimeError as error:
                raise_torchs(error)  # without memory nothing is known
                _wait_for(device)
                return f"{op} for {dtype} fails: {error}"
        agree = torch.stack([_agree(actual, expected) for _, actual, expected in compared]).tolist()  # waits once
        if all(agree):
            return None
        op, actual, expected = compared[agree.index(False)]
        difference, largest = ((actual - expected).abs().max().item(), expected.abs().max().item())
        return f"{op} for {dtype} differs from float64 by {difference:.3g}, where values reach {largest:.3g}"


def _agree(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns whether ``actual`` and ``expected`` differ by rounding alone, as a tensor.

    By a rounding to the dtype of ``actual``, and some in the accumulate dtype, relative to the largest value of a
    channel.
    """
    size, unit, roundings = expected.abs(), torch.finfo(actual.dtype).eps, _ROUNDING[accumulate_dtype(actual.dtype)]
    if size.dim() < 2:  # a value for each channel
        allowed = size * (unit + roundings)
    else:
        allowed = (size * unit).add_(size.amax(reduced_dims(size), keepdim=True), alpha=roundings)
    return (actual - expected).abs_().le(allowed).all()  # False for NaN
