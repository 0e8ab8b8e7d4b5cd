"""Activation modules whose work the layer before them does: the layer marks its output, the module passes it on.

That nothing but such a module reads the output of a layer, :func:`~bagua_syncbn.fuse_activations` has proven of the
forward that calls both, and noted in the module that has this forward. A layer heeds the note only where that very
forward calls it and nothing watches what goes on in between. Anywhere else layer and activation are what they were.
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from itertools import product
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.nn.modules.module import _has_any_global_hook

from .ops.activations import MODULES
from .tracing import Proxy, as_one_node

# Kept in the module whose forward calls a layer. By the path to the layer ("" for the module itself): the paths of the
# modules that its output goes through. The last is the activation; those before it return their input.
Chains = dict[str, tuple[str, ...]]
CHAINS = "bagua_syncbn_chains"
_MARK = "_bagua_syncbn_activated_by"


class PassingOn(nn.Module):
    """An activation that returns what a layer has marked for it, and works as ever on anything else."""

    local_class: type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_one_node(self, input, (input,), {})
        if not torch.compiler.is_compiling() and vars(input).pop(_MARK, None) is self:
            return input
        output: Tensor = super().forward(input)
        return output


PASSING: dict[type[nn.Module], type[PassingOn]] = {
    cls: type(f"Passing{cls.__name__}", (PassingOn, cls), {"__module__": __name__, "local_class": cls})
    for cls in MODULES
}
"""What each class of activations becomes."""
globals().update({cls.__name__: cls for cls in PASSING.values()})  # for pickle


def activation_in(module: PassingOn) -> str | tuple[str, float]:
    """Returns what ``module`` computes, as a layer takes it."""
    return MODULES[module.local_class](module)


def marked_for(module: PassingOn, output: Tensor) -> Tensor:
    """Returns ``output``, which ``module`` is to pass on."""
    vars(output)[_MARK] = module
    return output


def follower_of(layer: nn.Module) -> PassingOn | None:
    """Returns the activation that alone reads what the forward of ``layer``, which calls this, returns, if known."""
    if torch.compiler.is_compiling() or is_tracing():
        return None
    frame = sys._getframe(2)
    while frame.f_code in _CALLS_OF_MODULES and frame.f_back is not None:
        frame = frame.f_back
    parent = whose_forward_is(frame)
    if parent is None or CHAINS not in vars(parent):
        return None
    chains: Chains = vars(parent)[CHAINS]
    return next((_end_of(parent, chain) for path, chain in chains.items() if module_at(parent, path) is layer), None)


def follower_within(layer: nn.Module) -> PassingOn | None:
    """Returns the activation that alone reads what is normalized in the own forward of ``layer``, if known."""
    if torch.compiler.is_compiling() or is_tracing():
        return None
    chain = vars(layer).get(CHAINS, {}).get("")
    return None if chain is None else _end_of(layer, chain)


def whose_forward_is(frame: FrameType | None, patched: CodeType | None = None) -> nn.Module | None:
    """Returns the module whose forward, or ``patched`` for it, is what ``frame`` runs, itself or by its methods.

    A method that other code calls may do what was not read: with other arguments, or once more in a backward pass.
    """
    module = None if frame is None else frame.f_locals.get("self")
    if not isinstance(module, nn.Module):
        return None
    entry, codes = entry_of(type(module)), codes_of(type(module))  # type: ignore[arg-type]
    while frame is not None and (frame.f_code in codes or frame.f_code is patched):
        if frame.f_code is entry or frame.f_code is patched:
            return module if frame.f_locals.get("self") is module else None
        frame = frame.f_back
    return None


_CALLS_OF_MODULES = (nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__)


def _end_of(parent: nn.Module, chain: tuple[str, ...]) -> PassingOn | None:
    """Returns the last module of ``chain``, if what is marked for it still gets there as it is."""
    modules = [module_at(parent, path) for path in chain]
    if _has_any_global_hook() or any(module is None or _is_watched(module) for module in modules):
        return None
    if not all(map(returns_its_input, modules[:-1])):
        return None
    return modules[-1] if isinstance(modules[-1], PassingOn) else None


def module_at(parent: nn.Module, path: str) -> nn.Module | None:
    """Returns the module at ``path`` in ``parent``; None if there is none any more."""
    module: nn.Module | None = parent
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module


def returns_its_input(module: nn.Module | None) -> bool:
    """Whether ``module`` does nothing: an Identity, or a Dropout that drops nothing."""
    return type(module) is nn.Identity or (isinstance(module, _DROPOUTS) and module.p == 0)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _is_watched(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return any(hooks) or "forward" in vars(module)


def unfuse_activations(module: nn.Module) -> None:
    """Makes the layers and activations of a model what they were before they were fused."""
    for part in module.modules():
        for name in (CHAINS, "is_followed", "activation_note"):
            vars(part).pop(name, None)
        if isinstance(part, PassingOn):
            object.__setattr__(part, "__class__", part.local_class)


@functools.lru_cache(maxsize=1024)
def codes_of(cls: Any) -> frozenset[CodeType]:
    """Returns the code of the forward of ``cls``, of functions in it and of methods that these name."""
    codes: set[CodeType] = set()

    def add(code: CodeType) -> None:
        if code in codes:
            return
        codes.add(code)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                add(inner)
        for method in _methods_named(cls, code):
            add(method.__code__)

    entry = entry_of(cls)
    if entry is not None:
        add(entry)
    return frozenset(codes)


@functools.lru_cache(maxsize=1024)
def entry_of(cls: Any) -> CodeType | None:
    """Returns the code of the forward of ``cls``, without what it is decorated with."""
    forward = inspect.unwrap(cls.forward)
    return forward.__code__ if isinstance(forward, FunctionType) else None


def _methods_named(cls: type[nn.Module], code: CodeType) -> Iterator[FunctionType]:
    """Also those that ``super()`` may lead to."""
    for name, base in product(code.co_names, cls.__mro__):
        method = vars(base).get(name)
        is_own = base is not nn.Module and (name == "forward" or not hasattr(nn.Module, name))
        if is_own and isinstance(method, FunctionType):
            yield inspect.unwrap(method)
