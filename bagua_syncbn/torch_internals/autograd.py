"""Autograd, transforms, tracers and modes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.fx.proxy import TraceError
from torch.utils import _python_dispatch, checkpoint

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Number = TypeVar("_Number")


def untraced(function: _Function) -> _Function:
    """Has torch.compile run ``function`` while it traces a call of it, and take the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def as_number(value: _Number) -> _Number:
    """Returns ``value`` as a number, where torch.compile may have a symbol for it: sets hold numbers only."""
    return next(iter({value}))


has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Returns the level of forward-mode differentiation; -1 outside of it.
level_of_duals: Callable[[], Any] = partial(vars(forward_ad).get, "_current_level", -1)

# Whether a gradient is a batch of gradients, as autograd.grad(..., is_grads_batched=True) makes it.
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def is_transforming() -> bool:
    """Whether a transform of :mod:`torch.func` or forward-mode differentiation is active.

    False while torch.compile traces, which records the step that runs in training.
    """
    if torch.compiler.is_compiling():
        return False
    return has_transforms() or level_of_duals() >= 0


# Returns the tensor, or the tensor inside a wrapper that an ended transform left behind.
unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns a faster ``function.apply``, for :func:`unwrapped` tensors outside of transforms only.

    torch's own ``apply`` checks for transforms in each call and unwraps each argument.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def is_capturing() -> bool:
    """Whether this thread's current stream is being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_exporting() -> bool:
    """Whether torch.export traces. torch.compiler.is_exporting is true in torch 2.10 for all compilation."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Context in which tensors are real and writable by any op, even under inference mode or FakeTensorMode.

    A default device stays in force, so callers name the device.
    """
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        yield


# Exceptions that end a forward pass and are no errors: a checkpoint has all the tensors that it repeats for, or
# torch.fx traces.
NO_ERRORS: tuple[type[Exception], ...] = (TraceError, getattr(checkpoint, "_StopRecomputationError", TraceError))
_dispatch_modes: Callable[[], list[Any]] = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list)
_selective_modes = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
_seen = nullcontext()


def unseen_by_selective_checkpointing() -> AbstractContextManager[Any]:
    """Context hidden from selective checkpointing, which expects a repetition to repeat all ops that it has seen."""
    if torch.compiler.is_compiling():
        return _seen
    for mode in _dispatch_modes():
        if isinstance(mode, _selective_modes):
            return torch._C._DisableTorchDispatch()
    return _seen
