"""Fusion of a layer with the activation that follows it in an ``nn.Sequential``.

The forward of ``nn.Sequential`` is known to give the output of each module to the next one and to no other code. The
container therefore computes both together, while layer and activation stay the same for any other code that calls them.
"""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.nn.modules.module import _has_any_global_hook

from ..ops.activations import MODULES
from ..sync_batchnorm import SyncBatchNorm, forward_with
from ..tracing import Proxy
from . import changes
from .findings import check_module

_Module = TypeVar("_Module", bound=nn.Module)

# Methods as they were at import. Modules whose methods were patched later are called one by one.
_CALL = nn.Module.__call__
_LAYER, _SEQUENTIAL = SyncBatchNorm.forward, (nn.Sequential.forward, nn.Sequential.__iter__)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_KNOWN: tuple[type[nn.Module], ...] = (*MODULES, nn.Identity, *_DROPOUTS)
_FORWARDS = {cls: cls.forward for cls in _KNOWN}


class Pair(NamedTuple):
    """A layer and the activation that follows it in a container."""

    layer: SyncBatchNorm
    activation: nn.Module
    names: tuple[str, str]
    """Names of both in the container."""


def fuse_activations(module: _Module) -> _Module:
    """Makes synchronized layers compute the activations that follow them in a :class:`torch.nn.Sequential`.

    Layer and activation become one pass over memory, which stores only the input of the layer for the backward pass.
    Outputs stay the same up to the rounding of the value between the two.

    Containers whose forward is that of :class:`torch.nn.Sequential` are changed, for each layer in them that is
    followed by a torch module for one of the activations that layers can compute; :class:`torch.nn.Identity`, and
    dropout with ``p=0``, may stand between. The container stays the same object and gets a class derived from its own.
    Layers and activations do not change, and compute the same as before when other code calls them. The container
    still calls them one after the other where one of them has hooks or was compiled with ``compile()``, within
    :func:`masked`, and while torch.compile, ``torch.jit.trace`` or ``torch.export`` trace. Each call checks this anew,
    so modules may be exchanged.

    Args:
        module: the model, converted by :func:`convert_sync_batchnorm`.

    Returns:
        ``module``, the same object. :func:`revert_sync_batchnorm` undoes it.

    Raises:
        TypeError: ``module`` is no module.

    A warning says if there is nothing to fuse. An activation elsewhere can be given to the layer (``activation``), or
    use :func:`recompute_outputs`, which stores neither output.

    Example::

        >>> model = bagua_syncbn.fuse_activations(bagua_syncbn.convert_sync_batchnorm(model))
        >>> print(bagua_syncbn.conversion_report(model))
    """
    check_module(module)
    containers = [part for part in module.modules() if next(pairs_in(part), None) is not None]
    for container in containers:
        changes.apply(container, fusing)
    if not containers:
        warnings.warn(
            "fuse_activations: found no synchronized layer with an activation next to it in an nn.Sequential",
            stacklevel=2,
        )
    return module


def fusing(cls: Any) -> dict[str, Any]:
    """Returns methods for containers of ``cls``: a forward in which layers compute the activations after them."""

    def forward(container: nn.Module, input: Any) -> Any:
        is_traced = torch.compiler.is_compiling() or is_tracing() or not isinstance(input, Tensor)
        if is_traced or isinstance(input, Proxy) or not _is_sequential(cls) or _has_any_global_hook():
            return cls.forward(container, input)
        modules: list[Any] = list(container._modules.values())
        at = 0
        while at < len(modules):
            end = _activation_of(modules, at)
            module = modules[at]
            if end is None:
                input, at = module(input), at + 1
            else:
                input, at = forward_with(module, input, modules[end]), end + 1
        return input

    def extra_repr(container: nn.Module) -> str:
        fused = "; ".join(f"{first} with {second}" for _, _, (first, second) in pairs_in(container))
        before: str = cls.extra_repr(container)
        return ", ".join(filter(None, [before, fused and f"computed together: {fused}"]))

    return {"forward": forward, "extra_repr": extra_repr}


def pairs_in(container: nn.Module) -> Iterator[Pair]:
    """Yields the pairs that ``container`` computes together, or could; none unless it has nn.Sequential's forward."""
    cls = changes.class_before_changes(type(container))
    if not _is_sequential(cls) or "forward" in vars(container):
        return
    names, modules = list(container._modules), list(container._modules.values())
    for at, layer in enumerate(modules):
        end = _activation_of(modules, at)
        if end is not None:
            yield Pair(layer, modules[end], (names[at], names[end]))  # type: ignore[arg-type]


def _is_sequential(cls: Any) -> bool:
    return (cls.forward, getattr(cls, "__iter__", None)) == _SEQUENTIAL


def _activation_of(modules: list[Any], at: int) -> int | None:
    """Returns the index of the activation that follows the layer at ``at``, if both can be computed together."""
    layer = modules[at]
    if not isinstance(layer, SyncBatchNorm) or not _is_called_plainly(layer, _LAYER):
        return None
    if layer.fused_activation is not None or layer._masking is not None:
        return None
    for index in range(at + 1, len(modules)):
        module = modules[index]
        cls = type(module)
        if cls not in _FORWARDS or not _is_called_plainly(module, _FORWARDS[cls]):
            return None
        if cls in MODULES:
            return index
        if cls in _DROPOUTS and module.p != 0:
            return None
    return None


def _is_called_plainly(module: nn.Module, forward: Any) -> bool:
    """Whether a call of ``module`` is just a call of ``forward``, without hooks or compiled code."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    is_compiled = module._compiled_call_impl is not None
    cls = type(module)
    return not (any(hooks) or is_compiled or "forward" in vars(module)) and (cls.__call__, cls.forward) == (
        _CALL,
        forward,
    )
