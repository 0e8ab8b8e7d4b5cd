"""What a call is checked for before its rank waits for another one."""

from typing import Any

import torch
from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]

from . import ops
from .autograd import is_exporting
from .communicators import Replica, peers_of

_INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_dimensions(input: Tensor) -> None:
    """Raises ValueError unless ``input`` has a dimension of samples and one of channels."""
    if input.dim() < 2:
        raise ValueError(f"input: expected at least 2 dimensions, (N, C, *), got {input.dim()}")


def check_eps_mode(eps_mode: str) -> None:
    """Raises ValueError unless ``eps_mode`` is one of the two."""
    if eps_mode not in ops.EPS_MODES:
        raise ValueError(f'eps_mode: expected "plus" or "clamp", got {eps_mode!r}')


def check_eps(eps: float, positive: bool) -> None:
    """Raises ValueError for an ``eps`` below 0, and for 0 where it has to be ``positive``."""
    if eps < 0 or (positive and eps == 0):
        expected = "a number above 0 in training" if positive else "a number of at least 0"
        raise ValueError(f"eps: expected {expected}, got {eps}")


def check_tensors(input: Tensor, tensors: dict[str, Tensor | None], num_batches_tracked: Tensor | None) -> None:
    """Raises for what this rank can know to be wrong, before it joins a collective that its peers would wait in."""
    kinds = _kinds(input, (*tensors.values(), num_batches_tracked))
    if kinds is not None and kinds in _found_right:
        return
    if input.dtype not in _INPUT_DTYPES:
        raise TypeError(f"input: expected a float16, bfloat16, float32 or float64 tensor, got {input.dtype}")
    check_dimensions(input)
    knows_sizes = not is_tracing()  # their comparison would be made part of the trace
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: expected a floating point tensor, got {tensor.dtype}")
        if knows_sizes and tensor.size() != input.shape[1:2]:
            raise RuntimeError(
                f"{name}: expected {input.size(1)} elements, one for each channel of input, got {list(tensor.size())}"
            )
        _check_device(name, tensor, input)
    if (tensors["running_mean"] is None) != (tensors["running_var"] is None):
        raise ValueError("running_mean, running_var: expected both or neither, got one of them")
    _check_counter(num_batches_tracked, input)
    if kinds is not None:
        if len(_found_right) == _MOST_KINDS:
            _found_right.clear()
        _found_right.add(kinds)


def check_is_tensor(name: str, value: Any) -> None:
    """Raises TypeError unless ``value``, of the argument ``name``, is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def check_residual(residual: Tensor | None, input: Tensor) -> None:
    """Raises unless ``residual`` is None or has the dtype, size and device of ``input``."""
    if residual is None:
        return
    check_is_tensor("residual", residual)
    if residual.dtype != input.dtype:
        raise TypeError(f"residual: expected {input.dtype}, the dtype of input, got {residual.dtype}")
    if not is_tracing() and residual.size() != input.size():
        raise RuntimeError(f"residual: expected {list(input.size())}, the size of input, got {list(residual.size())}")
    _check_device("residual", residual, input)


# Dtype, device and size of all tensors of a call: what a check looks at. A layer's seldom change.
_Kinds = tuple[object, ...]
_found_right: set[_Kinds] = set()
_MOST_KINDS = 2**12


def _kinds(input: Tensor, tensors: tuple[Tensor | None, ...]) -> _Kinds | None:
    """Returns all that :func:`check_tensors` looks at; None while something traces, and for subclasses of tensors."""
    if type(input) is not Tensor or torch.compiler.is_compiling() or is_tracing():
        return None
    parts: list[object] = [input.dtype, input.device, input.shape[1:2]]
    for tensor in tensors:
        parts += (None,) if tensor is None else (tensor.dtype, tensor.device, tensor.shape)
    return tuple(parts)


def check_kind(input: Tensor, process_group: Any) -> None:
    """Raises for input that a group of several ranks does not take, before this rank makes the group."""
    is_sharded = type(input) is not Tensor and hasattr(input, "to_local")
    tracer = "torch.jit.trace" if is_tracing() else "torch.export" if is_exporting() else None
    if not (is_sharded or tracer) or isinstance(process_group, Replica) or peers_of(process_group).size() == 1:
        return
    if is_sharded:
        raise TypeError(
            "input: expected the samples of this rank in training, got a DTensor; if it is sharded over samples, pass "
            "its to_local() and give its mesh as process_group"
        )
    raise RuntimeError(f"input: expected no {tracer} in training over several ranks; call model.eval() first")


def _check_counter(num_batches_tracked: Tensor | None, input: Tensor) -> None:
    if num_batches_tracked is None:
        return
    if num_batches_tracked.is_complex() or num_batches_tracked.dtype == torch.bool:
        raise TypeError(f"num_batches_tracked: expected an integer or float tensor, got {num_batches_tracked.dtype}")
    if not is_tracing() and num_batches_tracked.numel() != 1:
        raise RuntimeError(f"num_batches_tracked: expected one element, got {list(num_batches_tracked.size())}")
    _check_device("num_batches_tracked", num_batches_tracked, input)


def _check_device(name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        raise RuntimeError(f"{name}: expected it on {input.device}, where input is, got {tensor.device}")
