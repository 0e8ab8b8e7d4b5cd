"""Models that recompute the outputs of layers in backward instead of storing them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch import nn

from ..conversion.hooks import report_notes, revert_hooks
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals.modules import in_place_of_forward
from .recipes import Recomputed

_Module = TypeVar("_Module", bound=nn.Module)
# A name, because torch numbers hooks, and another hook may have the number that a copy or file holds.
_NAME = "bagua_syncbn.recompute_outputs"


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
        module: a model that recomputes outputs from now on, by a hook that copies and files keep. None for a context
            manager, to be entered around forward passes in this thread, and so not for replicas of one process; the
            backward pass may be outside of it.
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
    # Replicas run in threads of their own, so each of them enters the context.
    hooked: Any = module.module if isinstance(module, nn.DataParallel) else module
    if not enabled:
        hooked._forward_pre_hooks.pop(_NAME, None)
        return module
    hooked._forward_pre_hooks[_NAME] = _recompute
    return module


@report_notes.register
def _notes(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    part: Any
    for part in model.modules():
        if _NAME in part._forward_pre_hooks:
            layers = (layer for layer in part.modules() if isinstance(layer, SyncBatchNorm))
            yield from ((layer, "outputs are recomputed") for layer in layers)


@revert_hooks.register
def _undo(module: nn.Module) -> Callable[[], None]:
    parts: list[Any] = list(module.modules())
    hooked = [part for part in parts if _NAME in part._forward_pre_hooks]
    for part in hooked:
        del part._forward_pre_hooks[_NAME]

    def restore() -> None:
        for part in hooked:
            part._forward_pre_hooks[_NAME] = _recompute

    return restore


def _recompute(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        in_place_of_forward(sys._getframe(), _recomputed)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        with Recomputed():
            return forward(*args, **kwargs)

    return recomputed
