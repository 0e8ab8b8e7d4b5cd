"""Modules: compiled, replicated, folded; and hooks for saved tensors."""

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch._utils import _get_device_index
from torch.nn.utils import fusion
from torch.utils import _pytree

pytree: Any = _pytree

# The number of a device; the CPU is -1.
device_index: Callable[..., int] = _get_device_index


def composable_replicate() -> Any:
    """Returns the module of torch's data parallelism in place, which a function of the same name hides."""
    return import_module("torch.distributed._composable.replicate")


def is_replicated_in_place(module: torch.nn.Module) -> bool:
    """Whether torch has made ``module`` data parallel in place."""
    composable = sys.modules.get("torch.distributed._composable.replicate")  # absent if never used
    return composable is not None and isinstance(module, composable.DDP)


def forget_compiled_code(module: torch.nn.Module) -> None:
    """Lets the next call of a compiled model recompile it with the present layers."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # absent unless something was compiled; imports in a second
    if dynamo is not None and any(
        part._compiled_call_impl is not None or isinstance(part, dynamo.OptimizedModule) for part in module.modules()
    ):
        # torch's guards detect changed layers, but options of torch.compile can turn guards off.
        torch.compiler.reset()


def check_before_folding(check: Callable[[Any], None]) -> None:
    """Lets ``fuse_conv_bn_eval`` and ``fuse_linear_bn_eval`` call ``check`` with the folded layer.

    Both look up these functions in their module, wherever they were imported, and name the layer ``bn``.
    """

    def check_and_fold(fold: Callable[..., Any], *args: Any) -> Any:
        check(sys._getframe(1).f_locals.get("bn"))
        return fold(*args)

    for name in ("fuse_conv_bn_weights", "fuse_linear_bn_weights"):
        setattr(fusion, name, functools.partial(check_and_fold, getattr(fusion, name)))


# Whether torch allows hooks for saved tensors here.
takes_saving_hooks: Callable[[], bool] = vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]


def saving_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the pack and unpack hooks for saved tensors in force here; None if tensors are saved unchanged."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
