"""Freezes statistics: layers stay in evaluation mode, see ``SyncBatchNorm.__setattr__``."""

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ..checks import check_callable
from ..layer_state import Frozen
from ..models import Filter, check_module, is_data_parallel, is_left_out, modules_with_names
from ..names import name_of
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals.modules import forget_compiled_code

_Module = TypeVar("_Module", bound=nn.Module)


def freeze_statistics(module: _Module, filter: Filter | None = None, *, parameters: bool = False) -> _Module:
    """Makes synchronized layers of ``module`` use their running statistics in training too.

    The layers stay in evaluation mode: they do not communicate and keep their buffers. They stay frozen when their mode
    is set, in copies and pickles, when a state dict is loaded, and when the model is converted again. Their ``repr``
    and :func:`conversion_report` show it.

    Args:
        module: the converted model, wrapped or not; or a single layer. All ranks of a group must freeze the same
            layers.
        filter: called with the name of a layer, as in ``named_modules``, and the layer; returns False to skip it. A
            layer with several names is frozen if it returns True for one of them.
        parameters: also freeze weight and bias of these layers: they stop requiring gradients.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is not a module, or ``filter`` is not callable; a batch normalization layer is not
            synchronized, or is lazy and uninitialized; ``parameters`` is true and a layer is parametrized.
        ValueError: a layer has no running statistics.
        RuntimeError: ``parameters`` is true and ``module`` is already data parallel: the wrapper waits for gradients of
            all parameters that required them when the model was wrapped.

    If it raises, ``module`` is unchanged. It warns if there is no layer to freeze. ``reset_running_stats`` of a frozen
    layer raises RuntimeError, and so does :func:`torch.optim.swa_utils.update_bn`, which calls it; use
    :func:`recalibrate_statistics`. :func:`revert_sync_batchnorm` refuses frozen layers.

    Example::

        >>> bagua_syncbn.freeze_statistics(model.backbone)
        >>> model.train()
        >>> model.backbone.bn1.training
        False
    """
    layers = _layers_of(module, filter)
    for layer, names in layers.items():
        _check_can_freeze(layer, names[0])
    if parameters:
        _check_parameters_can_change(module, layers)
    if not layers:
        warnings.warn(f"freeze_statistics: found no layer to freeze in {type(module).__name__}", stacklevel=2)
    for layer in layers:
        _freeze(layer, parameters)
    forget_compiled_code(module)
    return module


def unfreeze_statistics(module: _Module, filter: Filter | None = None) -> _Module:
    """Undoes :func:`freeze_statistics`.

    Parameters that it froze require gradients again. Each layer gets the mode of its parent module. If ``module`` is
    itself a frozen layer, it gets the mode that was last requested.

    Args:
        module: the model, wrapped or not; or a single layer.
        filter: as for :func:`freeze_statistics`; returns False for layers that stay frozen.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is not a module, or ``filter`` is not callable; a layer with frozen parameters was
            parametrized since.
        RuntimeError: parameters are frozen, and ``module`` is already data parallel: the wrapper would not average
            their gradients.

    If it raises, ``module`` is unchanged.
    """
    layers: list[Any] = [layer for layer in _layers_of(module, filter) if is_frozen(layer)]
    with_parameters = [layer for layer in layers if layer._sync_state.frozen.parameters]
    if with_parameters:
        _check_parameters_can_change(module, with_parameters)
    holders = {part: holder for holder in module.modules() for part in holder.children()}
    for layer in layers:
        frozen = layer._sync_state.frozen
        for name in frozen.parameters:
            getattr(layer, name).requires_grad_()
        layer._sync_state.frozen = None
        layer.training = holders[layer].training if layer in holders else frozen.training
    forget_compiled_code(module)
    return module


def is_frozen(module: nn.Module) -> bool:
    """Returns True if :func:`freeze_statistics` froze ``module``."""
    return isinstance(module, SyncBatchNorm) and module._sync_state.frozen is not None


def _layers_of(module: nn.Module, filter: Filter | None) -> dict[nn.Module, list[str]]:
    """Returns the batch normalization layers of ``module`` that ``filter`` does not skip, with their names."""
    check_module(module)
    check_callable("filter", filter, "a function of a name and a module")
    return {
        part: names
        for part, names in modules_with_names(module).items()
        if isinstance(part, _BatchNorm) and not is_left_out(part, names, filter)
    }


def _check_can_freeze(layer: Any, name: str) -> None:
    where = name_of(layer, name)
    if not isinstance(layer, SyncBatchNorm):
        raise TypeError(
            f"module: expected synchronized layers, got {where}; call convert_sync_batchnorm first or skip it by filter"
        )
    if isinstance(layer, LazyModuleMixin):
        raise TypeError(f"module: expected initialized layers, got the lazy {where}; call the model once before")
    if layer.running_mean is None or layer.running_var is None:
        raise ValueError(f"module: expected layers with running statistics, got none in {where}; skip it by filter")


def _check_parameters_can_change(module: nn.Module, layers: Iterable[nn.Module]) -> None:
    wrapped = next(filter(is_data_parallel, module.modules()), None)
    if wrapped is not None:
        raise RuntimeError(
            f"module: requires_grad of parameters cannot change inside {type(wrapped).__name__}; freeze or unfreeze "
            "before the model is wrapped"
        )
    for layer in filter(parametrize.is_parametrized, layers):
        raise TypeError(
            f"module: requires_grad of parametrized layers cannot change, got {type(layer).__name__}; skip it by filter"
        )


def _freeze(layer: Any, parameters: bool) -> None:
    state = layer._sync_state
    if state.frozen is None:
        frozen, layer.training = Frozen(layer.training), False
        state.frozen = frozen
    found = [name for name in ("weight", "bias") if getattr(layer, name) is not None] if parameters else []
    required = tuple(name for name in found if getattr(layer, name).requires_grad)
    for name in required:
        getattr(layer, name).requires_grad_(False)
    state.frozen = state.frozen._replace(parameters=state.frozen.parameters + required)
