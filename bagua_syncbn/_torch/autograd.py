"""Autograd, transforms, tracers and modes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.proxy import TraceError
from torch.utils import _python_dispatch, checkpoint

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Number = TypeVar("_Number")


def untraced(function: _Function) -> _Function:
    """Makes torch.compile run ``function`` instead of tracing it, with a constant result."""
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


def as_number(value: _Number) -> _Number:
    """Returns ``value``, specialized to a constant if a tracer has a symbol for it."""
    if torch.compiler.is_compiling():
        return next(iter({value}))  # torch.compile puts only constants into sets
    return int(value) if isinstance(value, torch.SymInt) else value  # pyrefly: ignore[bad-return]


has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Returns the level of forward-mode differentiation; -1 outside of it.
level_of_duals: Callable[[], Any] = partial(vars(forward_ad).get, "_current_level", -1)

# Whether a gradient is a batch of gradients, as with autograd.grad(..., is_grads_batched=True).
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def is_transforming() -> bool:
    """Returns whether a transform of :mod:`torch.func` or forward-mode differentiation is active, in eager code."""
    return not torch.compiler.is_compiling() and (has_transforms() or level_of_duals() >= 0)


# Returns the active FakeTensorMode, or None.
_fake_mode: Callable[[], Any] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)


# Return the active ProxyTorchDispatchMode, or None; and whether ops go to modes before autograd (pre_dispatch=True).
_proxy_mode: Callable[[], Any] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)
_is_pre_dispatch: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)


def is_recorded() -> bool:
    """Returns whether a graph records the ops of this call, to run them again with data: under torch.compile and
    torch.export, and in eager code under make_fx and aot_function."""
    return torch.compiler.is_compiling() or _proxy_mode() is not None or _is_pre_dispatch()


# How a call runs: "transformed" is eager code under torch.func or forward-mode differentiation; "dispatched" is eager
# code in a FakeTensorMode, where tensors have shapes but no values, or whose ops a mode records; "traced" is
# torch.jit.trace; "compiled" is torch.compile or torch.export. Not an Enum, because access to its members is slow.
Mode: TypeAlias = Literal["eager", "transformed", "dispatched", "traced", "compiled"]


def current_mode() -> Mode:
    """Returns the mode of the current call."""
    if torch.compiler.is_compiling():
        return "compiled"
    if torch._C._is_tracing():
        return "traced"
    if has_transforms() or level_of_duals() >= 0:
        return "transformed"
    if torch._C._len_torch_dispatch_stack() == 0 and not _is_pre_dispatch():
        return "eager"
    return "eager" if _fake_mode() is None and not is_recorded() else "dispatched"


def is_fake(value: object) -> bool:
    """Returns whether ``value`` is a fake tensor."""
    return isinstance(value, FakeTensor)


def has_shape_only(value: object) -> bool:
    """Returns whether results of ``value`` have a shape but no values: it is a meta or fake tensor, or a FakeTensorMode
    is active."""
    return is_fake(value) or (isinstance(value, torch.Tensor) and value.is_meta) or _fake_mode() is not None


def is_without_data(value: object) -> bool:
    """Returns whether a call with ``value`` never has values: only its shape is known, and no graph records it."""
    return not is_recorded() and has_shape_only(value)


# Returns the tensor, or the tensor inside a wrapper that a finished transform left behind.
unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns ``function.apply`` without its checks for transforms and wrappers, for :func:`unwrapped` tensors."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # pyrefly: ignore[missing-attribute]
    return apply


def is_capturing() -> bool:
    """Returns whether the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_exporting() -> bool:
    """Returns whether torch.export is tracing. In torch 2.10, ``torch.compiler.is_exporting()`` is also True under
    torch.compile."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Context manager in which tensors are real and writable, even under inference mode or FakeTensorMode.

    A default device still applies, so callers must pass a device.
    """
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        yield


# Exceptions that stop a forward without an error: a checkpoint has recomputed all its tensors, or torch.fx is tracing.
NO_ERRORS: tuple[type[Exception], ...] = (TraceError, getattr(checkpoint, "_StopRecomputationError", TraceError))
_dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack


def unseen_by_selective_checkpointing() -> AbstractContextManager[Any]:
    """Context manager that hides ops from selective checkpointing. A recomputation must repeat all visible ops."""
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and any(type(mode).__module__ == checkpoint.__name__ for mode in _dispatch_modes()):
        return torch._C._DisableTorchDispatch()
    return nullcontext()


def on_mutation_of_saved_tensors(op: str, library: torch.library.Library) -> None:
    """Makes ``op`` of ``library`` run under ``torch.autograd.graph.allow_mutation_on_saved_tensors``, which otherwise
    requires all mutable arguments of an op. It clones saved tensors before an op writes to them."""

    @torch.library.register_torch_dispatch(op, torch.autograd.graph._CloneArgBeforeMutateMode, lib=library)
    def _(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
        for argument in op._schema.arguments:
            tensor = given.get(argument.name)
            if tensor is not None and argument.alias_info is not None:
                mode.__torch_dispatch__(torch.ops.aten.copy_.default, types, (tensor, tensor))  # changes no value
        return op(*args, **kwargs)
