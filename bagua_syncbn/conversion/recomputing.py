"""Models that make outputs of layers anew in backward, whoever calls them."""

from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch import nn

from ..autograd import Recomputed
from . import changes

_Module = TypeVar("_Module", bound=nn.Module)


@overload
def recompute_outputs(module: None = None) -> AbstractContextManager[None]: ...
@overload
def recompute_outputs(module: _Module, *, enabled: bool = True) -> _Module: ...
def recompute_outputs(module: _Module | None = None, *, enabled: bool = True) -> _Module | AbstractContextManager[None]:
    """Keeps the outputs of synchronized layers out of what is stored for the backward pass.

    What other layers would save of such an output, of a view of it, or of an activation that follows, is made anew in
    backward by elementwise passes over the input of the synchronized layer, which that saves anyway. It does not matter
    whether the activation is a module or a function, nor whether it works in place. The values are bit for bit the
    same, because the same kernels run on the same input. In a process alone the layers compute by the kernels of this
    package while it is in force, and no longer by :func:`torch.nn.functional.batch_norm`.

    It has no effect in evaluation and under :func:`torch.no_grad`, in code that torch.compile traces, and within other
    hooks for saved tensors, such as those of activation checkpointing and of :func:`torch.autograd.graph.save_on_cpu`:
    there these decide. Two outputs are stored as ever: that of a layer with a residual, and one whose input is itself
    an output that is made anew.

    Args:
        module: a model, which does so from now on whenever it is called; copies of it, too. It stays the same object
            and gets a class derived from its own. None for a context manager, to be entered around forward passes;
            the backward pass may be outside of it.
        enabled: False to give ``module`` its class back, as :func:`revert_sync_batchnorm` does too.

    Returns:
        ``module``, the same object, or the context manager.

    Raises:
        TypeError: ``module`` is no module; with ``enabled=False``, something else has derived a class from the one
            that it got.

    A backward pass raises RuntimeError if the input of a layer was written to after its forward pass. Writes through
    ``.data``, which autograd does not see, are not seen here.

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
    (changes.apply if enabled else changes.undo)(module, recomputing)
    return module


def recomputing(cls: Any) -> dict[str, Any]:
    """Returns what modules of ``cls`` get: a call within :class:`Recomputed`, whatever ends it."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.__call__(module, *args, **kwargs)
        with Recomputed():
            return cls.__call__(module, *args, **kwargs)

    return {"__call__": call}
