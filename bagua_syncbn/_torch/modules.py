"""Modules: compiled, replicated, folded; and hooks for saved tensors."""

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch._utils import _get_device_index
from torch.nn.utils import fusion
from torch.utils import _pytree

pytree: Any = _pytree

# The number of a device; the CPU is -1.
device_index: Callable[..., int] = _get_device_index


def defined_in(module: str, name: str) -> Any:
    """Returns the class ``name`` of ``module``, for isinstance; () until the module has been imported.

    Some modules take a second to import. Also returns () if another thread is importing the module and has not defined
    the class yet.
    """
    return getattr(sys.modules.get(module), name, ())


def replicate_in_place(module: torch.nn.Module, process_group: Any) -> None:
    """Makes ``module`` data parallel with torch's composable DistributedDataParallel (no wrapper module)."""
    replicate = import_module("torch.distributed._composable.replicate").replicate
    replicate(module, process_group=process_group)
    # Initialize here instead of in the first forward, torch's default, which ranks may reach at different times.
    replicate.state(module).lazy_init()


def is_replicated_in_place(module: torch.nn.Module) -> bool:
    """Returns whether torch has made ``module`` data parallel in place."""
    return isinstance(module, defined_in("torch.distributed._composable.replicate", "DDP"))


def forget_compiled_code(module: torch.nn.Module) -> None:
    """Makes the next call of a compiled model recompile it with the current layers."""
    if any(part._compiled_call_impl is not None or is_compiled_wrapper(part) for part in module.modules()):
        # torch's guards detect changed layers, but torch.compile options can turn guards off.
        torch.compiler.reset()


def copy_all(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copies values to targets in a single call, which Ctrl-C cannot end halfway."""
    if targets:
        torch._foreach_copy_([target.detach() for target in targets], values)


def is_compiled_wrapper(module: torch.nn.Module) -> bool:
    """Returns whether ``module`` is the wrapper that ``torch.compile`` returns."""
    return isinstance(module, defined_in("torch._dynamo.eval_frame", "OptimizedModule"))


_TRACE = inspect.unwrap(fx.Tracer.trace).__code__  # torch._dynamo wraps this method


def is_name_for_tracer() -> bool:
    """Returns whether torch.fx called the caller to get the name of the module that it traces as the root."""
    return sys._getframe(2).f_code is _TRACE


def check_before_folding(check: Callable[[Any], None]) -> None:
    """Makes ``fuse_conv_bn_eval`` and ``fuse_linear_bn_eval`` call ``check`` with the folded layer.

    These functions look up a helper in torch's module at each call, so a wrapper around the helper runs. The wrapper
    finds the layer in the local variable ``bn`` of its caller.
    """

    def check_and_fold(fold: Callable[..., Any], *args: Any) -> Any:
        check(sys._getframe(1).f_locals.get("bn"))
        return fold(*args)

    for name in ("fuse_conv_bn_weights", "fuse_linear_bn_weights"):
        setattr(fusion, name, functools.partial(check_and_fold, getattr(fusion, name)))


# Returns whether torch currently allows saved-tensor hooks.
takes_saving_hooks: Callable[[], bool] = vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]


def saving_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the active saved-tensor hooks (pack and unpack); None if tensors are saved unchanged."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
