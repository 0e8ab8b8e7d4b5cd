"""Conversion between local and synchronized layers by changing their classes.

A converted layer is the same object: parameters, buffers, hooks, attributes, training flag and all references remain
valid. ``layer.__class__`` changes, usually to a class that inherits from the old class and then from
:class:`SyncBatchNorm`, so that method resolution finds ``SyncBatchNorm.forward`` instead of torch's.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from .._errors import undone_on_error
from .._groups import EVERYONE, GroupSpec, ProcessGroupLike, spec_of
from .._names import Origin, name_of
from .._ops.options import DEFAULTS
from .._step.checks import check_flag
from .._step.layer_state import LayerState
from .._torch.modules import forget_compiled_code
from .._warnings import warn
from ..communicators.torch_engine import group_before
from ..sync_batchnorm import SyncBatchNorm
from .classes import class_before_conversion, full_name
from .converters import group_of
from .models import Filter, check_module
from .report import FOREIGN, conversion_report

_Module = TypeVar("_Module", bound=nn.Module)

# Attributes for options that torch's layers do not have, and their defaults.
_DEFAULTS = {name: default for name, default in DEFAULTS.items() if name not in ("eps", "momentum")}

undo_hooks: list[Callable[[nn.Module], None]] = []
"""Called with the model before revert changes classes; each undoes a change by another part of the package."""


def convert_sync_batchnorm(
    module: _Module,
    process_group: ProcessGroupLike = None,
    *,
    filter: Filter | None = None,
    skip_nonfinite: bool = False,
) -> _Module:
    """Converts all batch normalization layers of ``module`` to synchronized layers, in place.

    Only the class of a layer changes, not the object: parameters, buffers, hooks, attributes, training flag and
    optimizers remain valid. A custom ``forward`` is also kept; in training, it raises an error unless it calls
    ``super().forward`` or ``F.batch_norm``, or a submodule is converted. Also converts :class:`torch.nn.SyncBatchNorm`.
    Convert before wrapping the model. A compiled model is recompiled at the next call. :func:`conversion_report` lists
    the layers, and why some are skipped.

    Args:
        module: the model, which may be a single layer.
        process_group: the ranks to synchronize, see :data:`~bagua_syncbn.ProcessGroupLike`. None preserves existing
            process groups; the default is all ranks of the job.
        filter: called with the name of a layer, as in ``named_modules``, and the layer; False skips the layer.
            ``filter`` is called even for layers that conversion would refuse. A shared layer is converted if any of the
            names returns True.
        skip_nonfinite: True sets ``skip_nonfinite`` of all these layers, see :class:`SyncBatchNorm`.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is not a module, is TorchScript, or contains a batch normalization layer that conversion
            cannot synchronize; ``process_group`` is of an unknown type; ``filter`` is not callable with a name and a
            module; ``skip_nonfinite`` is not a bool; a registered converter returns no layer class.
        ValueError: this rank is not in ``process_group``, or the job does not have these ranks; ``module`` contains a
            PyG layer with ``allow_single_element``.
        RuntimeError: an unsynchronized layer is in a data parallel model; ``process_group`` is a mesh of several
            dimensions.

    If it raises, ``module`` is unchanged. Warns if no layer is converted, and if layers named like batch
    normalization are not derived from torch's and not registered with :func:`register_converter`.

    Example::

        >>> model = bagua_syncbn.convert_sync_batchnorm(model, filter=lambda name, layer: "head" not in name)
        >>> model = bagua_syncbn.with_bagua(model, [optimizer])
    """
    spec: Any = spec_of(process_group)
    check_flag("skip_nonfinite", skip_nonfinite)
    report = conversion_report(module, filter=filter)
    for row in report.layers:
        if row.error is not None:
            raise row.error
    targets = {row.module: row.target for row in report.layers if row.target is not None}
    foreign = [name_of(row.module, row.names[0]) for row in report.layers if row.reason == FOREIGN]
    if foreign:
        warn(
            f"module: cannot convert {', '.join(foreign)}, not derived from torch's batch normalization; use "
            "register_converter, or exclude these layers with filter"
        )
    forget_compiled_code(module)
    with unchanged_on_error(module):
        for layer, cls in targets.items():
            change_class(layer, cls)
            if spec is not EVERYONE:
                layer.process_group = spec
            if skip_nonfinite:
                vars(layer)["skip_nonfinite"] = True
        name_layers(module)
    if not targets:
        warn(f"convert_sync_batchnorm: {type(module).__name__}: {report.summary()}")
    return module


def revert_sync_batchnorm(module: _Module) -> _Module:
    """Restores the class of all synchronized layers of ``module``, in place.

    Layers created as :class:`SyncBatchNorm1d`, ``2d`` or ``3d`` become :class:`torch.nn.BatchNorm1d`, ``2d`` or ``3d``,
    and layers created as :class:`SyncBatchNorm` become :class:`~bagua_syncbn.sync_batchnorm.BatchNorm`. A former
    :class:`torch.nn.SyncBatchNorm` gets the old process group back. :func:`recompute_outputs` and
    :func:`fuse_activations` are undone, and ``skip_nonfinite`` is removed.

    Args:
        module: the model, which may be a copy or loaded from a file.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is not a module, or contains a layer of a subclass of :class:`SyncBatchNorm` that does not
            define its ``local_class``.
        ValueError: a layer has an activation or ``eps_mode="clamp"``, which the new class does not compute, or is
            frozen, which torch's layers cannot be.
        RuntimeError: ``module`` is inside :func:`masked` or :func:`accumulate_statistics`.

    If it raises, ``module`` is unchanged.
    """
    check_module(module)
    forget_compiled_code(module)
    with unchanged_on_error(module):
        for undo in undo_hooks:
            undo(module)
        layers = [part for part in module.modules() if isinstance(part, SyncBatchNorm)]
        for layer in layers:
            cls = class_before_conversion(type(layer))
            _check_can_revert(layer, cls)
            vars(layer).pop("_sync_state", None)
            for name in _DEFAULTS.keys() & vars(layer).keys():
                if not hasattr(cls, name):
                    del vars(layer)[name]
            if "group_before" in vars(layer):
                held = vars(layer).pop("group_before")
                vars(layer)["process_group"] = group_before(held) if isinstance(held, GroupSpec) else held
            object.__setattr__(layer, "__class__", cls)
    return module


def _check_can_revert(layer: SyncBatchNorm, cls: type[nn.Module]) -> None:
    """Raises unless ``cls`` computes the same outputs as ``layer``: checks contexts, frozen statistics and options.

    Options set by the layer's class are not checked: that class chose ``cls`` as ``local_class``.
    """
    if layer._sync_state.attachments:
        raise RuntimeError(
            f"module: cannot revert {name_of(layer)} inside masked, accumulate_statistics or a replica; leave it first"
        )
    if layer._sync_state.frozen_mode is not None:
        raise ValueError(f"module: cannot revert frozen {name_of(layer)}; call unfreeze_statistics first")
    for name, default in _DEFAULTS.items():
        value = vars(layer).get(name, default)
        if value != default and name != "skip_nonfinite" and not hasattr(cls, name):
            raise ValueError(
                f"module: cannot revert {name_of(layer)} to {full_name(cls)}, which has no {name}={value!r}; set "
                f"{name} to {default!r}, and move its computation elsewhere in the model"
            )


def change_class(layer: nn.Module, cls: type[SyncBatchNorm]) -> None:
    """Changes the class of ``layer`` to ``cls``. The layer keeps its process group, which a later revert restores."""
    if not isinstance(layer, SyncBatchNorm) and "process_group" in vars(layer):
        group = vars(layer).pop("process_group")
        with suppress(TypeError):  # not a group: training raises, and revert restores the value
            group = spec_of(group)
        vars(layer).update(group_before=group, _sync_state=LayerState(group))
    elif (group := group_of(layer)) is not None:
        vars(layer)["_sync_state"] = LayerState(spec_of(group))
    object.__setattr__(layer, "__class__", cls)


def name_layers(module: nn.Module) -> None:
    """Stores in each synchronized layer the name in ``module`` and the model's identity, for messages."""
    name = type(module).__name__
    layers = {name: layer for name, layer in module.named_modules() if name and isinstance(layer, SyncBatchNorm)}
    origins = [layer._sync_state.origin for layer in layers.values() if layer._sync_state.origin is not None]
    before = {id(origin.model): origin.model for origin in origins}
    model = before.popitem()[1] if len(before) == 1 else None
    if model is None or model["name"] != name:  # else, the model was already converted
        model = OrderedDict(name=name)
    for name, layer in layers.items():
        layer._sync_state.origin = Origin(name, model)


def unchanged_on_error(module: nn.Module) -> AbstractContextManager[None]:
    """Context manager that restores all submodules' classes, attributes and children if the block raises."""
    before = []
    for part in module.modules():
        attributes: dict[str, Any] = {**vars(part), "_modules": copy(part._modules)}
        if "_sync_state" in attributes:
            attributes["_sync_state"] = replace(attributes["_sync_state"])
        before.append((part, type(part), attributes))

    def undo() -> None:
        for part, cls, attributes in before:
            object.__setattr__(part, "__class__", cls)
            vars(part).clear()
            vars(part).update(attributes)

    return undone_on_error(undo)


# Named as in torch's and Bagua's classes.
SyncBatchNorm.convert_sync_batchnorm = staticmethod(convert_sync_batchnorm)
