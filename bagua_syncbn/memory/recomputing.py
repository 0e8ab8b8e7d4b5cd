"""Models that recompute the outputs of layers in backward instead of storing them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch import nn

from ..conversion.hooks import report_notes, undo_hooks
from ..sync_batchnorm import SyncBatchNorm
from .recipes import Recomputed

_Module = TypeVar("_Module", bound=nn.Module)


@overload
def recompute_outputs(module: None = None) -> AbstractContextManager[None]: ...
@overload
def recompute_outputs(module: _Module, *, enabled: bool = True) -> _Module: ...
def recompute_outputs(module: _Module | None = None, *, enabled: bool = True) -> _Module | AbstractContextManager[None]:
    """Recomputes the outputs of synchronized layers in the backward pass instead of storing them.

    This stores as little as `In-Place Activated BatchNorm (Rota Bulò, Porzi and Kontschieder, 2018)
    <https://arxiv.org/abs/1712.02616>`__, which keeps the output of the activation and inverts it; here the input of
    the layer is kept, so any activation will do.

    Other layers may save the output of a synchronized layer, a view of it, or an activation that follows it. Backward
    recomputes these by elementwise passes over the input of the synchronized layer, which that layer saves anyway. The
    activation may be a module or a function, and may work in place. The values are bit for bit the same, because the
    same kernels run on the same input. In a process alone the layers then use the kernels of this package, and no
    longer :func:`torch.nn.functional.batch_norm`.

    Outputs are stored in evaluation and under :func:`torch.no_grad`, in code that torch.compile traces, and within
    other hooks for saved tensors, such as activation checkpointing and :func:`torch.autograd.graph.save_on_cpu`, which
    then decide. The output of a layer is stored too if the layer has a residual, or if its input is itself a recomputed
    output.

    Args:
        module: a model that recomputes outputs from now on, by a change of its class that copies and files keep. None
            for a context manager around forward passes in this thread, and so not for replicas of one process; the
            backward pass may run outside of it.
        enabled: False to end that for ``module``, as :func:`revert_sync_batchnorm` does too.

    Returns:
        ``module``, the same object, or the context manager.

    Raises:
        TypeError: ``module`` is no module.

    A backward pass raises RuntimeError if the input of a layer was written to after its forward pass. Writes through
    ``.data`` are not detected, because autograd does not see them.

    Example::

        >>> with bagua_syncbn.recompute_outputs():
        ...     loss = model(images).square().mean()
        >>> loss.backward()

        >>> model = bagua_syncbn.recompute_outputs(model)
    """
    if module is None and enabled:
        return Recomputed()
    if not isinstance(module, nn.Module):
        expected = "a torch.nn.Module or None" if enabled else "a torch.nn.Module with enabled=False"
        raise TypeError(f"module: expected {expected}, got {type(module).__name__}")
    # The wrapped module: replicas are copies of it, and each enters the context in its thread.
    target: nn.Module = module.module if isinstance(module, nn.DataParallel) else module
    if enabled and not _recomputes(target):
        cls: Any = type(target)
        object.__setattr__(target, "__class__", _recomputing_class(cls))
    elif not enabled and _recomputes(target):
        _restore_class(target)
    return module


def _recomputes(module: nn.Module) -> bool:
    return "_recomputed_class" in vars(type(module))


def _restore_class(module: nn.Module) -> None:
    object.__setattr__(module, "__class__", vars(type(module))["_recomputed_class"])


@functools.cache
def _recomputing_class(cls: Any) -> Any:
    """Returns a subclass of ``cls`` that recomputes outputs in its calls.

    Not a pair of hooks: torch calls no forward hook if Ctrl-C ends the forward. Not an attribute of the module: copies
    and replicas would call the forward of the first module.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.forward(self, *args, **kwargs)
        with Recomputed():
            return cls.forward(self, *args, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = cls.__reduce_ex__(self, protocol)
        make, arguments, *rest = reduced
        return _make_recomputing, (make, *(cls if given is type(self) else given for given in arguments)), *rest

    namespace = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce_ex,
        "_recomputed_class": cls,
        "forward": functools.wraps(cls.forward)(forward),
    }
    return type(cls.__name__, (cls,), namespace)


def _make_recomputing(make: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    """Makes a module for a copy or from a file."""
    return recompute_outputs(make(*arguments))


@report_notes.register
def _notes(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for part in filter(_recomputes, model.modules()):
        layers = (layer for layer in part.modules() if isinstance(layer, SyncBatchNorm))
        yield from ((layer, "outputs are recomputed") for layer in layers)


@undo_hooks.register
def _undo(module: nn.Module) -> Callable[[], None]:
    parts = list(filter(_recomputes, module.modules()))
    for part in parts:
        _restore_class(part)

    def restore() -> None:
        for part in parts:
            recompute_outputs(part)

    return restore
