"""Native CUDA kernels serve a device after they have agreed with ATen's there, for each dtype, once in a process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import is_capturing, is_transforming, outside_of_modes
from . import aten, reference
from .activations import Activation
from .definition import accumulate_dtype
from .fallback import cuda_kernels, cuda_problem, turn_off

# By how much results may differ, relative to the largest value. ATen rounds the products in planar sums of halves.
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_log = logging.getLogger("bagua_syncbn")
_checked: set[tuple[torch.device, torch.dtype]] = set()


def check_kernels(input: Tensor) -> bool:
    """Checks the kernels for the CUDA device and the dtype of ``input``, at the first call for both.

    Not while a graph is captured or a transform is active: then it returns False, and the next call does it.
    """
    key = input.device, input.dtype
    if key in _checked:
        return True
    if type(input) is not Tensor or is_capturing() or is_transforming():
        return False
    _checked.add(key)
    check_kernels_on(*key)
    return True


def check_kernels_on(device: torch.device, dtype: torch.dtype) -> None:
    """Compares the native kernels with ATen's on ``device``; if they differ, ATen's compute there from now on."""
    index = device.index or 0
    compared = ""
    if dtype in _TOLERANCES and cuda_problem(index) is None:
        with _synchronization_allowed():
            difference = find_difference(torch.ops.bagua_syncbn, device, dtype)
        if difference is not None:
            turn_off(index, f"on {torch.cuda.get_device_name(index)}, {difference}")
        compared = f", compared with ATen's for {dtype}"
    _log.info("kernels on cuda:%d%s: %s", index, compared, cuda_kernels(index))


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
    """Returns how the ops of ``native`` differ from ATen's on a small input, or why they fail; None if they agree."""
    with torch.no_grad(), outside_of_modes():
        try:
            name, wanted = "ATen's", list(_results(aten, device, dtype))
        except RuntimeError:  # ATen has no kernel there
            name, wanted = "plain torch's", list(_results(reference, device, dtype))
        ours = _results(native, device, dtype)
        for op, expected in wanted:
            try:
                actual = next(ours)[1]
                difference = (actual.double() - expected.double()).abs().max().item()
            except RuntimeError as error:
                return f"{op} for {dtype} fails: {error}"
            largest = expected.double().abs().max().item()
            if not difference <= _TOLERANCES[dtype] * largest:  # NaN too
                return f"{op} for {dtype} differs from {name} by {difference:.3g}, where values reach {largest:.3g}"
    return None


def _results(ops: Any, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields the results of all ops, with the name of the op, on planar and interleaved input."""
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    values, gradients, factors = random(3, 16, 9, 9) + 1, random(3, 16, 9, 9), random(4, 16)
    mask, code = (random(3, 9, 9) < 0.5).to(device), Activation("silu").code
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x, dy = (t.to(device, dtype).contiguous(memory_format=memory_format) for t in (values, gradients))
        weight, bias, running_mean, running_var = factors.to(device, accumulate_dtype(dtype), copy=True).unbind()
        batches = torch.zeros((), dtype=torch.int64, device=device)
        rows = torch.stack([ops.batch_norm_stats(x), ops.batch_norm_stats(dy, None, 0, mask)])
        yield "batch_norm_stats", rows
        merged = ops.batch_norm_gather_stats(rows, running_mean, running_var, batches, 0.1, 1e-5)
        for result in (*merged, running_mean, running_var, batches + 1):
            yield "batch_norm_gather_stats", result
        mean, invstd, count = merged
        for activation, residual in ((0, None), (code, dy)):
            yield "batch_norm_elemt", ops.batch_norm_elemt(x, weight, bias, mean, invstd, residual, activation)
            grad = torch.empty_like(x) if activation else None
            through = None, bias, residual, activation, 0.0, grad
            sums, *reduced = ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight, *through)
            for result in (sums, *reduced, *([] if grad is None else [grad])):
                yield "batch_norm_backward_reduce", result
            summed = sums, count, 1, None, 0
            for where in (None, *([] if activation else [mask])):
                arguments = dy, x, weight, mean, invstd, *summed, where, bias, activation
                yield "batch_norm_backward_elemt", ops.batch_norm_backward_elemt(*arguments)
