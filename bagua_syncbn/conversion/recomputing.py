"""Models whose calls recompute the outputs of layers in backward instead of storing them."""

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
    """Recomputes the outputs of synchronized layers in the backward pass instead of storing them.

    Other layers may save the output of a synchronized layer, a view of it, or an activation that follows it. Backward
    recomputes these by elementwise passes over the input of the synchronized layer, which that layer saves anyway. The
    activation may be a module or a function, and may work in place. The values are bit for bit the same, because the
    same kernels run on the same input. In a process alone the layers then use the kernels of this package, and no
    longer :func:`torch.nn.functional.batch_norm`.

    Outputs are stored in evaluation and under :func:`torch.no_grad`, in code that torch.compile traces, and within
    other hooks for saved tensors, such as those of activation checkpointing and of
    :func:`torch.autograd.graph.save_on_cpu`, which then decide. Two more outputs are stored: that of a layer with a
    residual, and one whose input is itself a recomputed output.

    Args:
        module: a model, whose calls recompute outputs from now on, as those of its copies do. The model stays the same
            object and gets a class derived from its own. None for a context manager, to be entered around forward
            passes; the backward pass may be outside of it.
        enabled: False to give ``module`` its class back, as :func:`revert_sync_batchnorm` does too.

    Returns:
        ``module``, the same object, or the context manager.

    Raises:
        TypeError: ``module`` is no module; with ``enabled=False``, other code derived a class from the class that the
            model got.

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
    (changes.apply if enabled else changes.undo)(module, recomputing)
    return module


def recomputing(cls: Any) -> dict[str, Any]:
    """Returns methods for modules of ``cls``: a call that runs within :class:`Recomputed`."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.__call__(module, *args, **kwargs)
        with Recomputed():
            return cls.__call__(module, *args, **kwargs)

    return {"__call__": call}
