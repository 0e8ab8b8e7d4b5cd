"""Modules: compiled, replicated; and hooks for saved tensors."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch._utils import _get_device_index
from torch.utils import _pytree

pytree: Any = _pytree

# The number of a device; the CPU is -1.
device_index: Callable[..., int] = _get_device_index


def composable_replicate() -> Any:
    """Returns torch's module for in-place data parallelism, which a function of the same name shadows."""
    return import_module("torch.distributed._composable.replicate")


def is_replicated_in_place(module: torch.nn.Module) -> bool:
    """Returns whether torch has made ``module`` data parallel in place."""
    composable = sys.modules.get("torch.distributed._composable.replicate")  # not imported if never used
    return composable is not None and isinstance(module, composable.DDP)


def forget_compiled_code(module: torch.nn.Module) -> None:
    """Makes the next call of a compiled model recompile it with the current layers."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported only by compilation: takes a second
    if dynamo is not None and any(
        part._compiled_call_impl is not None or isinstance(part, dynamo.OptimizedModule) for part in module.modules()
    ):
        # torch's guards detect changed layers, but torch.compile options can turn guards off.
        torch.compiler.reset()


# Returns whether torch currently allows saved-tensor hooks.
takes_saving_hooks: Callable[[], bool] = vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]


def saving_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the active saved-tensor hooks (pack and unpack); None if tensors are saved unchanged."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
