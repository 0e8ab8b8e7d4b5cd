"""Checks of a call, made before its rank waits for another rank."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]

from . import ops
from .communicators import Replica, spec_of
from .options import EPS_MODES, Options
from .torch_internals import is_exporting


def check_dimensions(input: Tensor) -> None:
    """Raises ValueError unless ``input`` has a dimension of samples and one of channels."""
    if input.dim() < 2:
        raise ValueError(f"input: expected at least 2 dimensions, (N, C, *), got {input.dim()}")


def check_eps_mode(eps_mode: str) -> None:
    """Raises ValueError unless ``eps_mode`` is "plus" or "clamp"."""
    if eps_mode not in EPS_MODES:
        raise ValueError(f'eps_mode: expected "plus" or "clamp", got {eps_mode!r}')


def checked_options(options: Options, training: bool) -> Options:
    """Returns ``options`` with their activation as an :class:`~bagua_syncbn.ops.Activation`.

    Raises:
        ValueError: ``eps`` or ``eps_mode`` is wrong, or the activation is unknown.
    """
    check_eps_mode(options.eps_mode)
    positive = training and options.eps_mode == "plus"
    if options.eps < 0 or (positive and options.eps == 0):
        expected = "a number above 0 in training" if positive else "a number of at least 0"
        raise ValueError(f"eps: expected {expected}, got {options.eps}")
    activation = ops.activation_of(options.activation)
    return options if activation is options.activation else options._replace(activation=activation)


def check_tensors(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, buffers: ops.Buffers
) -> None:
    """Raises for wrong tensors of this rank's call, before this rank joins a collective that other ranks wait in."""
    running_mean, running_var, num_batches_tracked, _ = buffers
    check_is_tensor("input", input)
    if input.dtype not in ops.DTYPES:
        *names, last = (str(dtype).removeprefix("torch.") for dtype in ops.DTYPES)
        raise TypeError(f"input: expected a {', '.join(names)} or {last} tensor, got {input.dtype}")
    check_dimensions(input)
    _check_vector("running_mean", running_mean, input)
    _check_vector("running_var", running_var, input)
    _check_vector("weight", weight, input)
    _check_vector("bias", bias, input)
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean, running_var: expected both or neither, got one of them")
    _check_counter(num_batches_tracked, input)
    _check_residual(residual, input)


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, without the import of torch.distributed.tensor, which takes a second."""
    tensors = sys.modules.get("torch.distributed.tensor")  # absent where nobody has made a DTensor
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def _check_is_local(name: str, tensor: Tensor) -> None:
    if is_distributed(tensor):
        raise TypeError(f"{name}: expected a tensor of this rank, as input is, got {type(tensor).__name__}")


def check_is_tensor(name: str, value: Any) -> None:
    """Raises TypeError unless ``value``, of the argument ``name``, is a tensor."""
    if not isinstance(value, Tensor):
        raise not_a_tensor(name, value)


def not_a_tensor(name: str, value: Any) -> TypeError:
    """Returns the error for an argument ``name`` that is no tensor."""
    return TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def _check_vector(name: str, tensor: Tensor | None, input: Tensor) -> None:
    if tensor is None:
        return
    check_is_tensor(name, tensor)
    _check_is_local(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating point tensor, got {tensor.dtype}")
    if not is_tracing() and tensor.size() != input.shape[1:2]:  # a comparison would become part of the trace
        raise RuntimeError(
            f"{name}: expected {input.size(1)} elements, one for each channel of input, got {list(tensor.size())}"
        )
    _check_device(name, tensor, input)


def _check_residual(residual: Tensor | None, input: Tensor) -> None:
    if residual is None:
        return
    check_is_tensor("residual", residual)
    _check_is_local("residual", residual)
    if residual.dtype != input.dtype:
        raise TypeError(f"residual: expected {input.dtype}, the dtype of input, got {residual.dtype}")
    if not is_tracing() and residual.size() != input.size():
        raise RuntimeError(f"residual: expected {list(input.size())}, the size of input, got {list(residual.size())}")
    _check_device("residual", residual, input)


def check_tracer(process_group: Any) -> None:
    """Raises RuntimeError under a tracer that a group of several ranks does not accept, before it is made."""
    tracer = "torch.jit.trace" if is_tracing() else "torch.export" if is_exporting() else None
    if tracer is None or isinstance(process_group, Replica) or spec_of(process_group).size() == 1:
        return
    raise RuntimeError(f"input: expected no {tracer} in training over several ranks; call model.eval() first")


def _check_counter(num_batches_tracked: Tensor | None, input: Tensor) -> None:
    if num_batches_tracked is None:
        return
    check_is_tensor("num_batches_tracked", num_batches_tracked)
    _check_is_local("num_batches_tracked", num_batches_tracked)
    if num_batches_tracked.is_complex() or num_batches_tracked.dtype == torch.bool:
        raise TypeError(f"num_batches_tracked: expected an integer or float tensor, got {num_batches_tracked.dtype}")
    if not is_tracing() and num_batches_tracked.numel() != 1:
        raise RuntimeError(f"num_batches_tracked: expected one element, got {list(num_batches_tracked.size())}")
    _check_device("num_batches_tracked", num_batches_tracked, input)


def _check_device(name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        raise RuntimeError(f"{name}: expected it on {input.device}, where input is, got {tensor.device}")
