"""Checks of a call, before this rank waits for other ranks."""

import inspect
from math import inf
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import is_tracing

from .. import _ops as ops
from .._groups import spec_of
from .._names import name_of
from .._ops.options import Options
from .._torch.autograd import has_shape_only, is_exporting, is_recorded
from .._torch.modules import defined_in
from .call import Tensors

_Error = TypeVar("_Error", bound=Exception)


def named(error: _Error, layer: nn.Module | None) -> _Error:
    """Returns ``error`` with the name of ``layer`` prepended to its message."""
    if layer is None or type(error) not in (TypeError, ValueError, RuntimeError):
        return error
    return type(error)(f"{name_of(layer)}: {error}").with_traceback(error.__traceback__)


def check_number(name: str, value: Any, expected: str = "a number") -> None:
    """Raises TypeError unless ``value`` (argument ``name``) is a Python or NumPy number."""
    if not isinstance(value, (float, int, Real)):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` (argument ``name``) is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def check_callable(name: str, value: Any, *arguments: str) -> None:
    """Raises TypeError unless ``value`` (argument ``name``) is None or can be called with ``arguments``."""
    if value is None:
        return
    got = type(value).__name__
    if callable(value):
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):  # some builtins have no signature
            return
        try:
            signature.bind(*arguments)
            return
        except TypeError:
            got = f"a {got} with the arguments {signature}"
    raise TypeError(f"{name}: expected a function {name}({', '.join(arguments)}), or None, got {got}")


def check_is_tensor(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` (argument ``name``) is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def check_is_dense(name: str, tensor: Tensor) -> None:
    """Raises TypeError if ``tensor`` (argument ``name``) is nested or has no strides."""
    if tensor.layout is not torch.strided or tensor.is_nested:  # some nested tensors have the layout torch.strided
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name}: expected a dense (strided) tensor, got {got}")


def check_dimensions(input: Tensor) -> None:
    """Raises ValueError unless ``input`` has at least the dimensions (N, C)."""
    if input.dim() < 2:
        raise ValueError(f"input: expected at least 2 dimensions, (N, C, *), got {input.dim()}")


def checked_options(options: Options, uses_batch: bool) -> Options:
    """Returns ``options`` with their activation as an :class:`~bagua_syncbn._ops.Activation`, and numbers for tensors.

    Raises:
        TypeError, ValueError: an option is invalid, see :func:`~bagua_syncbn.sync_batch_norm`.
    """
    eps, momentum = (_number_in(value) for value in (options.eps, options.momentum))
    if not isinstance(options.eps_mode, str) or options.eps_mode not in ("plus", "clamp"):
        raise ValueError(f'eps_mode: expected "plus" or "clamp", got {options.eps_mode!r}')
    check_number("eps", eps)
    is_positive = uses_batch and options.eps_mode == "plus"
    if not 0 <= eps < inf or (is_positive and eps == 0):  # also rejects NaN
        bound = "above 0 in training" if is_positive else "of at least 0"
        raise ValueError(f"eps: expected a finite number {bound}, got {eps}")
    if momentum is not None:
        check_number("momentum", momentum, "a number or None")
        if not -inf < momentum < inf:
            raise ValueError(f"momentum: expected a finite number or None, got {momentum}")
        momentum = float(momentum)
    check_flag("skip_nonfinite", options.skip_nonfinite)
    return options._replace(eps=float(eps), momentum=momentum, activation=ops.activation_of(options.activation))


def _number_in(value: Any) -> Any:
    """Returns the number in a scalar CPU tensor, which torch's functions accept for a number; else ``value``."""
    is_number = isinstance(value, Tensor) and value.dim() == 0 and value.is_cpu and not value.requires_grad
    return value.item() if is_number else value


def check_tensors(tensors: Tensors, buffers: ops.Buffers, uses_batch: bool, layer: nn.Module | None) -> None:
    """Raises if a tensor argument of a call of ``layer`` is invalid."""
    input, weight, bias, residual = tensors
    running_mean, running_var, counter = buffers
    check_is_tensor("input", input)
    check_is_dense("input", input)
    if input.dtype not in ops.DTYPES:
        raise TypeError(f"input: expected a float16, bfloat16, float32 or float64 tensor, got {input.dtype}")
    check_dimensions(input)
    is_traced = is_tracing()  # comparisons would become part of the trace
    for name, tensor in zip(
        ("running_mean", "running_var", "weight", "bias"), (*buffers[:2], weight, bias), strict=True
    ):
        if tensor is None:
            continue
        _check_is_plain(name, tensor, input)
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: expected a floating point tensor, got {tensor.dtype}")
        if is_traced:
            continue
        if tensor.size() != input.shape[1:2]:
            if tensor.size() == (getattr(layer, "num_features", None),):
                raise RuntimeError(f"input: expected {tensor.size(0)} channels, got {input.size(1)}")
            raise RuntimeError(f"{name}: expected {input.size(1)} elements, one per channel, got {list(tensor.size())}")
        if uses_batch and name.startswith("running") and tensor.size(0) > 1 and tensor.stride(0) == 0:
            raise RuntimeError(f"{name}: expected an element in memory for each channel, got an expanded tensor")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean, running_var: expected both or neither, got one of them")
    if running_mean is running_var is not None:
        raise ValueError("running_mean, running_var: expected two tensors, got the same one twice")
    if counter is not None:
        _check_is_plain("num_batches_tracked", counter, input)
        if counter.dtype.is_complex or counter.dtype == torch.bool:
            raise TypeError(f"num_batches_tracked: expected an integer or float tensor, got {counter.dtype}")
        if not is_traced and counter.numel() != 1:
            raise RuntimeError(f"num_batches_tracked: expected one element, got {list(counter.size())}")
    if residual is not None:
        _check_is_plain("residual", residual, input)
        check_is_dense("residual", residual)
        if residual.dtype != input.dtype:
            hint = "; pass a mask as mask=..." * (residual.dtype == torch.bool)
            raise TypeError(f"residual: expected {input.dtype}, the dtype of input, got {residual.dtype}{hint}")
        if not is_traced and residual.size() != input.size():
            size = list(residual.size())
            raise RuntimeError(f"residual: expected {list(input.size())}, the size of input, got {size}")


def _check_is_plain(name: str, tensor: Tensor, input: Tensor) -> None:
    """Raises unless ``tensor`` is a plain tensor on the device of ``input``."""
    if type(tensor) not in (Tensor, nn.Parameter):
        check_is_tensor(name, tensor)
        if is_distributed(tensor):
            raise TypeError(f"{name}: expected a plain tensor, like input, got {type(tensor).__name__}")
    if tensor.device != input.device:
        raise RuntimeError(f"{name}: expected a tensor on {input.device}, like input, got one on {tensor.device}")


def is_distributed(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is a DTensor. Does not import torch.distributed.tensor, which takes a second."""
    return isinstance(tensor, defined_in("torch.distributed.tensor", "DTensor"))


def check_tracer(process_group: Any, input: Tensor) -> None:
    """Raises RuntimeError under a tracer that cannot record communication, before the group is created."""
    tracer = "torch.jit.trace" if is_tracing() else "torch.export" if is_exporting() else None
    remedy = "call model.eval() first"
    if tracer is None and not torch.compiler.is_compiling() and is_recorded() and not has_shape_only(input):
        tracer, remedy = 'make_fx(tracing_mode="real")', 'use "fake" or "symbolic"'
    if tracer is not None and spec_of(process_group).size() != 1:
        raise RuntimeError(f"{tracer} cannot record training over several ranks; {remedy}")


def check_local_count(input: Tensor, layer: nn.Module | None) -> None:
    """Raises ValueError for a single value per channel in single-rank training of ``layer``."""
    if not is_tracing() and input.numel() == input.size(1) > 0:
        text = f"input: expected more than 1 value per channel when training, got input size {input.size()}"
        raise named(ValueError(text), layer)
