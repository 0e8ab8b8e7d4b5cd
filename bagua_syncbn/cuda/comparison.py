"""Compares the native CUDA kernels with plain torch on a device, before the first call with each dtype."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import raise_torchs
from ..ops import DTYPES, HEADER_SUMS_SIZE, accumulate_dtype, reduced_dims, reference
from ..ops.moments import Moments
from ..torch_internals.autograd import is_capturing, is_transforming, outside_of_modes
from .exercise import Call, Exercise
from .fallback import cuda_kernels, cuda_problem, may_be_native, turn_off

# Tolerance for rounding to the accumulate dtype, relative to the largest value of a channel.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}

_log = logging.getLogger("bagua_syncbn")
_checked: set[tuple[torch.device, torch.dtype]] = set()


def check_kernels(input: Tensor) -> bool:
    """Checks the kernels for the device and dtype of ``input``, once. Returns False if only a later call can do it.

    Raises:
        RuntimeError: a graph is being captured, in which nothing can be compared; or a kernel broke CUDA.
    """
    key = input.device, input.dtype
    if key in _checked:
        return True
    if type(input) is not Tensor or is_transforming():
        return False
    if is_capturing():
        if not may_be_native(input.device.index):  # torch's kernels need no comparison
            return False
        raise RuntimeError(
            f"the first call with {input.dtype} on {input.device} compares kernels, which is impossible while a graph "
            "is captured; call the layer once before"
        )
    check_kernels_on(*key)
    _checked.add(key)
    return True


def check_kernels_on(device: torch.device, dtype: torch.dtype) -> None:
    """Compares the native kernels with plain torch on ``device``; if they differ, ATen's replace them."""
    index = device.index or 0
    compared = ""
    if dtype in DTYPES and cuda_problem(index) is None:
        with _synchronization_allowed():
            _wait_for(device)  # errors of earlier kernels are raised here
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
    """Waits for the current stream. After a failure on the device, this and every later call raises."""
    with outside_of_modes():
        torch.ones((), device=device).item()


def _raise_if_broken(device: torch.device, dtype: torch.dtype, error: RuntimeError) -> None:
    """Raises an error that says what to do, if ``error`` has left the device unusable."""
    try:
        _wait_for(device)
    except torch.OutOfMemoryError:
        return
    except RuntimeError:
        raise RuntimeError(
            f"{device} failed while the CUDA kernels of bagua_syncbn were compared with plain torch for {dtype}, and "
            f"cannot be used any more in this process: {error}. To run without them, set BAGUA_SYNCBN_KERNELS=aten"
        ) from error


@contextmanager
def _synchronization_allowed() -> Iterator[None]:
    """Context that suspends torch's check for synchronizations; comparing waits for the device."""
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
    results: list[_Result] = []
    wide: _Wide = {}
    with torch.no_grad(), outside_of_modes():
        for call in Exercise(device, dtype).calls():
            expected = _outcome(reference, call, lambda tensor: _widened(tensor, wide))
            try:
                actual = _outcome(native, call, lambda tensor: tensor)
            except RuntimeError as error:
                raise_torchs(error)  # out of memory: nothing is known about the kernels
                _wait_for(device)
                return f"{call.op} for {dtype} fails: {error}"
            results += (_Result(call.op, *each) for each in zip(actual, expected, strict=True))
        groups = [[each] for each in results if each.actual.dim() > 1]
        for of in {each.actual.dtype for each in results}:
            groups.append([each for each in results if each.actual.dim() < 2 and each.actual.dtype == of])
        if all(torch.stack([_agree(group, dtype) for group in groups if group]).tolist()):  # waits once
            return None
        wrong = next(each for each in results if not _agree([each], dtype))
        difference, largest = (wrong.actual - wrong.expected).abs().max().item(), wrong.expected.abs().max().item()
        return f"{wrong.op} for {dtype} differs from float64 by {difference:.3g}, where values reach {largest:.3g}"


class _Result(NamedTuple):
    op: str
    actual: Tensor
    expected: Tensor


_Wide = dict[int, tuple[Tensor, Tensor]]  # tensors and their copies, by the id of the first


def _widened(tensor: Tensor, wide: _Wide) -> Tensor:
    """Returns the copy of ``tensor`` in ``wide``, where it is added if missing: in float64 if it has floats."""
    if id(tensor) not in wide:
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        wide[id(tensor)] = tensor, tensor.to(dtype, copy=True)
    return wide[id(tensor)][1]


def _outcome(ops: Any, call: Call, replace: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Returns the results of a call and the tensors that it writes to, after replacing its tensors."""
    arguments = (replace(each) if isinstance(each, Tensor) else each for each in call.arguments)
    options = {name: replace(each) for name, each in call.options.items()}
    made = getattr(ops, call.op)(*arguments, **options)
    results = [made] if isinstance(made, Tensor) else [*made]
    if call.op == "batch_norm_stats" and call.arguments[-1] is True:  # rounded sums would hide a wrong variance
        results = [*Moments.of_sums(made[:-HEADER_SUMS_SIZE]), made[-HEADER_SUMS_SIZE:]]
    return [*results, *map(replace, call.written)]


def _agree(results: list[_Result], dtype: torch.dtype) -> Tensor:
    """Returns whether results agree, as a tensor: a result with several dimensions, or others of the same dtype.

    They may differ by rounding to their dtype, and to the accumulate dtype relative to the largest value of a channel.
    """
    actual, expected = (
        each[0] if len(each) == 1 else torch.cat([one.reshape(-1).to(each[0].device) for one in each])
        for each in ([one.actual for one in results], [one.expected for one in results])
    )
    if not actual.is_floating_point():
        return (actual == expected).all()
    if actual.dim() < 2:  # overflows like the reference
        expected = expected.where(expected.isnan() | expected.to(actual.dtype).isfinite(), expected * torch.inf)
    # Infinities become the largest float64, so that they can be compared, and NaN a number that no result has.
    actual, expected = (values.double().nan_to_num(4099) for values in (actual, expected))
    size, unit, rounding = expected.abs(), torch.finfo(results[0].actual.dtype).eps, _ROUNDING[accumulate_dtype(dtype)]
    largest = size.amax(reduced_dims(size), keepdim=True) if size.dim() > 1 else size
    allowed = torch.add(size * (unit / 2), largest, alpha=rounding)
    return ((actual - expected).abs() <= allowed).all()
