"""Freezes statistics by keeping layers in evaluation mode, see ``SyncBatchNorm.__setattr__``."""

from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .._names import name_of
from .._step.checks import check_callable
from .._torch.modules import forget_compiled_code
from .._warnings import warn
from ..conversion.convert import unchanged_on_error
from ..conversion.models import Filter, check_module, is_left_out, modules_with_names
from ..sync_batchnorm import SyncBatchNorm

_Module = TypeVar("_Module", bound=nn.Module)


def freeze_statistics(module: _Module, filter: Filter | None = None) -> _Module:
    """Makes synchronized layers of ``module`` normalize with running statistics even in training.

    Frozen layers do not communicate, and their buffers do not change. They remain in evaluation mode after ``train()``,
    in copies and pickles, after loading a state dict, and after a second conversion. ``repr`` and
    :func:`conversion_report` mark them. Weight and bias still train; ``layer.requires_grad_(False)`` freezes them.

    Args:
        module: the converted model, wrapped or not; or a single layer. All ranks of a group must freeze the same
            layers.
        filter: called with a layer's name, as in ``named_modules``, and the layer; returns False to skip it. A layer
            with several names is frozen if the filter returns True for any name.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is not a module, or ``filter`` is not callable with a name and a module; a batch
            normalization layer is not synchronized, or is lazy and uninitialized.
        ValueError: a layer has no running statistics.

    After these errors, ``module`` is unchanged. Warns if there is no layer to freeze. ``reset_running_stats`` of a
    frozen layer raises RuntimeError, and so does :func:`torch.optim.swa_utils.update_bn`, which calls it; use
    :func:`recalibrate_statistics`. :func:`revert_sync_batchnorm` refuses frozen layers.

    Example::

        >>> bagua_syncbn.freeze_statistics(model.backbone)
        >>> model.train()
        >>> model.backbone.bn1.training
        False
    """
    layers = _layers_of(module, filter)
    for layer, names in layers.items():
        where = name_of(layer, names[0])
        if not isinstance(layer, SyncBatchNorm):
            raise TypeError(f"module: {where} is not synchronized; convert the model, or exclude the layer with filter")
        if isinstance(layer, LazyModuleMixin):
            raise TypeError(f"module: {where} is lazy and uninitialized; call the model once first")
        if layer.running_mean is None or layer.running_var is None:
            raise ValueError(f"module: {where} has no running statistics; exclude the layer with filter")
    if not layers:
        warn(f"freeze_statistics: found no layer to freeze in {type(module).__name__}")
    forget_compiled_code(module)
    with unchanged_on_error(module):
        for layer in layers:
            if not is_frozen(layer):
                mode, layer.training = layer.training, False
                layer._sync_state.frozen_mode = mode
    return module


def unfreeze_statistics(module: _Module, filter: Filter | None = None) -> _Module:
    """Undoes :func:`freeze_statistics`.

    A layer gets its parent module's mode. If ``module`` is itself a layer, it gets the last requested mode.

    Args:
        module: the model, wrapped or not; or a single layer.
        filter: as for :func:`freeze_statistics`; returns False to leave a layer frozen.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is not a module, or ``filter`` is not callable with a name and a module.
    """
    layers = [layer for layer in _layers_of(module, filter) if is_frozen(layer)]
    parents = {child: parent for parent in module.modules() for child in parent.children()}
    forget_compiled_code(module)
    with unchanged_on_error(module):
        for layer in layers:
            mode, layer._sync_state.frozen_mode = layer._sync_state.frozen_mode, None
            layer.training = parents[layer].training if layer in parents else mode
    return module


def is_frozen(module: nn.Module) -> bool:
    """Returns True if :func:`freeze_statistics` froze ``module``."""
    return isinstance(module, SyncBatchNorm) and module._sync_state.frozen_mode is not None


def _layers_of(module: nn.Module, filter: Filter | None) -> dict[Any, list[str]]:
    """Returns the batch normalization layers of ``module`` that ``filter`` does not skip, and all names of each."""
    check_module(module)
    check_callable("filter", filter, "name", "module")
    return {
        part: names
        for part, names in modules_with_names(module).items()
        if isinstance(part, _BatchNorm) and not is_left_out(part, names, filter)
    }
