"""Frozen statistics: layers that normalize by their running statistics, also while the model around them trains.

A frozen layer is a layer in evaluation that ``train()`` leaves there. So all that is known of layers in evaluation is
true of it, whatever its class and its forward, and nothing else in the package asks whether a layer is frozen.
"""

import warnings
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from . import changes
from .findings import Filter, check_filter, check_module, is_data_parallel, is_left_out, modules_with_names, where_is

_Module = TypeVar("_Module", bound=nn.Module)


def freeze_statistics(module: _Module, filter: Filter | None = None, *, parameters: bool = False) -> _Module:
    """Makes batch normalization layers of ``module`` normalize by their running statistics in training too.

    The layers send nothing, leave their buffers, and compute in every way what they compute in evaluation. They stay in
    evaluation through ``train()``, in copies and pickles, when a state dict is loaded, and through
    :func:`convert_sync_batchnorm` and :func:`revert_sync_batchnorm`. As in conversion a layer stays the same object: it
    gets a class derived from its own, of the same name, whose ``train`` leaves it in evaluation. Modules within a
    layer follow the mode of the model. The layer's ``repr`` and :func:`conversion_report` tell that it is frozen.

    Layers of torch are frozen as well as synchronized ones. Code that makes new layers, such as torch's own converter,
    makes them unfrozen.

    Args:
        module: the model, wrapped or not; or a single layer. All ranks of a group must freeze the same layers: to the
            other ranks, a rank that freezes one alone is a rank that leaves its call out.
        filter: called with the name of a layer, as in ``named_modules``, and the layer; one for which it returns False
            stays as it is. A layer with several names is frozen if it returns True for one of them.
        parameters: whether weight and bias of these layers stop requiring gradients too.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is no module, or ``filter`` is not callable; a layer is TorchScript, parametrized, or lazy
            and has not seen an input.
        ValueError: a layer has no running statistics.
        RuntimeError: ``parameters`` is true and ``module`` is data parallel already: the engine waits for the gradients
            of the parameters that required them when the model was wrapped.

    If it raises, ``module`` is unchanged. It warns if there is no layer to freeze. Frozen layers stay frozen, with
    ``parameters=True`` their parameters too. Their ``reset_running_stats`` raises RuntimeError, and so does
    :func:`torch.optim.swa_utils.update_bn`, which calls it; use :func:`recalibrate_statistics`.

    Example::

        >>> bagua_syncbn.freeze_statistics(model.backbone)
        >>> model.train()
        >>> model.backbone.bn1.training
        False
    """
    layers = _layers_of(module, filter)
    for layer, names in layers.items():
        _check_that_it_can_be_frozen(layer, names[0])
    if parameters:
        _check_that_it_is_unwrapped(module)
    if not layers:
        warnings.warn(f"freeze_statistics: found no layer to freeze in {type(module).__name__}", stacklevel=2)
    for layer in layers:
        _freeze(layer, parameters)
    changes.forget_compiled_code(module)
    return module


def unfreeze_statistics(module: _Module, filter: Filter | None = None) -> _Module:
    """Undoes :func:`freeze_statistics`.

    Weight and bias that it made stop requiring gradients require them again. Each layer gets the mode of the module
    that holds it, and ``module``, if it is such a layer itself, the one that ``train()`` and ``eval()`` last asked for.

    Args:
        module: the model, wrapped or not; or a single layer.
        filter: as for :func:`freeze_statistics`; a layer for which it returns False stays frozen.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is no module, or ``filter`` is not callable; other code derived a class from that of a
            frozen layer, as a parametrization does.
        RuntimeError: parameters are to require gradients again, and ``module`` is data parallel already: the engine
            would not average them.

    If it raises, ``module`` is unchanged.
    """
    layers = [layer for layer in _layers_of(module, filter) if is_frozen(layer)]
    classes = [changes.class_without(type(layer), freezing) for layer in layers]
    if any(_asked_before(layer) for layer in layers):
        _check_that_it_is_unwrapped(module)
    holders = {part: holder for holder in module.modules() for part in holder.children()}
    for layer, cls in zip(layers, classes, strict=True):
        for name in _asked_before(layer):
            layer.get_parameter(name).requires_grad_()
        before = vars(layer).pop("before_freezing")
        object.__setattr__(layer, "__class__", cls)
        layer.training = holders[layer].training if layer in holders else before["training"]
    changes.forget_compiled_code(module)
    return module


def is_frozen(module: nn.Module) -> bool:
    """Whether :func:`freeze_statistics` has frozen ``module``."""
    return changes.has(type(module), freezing)


def freezing(cls: Any) -> dict[str, Any]:
    """Returns methods for layers of ``cls``: those of a layer that stays in evaluation."""

    def train(layer: Any, mode: bool = True) -> Any:
        cls.train(layer, mode)  # and all modules within
        layer.before_freezing = {**layer.before_freezing, "training": mode}  # a copy may share the old one
        layer.training = False
        return layer

    def extra_repr(layer: nn.Module) -> str:
        return ", ".join(filter(None, [cls.extra_repr(layer), "statistics frozen"]))

    def reset_running_stats(layer: nn.Module) -> NoReturn:
        raise RuntimeError(
            f"reset_running_stats: expected layers whose statistics move, got a frozen {type(layer).__name__}, which "
            "would normalize by a mean of 0 and a variance of 1 for good; call unfreeze_statistics first"
        )

    def prepare_scriptable(layer: nn.Module) -> NoReturn:
        raise TypeError(
            f"torch.jit.script: expected layers that train() puts in training, got a frozen {type(layer).__name__}, "
            "which TorchScript cannot keep from it; script a copy that unfreeze_statistics has had"
        )

    methods = {"train": train, "extra_repr": extra_repr, "reset_running_stats": reset_running_stats}
    return {**methods, "__prepare_scriptable__": prepare_scriptable}


def _layers_of(module: nn.Module, filter: Filter | None) -> dict[nn.Module, list[str]]:
    """Returns the batch normalization layers of ``module`` that ``filter`` does not leave out, with their names."""
    check_module(module)
    check_filter(filter)
    return {
        part: names
        for part, names in modules_with_names(module).items()
        if (isinstance(part, _BatchNorm) or _is_scripted_layer(part)) and not is_left_out(part, names, filter)
    }


def _is_scripted_layer(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and hasattr(module, "running_mean")


def _check_that_it_can_be_frozen(layer: Any, name: str) -> None:
    where = where_is(layer, name)
    if _is_scripted_layer(layer):
        raise TypeError(f"module: expected layers of Python modules, got a TorchScript {where}; freeze, then script")
    if parametrize.is_parametrized(layer):
        raise TypeError(f"module: expected layers without parametrizations, got {where}; leave it out with filter")
    if isinstance(layer, LazyModuleMixin):
        raise TypeError(f"module: expected layers that have seen an input, got {where}; call the model once before")
    if layer.running_mean is None or layer.running_var is None:
        raise ValueError(f"module: expected layers with running statistics, got none in {where}; filter it out")


def _check_that_it_is_unwrapped(module: nn.Module) -> None:
    wrapped = next(filter(is_data_parallel, module.modules()), None)
    if wrapped is not None:
        raise RuntimeError(
            "module: expected a model that is not data parallel yet where parameters begin or cease to require "
            f"gradients, got {type(wrapped).__name__}; freeze or unfreeze first, then wrap"
        )


def _freeze(layer: Any, parameters: bool) -> None:
    if not is_frozen(layer):
        vars(layer)["before_freezing"] = {"training": layer.training}
        changes.apply(layer, freezing)
        layer.training = False
    for name in ("weight", "bias") if parameters else ():
        parameter = getattr(layer, name)
        if parameter is not None and parameter.requires_grad:
            parameter.requires_grad_(False)
            layer.before_freezing[name] = True


def _asked_before(layer: Any) -> list[str]:
    """Returns which parameters of a frozen layer required gradients before."""
    return [name for name in ("weight", "bias") if layer.before_freezing.get(name)]
