"""Conversion between local and synchronized layers, by change of class.

A converted layer is the same object: parameters, buffers, hooks, attributes, training flag and all references to it
stay. Only ``layer.__class__`` changes, to a class that inherits from the old class and from :class:`SyncBatchNorm`, in
that order, so that method resolution finds ``SyncBatchNorm.forward`` in the place of torch's.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from ..checks import check_flag
from ..communicators.torch_engine import group_before
from ..groups import EVERYONE, GroupSpec, spec_of
from ..layer_state import LayerState
from ..models import Filter, check_module
from ..names import ConvertedModel, Origin, name_of
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals.modules import forget_compiled_code
from .classes import class_before_conversion, full_name
from .converters import groups_of
from .findings import BY_ITSELF, Finding, examine, is_unsynchronized
from .hooks import undo_changes, undone
from .report import summary

_Module = TypeVar("_Module", bound=nn.Module)


def convert_sync_batchnorm(
    module: _Module,
    process_group: Any = None,
    *,
    filter: Filter | None = None,
    skip_nonfinite: bool = False,
    verbose: bool = False,
) -> _Module:
    """Makes every batch normalization layer of ``module`` a synchronized one, in place.

    The layers stay the same objects and only change their class, so optimizers may be made before or after, and
    parameters, buffers, hooks, attributes and training flags stay. Subclasses of torch's layers keep their own
    ``forward``, which raises in training if it calls neither ``super().forward``, ``F.batch_norm`` nor a converted
    layer that is a part of it. Layers of :class:`torch.nn.SyncBatchNorm` are converted too. Convert before the model is
    wrapped. A compiled model is compiled anew at its next call. :func:`conversion_report` says what is converted and
    why the rest is not.

    Args:
        module: the model, which may be a single layer.
        process_group: the ranks to synchronize with: a :class:`torch.distributed.ProcessGroup` or a
            ``BaguaProcessGroup``; an int for that many consecutive ranks, ``"node"`` for those of this host, a list of
            lists of ranks or a 1-D ``DeviceMesh``, see :func:`sync_group`; or a
            :class:`~bagua_syncbn.communicators.Communicator`. None leaves layers that have a group as they are;
            layers without one synchronize with all ranks of the job.
        filter: called with the name of a layer, as in ``named_modules``, and the layer; one for which it returns False
            stays as it is. It is also asked for layers that would be refused. A layer with several names is converted
            if it returns True for one of them.
        skip_nonfinite: True to set ``skip_nonfinite`` of all these layers, see :class:`SyncBatchNorm`; False leaves it.
        verbose: whether to print, in one line, how many layers were converted.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is no module, holds a batch normalization layer that conversion cannot synchronize, or is
            TorchScript; ``process_group`` is of no known kind; ``filter`` is not callable.
        ValueError: this rank is not in ``process_group``, or that describes groups which the job does not have;
            ``module`` holds a layer of PyG with ``allow_single_element``.
        RuntimeError: ``module`` is data parallel already.

    If it raises, ``module`` is unchanged. It warns if there was nothing to convert; if layers stay that synchronize by
    themselves or are called batch normalization, of a class that is neither derived from torch's nor known by
    :func:`register_converter`; and if opacus is imported and would accept the layers for private training.

    Example::

        >>> model = bagua_syncbn.convert_sync_batchnorm(model, filter=lambda name, layer: "head" not in name)
        >>> model = bagua_syncbn.with_bagua(model, [optimizer])
    """
    spec: Any = spec_of(process_group)
    check_flag("skip_nonfinite", skip_nonfinite)
    check_module(module)
    with undone(module):
        findings = examine(module, filter)
        # All classes are found before any layer changes, so that a refused layer leaves the model unchanged.
        targets = _targets_of(findings)
        for warning in _warnings_about(findings):
            warnings.warn(warning, stacklevel=2)
        with _restored_on_error(targets):
            for layer, cls in targets.items():
                change_class(layer, cls)
                if spec is not EVERYONE:
                    layer.process_group = spec
                if skip_nonfinite:
                    vars(layer)["skip_nonfinite"] = True
            _name_layers(module)
    forget_compiled_code(module)
    text = f"convert_sync_batchnorm: {type(module).__name__}: {summary(findings)}"
    if verbose:
        print(text)
    if not targets:
        warnings.warn(f"{text}; conversion_report tells why" if findings else text, stacklevel=2)
    return module


def _targets_of(findings: Iterable[Finding]) -> dict[nn.Module, type[SyncBatchNorm]]:
    """Returns the new class of each layer; raises the error of a refused one."""
    targets: dict[nn.Module, type[SyncBatchNorm]] = {}
    for finding in findings:
        if finding.error is not None:
            raise finding.error
        if finding.target is not None:
            targets[finding.module] = finding.target
    return targets


def _warnings_about(findings: Sequence[Finding]) -> Iterator[str]:
    stay = [name_of(finding.module, finding.names[0]) for finding in findings if finding.reason == BY_ITSELF]
    if stay:
        yield (
            f"module: these layers synchronize by themselves: {', '.join(stay)}; register a class for them with "
            "register_converter, or that they stay"
        )
    unknown = [name_of(finding.module, finding.names[0]) for finding in findings if is_unsynchronized(finding)]
    if unknown:
        yield (
            f"module: these layers are not synchronized: {', '.join(unknown)}; their classes are not derived from "
            "torch's batch normalization. Register a class for them with register_converter, or leave them out with "
            "filter"
        )
    accepted = _accepted_by_opacus(finding.target for finding in findings if finding.target is not None)
    if accepted:
        yield (
            "module: opacus is imported, knows only torch's classes, and so accepts batch normalization, which is not "
            f"private, in {', '.join(accepted)}; use ModuleValidator.fix before conversion, or register the validator "
            "of torch.nn.BatchNorm2d for type(layer) in ModuleValidator.VALIDATORS"
        )


def revert_sync_batchnorm(module: _Module) -> _Module:
    """Gives every synchronized layer of ``module`` the class that it had before conversion, in place.

    Layers that were made as :class:`SyncBatchNorm1d`, ``2d`` or ``3d`` become :class:`torch.nn.BatchNorm1d`, ``2d`` or
    ``3d``, and those made as :class:`SyncBatchNorm` become :class:`~bagua_syncbn.sync_batchnorm.BatchNorm`. Layers that
    were :class:`torch.nn.SyncBatchNorm` become that again, with the group that they had. :func:`recompute_outputs` and
    :func:`fuse_activations` are undone.

    Args:
        module: the model, which may have been loaded from a file or copied.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is no module, or holds a layer of a subclass of :class:`SyncBatchNorm` that does not say
            what its ``local_class`` is.
        ValueError: a layer has an activation or ``eps_mode="clamp"``, and the class that it is to get computes neither;
            a layer is frozen, which torch's layers cannot be.

    If it raises, ``module`` is unchanged.
    """
    check_module(module)
    restore = undo_changes(module)
    try:
        layers = [part for part in module.modules() if isinstance(part, SyncBatchNorm)]
        changed = {layer: class_before_conversion(type(layer)) for layer in layers}
        for layer, cls in changed.items():
            _check_that_it_can_be_local(layer, cls)
        with _restored_on_error(changed):
            for layer, cls in changed.items():
                groups = vars(layer).get("groups_before", {})
                for name in ("_sync_state", "groups_before"):
                    vars(layer).pop(name, None)
                for name, held in groups.items():
                    vars(layer)[name] = group_before(held) if isinstance(held, GroupSpec) else held
                object.__setattr__(layer, "__class__", cls)
    except BaseException:
        restore()
        raise
    forget_compiled_code(module)
    return module


def _check_that_it_can_be_local(layer: SyncBatchNorm, cls: type[nn.Module]) -> None:
    """Raises ValueError if ``layer`` is frozen or has an option that its new class ``cls`` would ignore.

    Options that the layer's class sets are not checked, because the
    same class names ``cls`` as its ``local_class``.
    """
    if layer._sync_state.frozen is not None:
        where = name_of(layer)
        raise ValueError(f"module: expected layers that are not frozen, got {where}; call unfreeze_statistics first")
    for name, default in (("fused_activation", None), ("eps_mode", "plus")):
        value = vars(layer).get(name, default)
        if value != default and not hasattr(cls, name):
            where = name_of(layer)
            raise ValueError(
                f"module: expected layers that {full_name(cls)} can stand for, got {where} with {name}={value!r}; set "
                f"{name} to {default!r}, and have something else in the model do it where it matters"
            )


def _accepted_by_opacus(classes: Iterable[type[nn.Module]]) -> list[str]:
    """Returns the names of ``classes`` without a validator of opacus, which refuses torch's batch normalization."""
    validators = sys.modules.get("opacus.validators")  # absent if never used
    if validators is None:
        return []
    return sorted({cls.__name__ for cls in classes if cls not in validators.ModuleValidator.VALIDATORS})


def change_class(layer: nn.Module, cls: type[SyncBatchNorm]) -> None:
    """Changes the class of ``layer`` to ``cls``; the layer keeps its process group."""
    if not isinstance(layer, SyncBatchNorm):
        _take_group(layer)
    object.__setattr__(layer, "__class__", cls)


def _name_layers(module: nn.Module) -> None:
    """Gives each synchronized layer its name in ``module`` and the model's identity, by which ranks know the layer."""
    name = type(module).__name__
    layers = {name: layer for name, layer in module.named_modules() if name and isinstance(layer, SyncBatchNorm)}
    before = {layer._sync_state.origin.model for layer in layers.values() if layer._sync_state.origin is not None}
    model = before.pop() if len(before) == 1 else None
    if model is None or model.name != name:  # a model that is converted again keeps its object
        model = ConvertedModel(name)
    for name, layer in layers.items():
        layer._sync_state.origin = Origin(name, model)


def _take_group(layer: nn.Module) -> None:
    """Makes the group in an attribute of ``layer``, of any name, its ``process_group``, and keeps it for revert."""
    groups = groups_of(layer)
    if not groups:
        return
    held = next(iter(groups.values()))
    with suppress(TypeError):  # a value that only the layer's own class knows: training refuses it, revert restores it
        held = spec_of(held)
    for name in groups:
        del vars(layer)[name]
    vars(layer).update(groups_before=dict.fromkeys(groups, held), _sync_state=LayerState(held))


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """Returns a copy of the attributes of ``layer``, its record included."""
    state: LayerState | None = vars(layer).get("_sync_state")
    return vars(layer) | ({} if state is None else {"_sync_state": replace(state)})


@contextmanager
def _restored_on_error(layers: Iterable[nn.Module]) -> Iterator[None]:
    before = [(layer, type(layer), _attributes(layer)) for layer in layers]
    try:
        yield
    except BaseException:
        for layer, cls, attributes in before:
            object.__setattr__(layer, "__class__", cls)
            vars(layer).clear()
            vars(layer).update(attributes)
        raise


# The converter has this name on the classes of torch and Bagua too.
SyncBatchNorm.convert_sync_batchnorm = staticmethod(convert_sync_batchnorm)
