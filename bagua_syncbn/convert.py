"""Conversion between local and synchronized layers, by change of class.

A converted layer is the same object: parameters, buffers, hooks, attributes, training flag and all references to it
stay what they are. What changes is ``layer.__class__``, to a class that inherits from the old one and from
:class:`SyncBatchNorm`, in that order, so that method resolution meets ``SyncBatchNorm.forward`` just where it used to
meet torch's.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from .communicators import RankGroup, check_process_group
from .derive import class_after_conversion, class_before_conversion, groups_of, is_candidate
from .sync_batchnorm import SyncBatchNorm
from .wrapper import is_data_parallel

_Module = TypeVar("_Module", bound=nn.Module)

Filter = Callable[[str, nn.Module], bool]
Action = Literal["converted", "skipped", "refused"]


def convert_sync_batchnorm(module: _Module, process_group: Any = None, *, filter: Filter | None = None) -> _Module:
    """Makes every batch normalization layer of ``module`` a synchronized one, in place.

    The layers stay the same objects and only change their class, so optimizers may be made before or after, and
    parameters, buffers, hooks, attributes and training flags stay. Subclasses of torch's layers keep their own
    ``forward`` if it calls ``super().forward`` or ``F.batch_norm``; one that turns out in training to call neither
    raises then. Layers of :class:`torch.nn.SyncBatchNorm` are converted too. Convert before the model is wrapped or
    compiled. :func:`conversion_report` tells what is converted and why the rest is not.

    Args:
        module: the model. If it is itself a batch normalization layer, a converted copy that shares its parameters and
            buffers is returned and ``module`` stays as it is, as with torch's converter (but a Lazy layer, which torch
            cannot copy, is converted in place).
        process_group: the ranks to synchronize with: a :class:`torch.distributed.ProcessGroup` or a
            ``BaguaProcessGroup``; an int for that many consecutive ranks, ``"node"`` for those of this host, a list of
            lists of ranks or a 1-D ``DeviceMesh``, see :func:`sync_group`; or a
            :class:`~bagua_syncbn.communicators.Communicator`. None leaves layers that have a group with theirs, and
            gives the others the default group.
        filter: called with the name of a layer, as in ``named_modules``, and the layer; one for which it returns False
            stays as it is. Likewise asked for what would be refused. A layer of several names is converted if one of
            them is accepted.

    Returns:
        ``module``, or its converted copy.

    Raises:
        TypeError: ``module`` holds a batch normalization layer that conversion cannot synchronize, or is TorchScript;
            ``process_group`` is of no known kind; ``filter`` is not callable.
        ValueError: this rank is not in ``process_group``, or that describes groups which the job does not have.
        RuntimeError: ``module`` is data parallel or compiled already.

    If it raises, ``module`` is unchanged. It warns of layers that stay as they are and synchronize by themselves, of a
    class that neither derives from torch's nor is known by :func:`register_converter`.

    Example::

        >>> model = bagua_syncbn.convert_sync_batchnorm(model, filter=lambda name, layer: "head" not in name)
        >>> model = bagua_syncbn.with_bagua(model, [optimizer])
    """
    check_process_group(process_group)
    # All the classes first: one layer that is refused leaves all as they were.
    targets: dict[nn.Module, type[SyncBatchNorm]] = {}
    findings = examine(module, filter)
    for finding in findings:
        if finding.error is not None:
            raise finding.error
        if finding.target is not None:
            targets[finding.module] = finding.target
    _warn_of_synchronized_strangers(findings)
    if module in targets:
        target = targets.pop(module)
        module = _shallow_copy(module)
        targets[module] = target
    with _restored_on_error(targets):
        for layer, cls in targets.items():
            if not isinstance(layer, SyncBatchNorm):
                _take_group(layer)
            object.__setattr__(layer, "__class__", cls)
            if process_group is not None:
                layer.process_group = process_group
    return module


def revert_sync_batchnorm(module: _Module) -> _Module:
    """Gives every synchronized layer of ``module`` the class that it had before conversion, in place.

    Layers that were made as :class:`SyncBatchNorm1d`, ``2d`` or ``3d`` become :class:`torch.nn.BatchNorm1d`, ``2d`` or
    ``3d``, and those made as :class:`SyncBatchNorm` become :class:`~bagua_syncbn.sync_batchnorm.BatchNorm`. Layers that
    were :class:`torch.nn.SyncBatchNorm` become that again, with the group that they had.

    Args:
        module: the model, which may have been loaded from a file or copied. If it is itself a synchronized layer, a
            reverted copy that shares its parameters and buffers is returned.

    Returns:
        ``module``, or its reverted copy.

    Raises:
        TypeError: ``module`` holds a layer of a subclass of :class:`SyncBatchNorm` that does not say what its
            ``local_class`` is.

    If it raises, ``module`` is unchanged.
    """
    if isinstance(module, SyncBatchNorm):
        module = _shallow_copy(module)
    layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
    classes = [class_before_conversion(type(layer)) for layer in layers]
    groups = [_groups_before_conversion(layer) for layer in layers]
    with _restored_on_error(layers):
        for layer, cls, attributes in zip(layers, classes, groups, strict=True):
            for name in ("process_group", "groups_before"):
                vars(layer).pop(name, None)
            vars(layer).update(attributes)
            object.__setattr__(layer, "__class__", cls)
    return module


def _take_group(layer: nn.Module) -> None:
    """Makes the group that a layer has, under whatever name, its ``process_group``, and keeps it for revert."""
    groups = groups_of(layer)
    for name in groups:
        del vars(layer)[name]
    if groups:
        vars(layer).update(groups_before=groups, process_group=next(iter(groups.values())))


def _groups_before_conversion(layer: SyncBatchNorm) -> dict[str, Any]:
    groups = vars(layer).get("groups_before", {})
    # A layer that was copied or loaded has the ranks of a group; the class of before needs the group.
    return {name: group.resolve() if isinstance(group, RankGroup) else group for name, group in groups.items()}


@contextmanager
def _restored_on_error(layers: Iterable[nn.Module]) -> Iterator[None]:
    before = [(layer, type(layer), dict(vars(layer))) for layer in layers]
    try:
        yield
    except BaseException:
        for layer, cls, attributes in before:
            object.__setattr__(layer, "__class__", cls)
            vars(layer).clear()
            vars(layer).update(attributes)
        raise


class Finding(NamedTuple):
    """What conversion does with one module, and why."""

    names: list[str]
    module: nn.Module
    action: Action
    reason: str
    target: type[SyncBatchNorm] | None = None  # the class it gets, if converted
    error: Exception | None = None  # raised for it, if refused
    synchronizes: bool = False  # by itself, and stays so because its class is not known


def examine(module: nn.Module, filter: Filter | None = None) -> list[Finding]:
    """Returns what conversion of ``module`` does with each module that it concerns; changes nothing.

    Raises:
        TypeError: ``filter`` is not callable.
    """
    if filter is not None and not callable(filter):
        raise TypeError(f"filter: expected a function of a name and a module, or None, got {type(filter).__name__}")
    return [
        finding
        for found, names in _modules_with_names(module).items()
        if (finding := _examine_one(found, names, filter)) is not None
    ]


def _examine_one(module: nn.Module, names: list[str], filter: Filter | None) -> Finding | None:
    error = _error_if_closed(module, names[0])
    is_stranger = error is None and not is_candidate(module)
    synchronizes = is_stranger and _has_running_stats(module) and "sync" in type(module).__name__.lower()
    if is_stranger and not synchronizes:
        reason = _why_not_concerned(module)
        return None if reason is None else Finding(names, module, "skipped", reason)
    if filter is not None and not any(filter(name, module) for name in names):
        return Finding(names, module, "skipped", "left out by filter")
    if synchronizes:
        reason = "synchronizes by itself, in a class not derived from torch's; register_converter makes it known"
        return Finding(names, module, "skipped", reason, synchronizes=True)
    if error is None and "forward" in vars(module):
        where = _where(module, names[0])
        error = TypeError(f"module: expected layers with the forward of their class, got {where} with one of its own")
    if error is None:
        try:
            target = class_after_conversion(module)
            if target is not None and not isinstance(module, SyncBatchNorm):
                groups_of(module)
        except TypeError as refusal:
            error = refusal
    if error is not None:
        return Finding(names, module, "refused", str(error), error=error)
    if target is None:
        return Finding(names, module, "skipped", "left as it is by its converter")
    reason = "synchronized already" if isinstance(module, SyncBatchNorm) else f"becomes {target.__name__}"
    return Finding(names, module, "converted", reason, target)


def _modules_with_names(root: nn.Module) -> dict[nn.Module, list[str]]:
    """All modules in the order of ``named_modules``, with each name that they have in one of their parents."""
    found: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, name: str) -> None:
        if module in found:  # shared, or in a cycle
            found[module].append(name)
            return
        found[module] = [name]
        if _error_if_closed(module, name) is None:
            for child_name, child in _children(module):
                visit(child, f"{name}.{child_name}" if name else child_name)

    visit(root, "")
    return found


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _error_if_closed(module: nn.Module, name: str) -> Exception | None:
    """Returns what to raise for a module that cannot be converted any more, with all that is in it."""
    if isinstance(module, torch.jit.ScriptModule):
        where = _where(module, name)
        return TypeError(f"module: expected a model of Python modules, got a TorchScript {where}; convert, then script")
    if is_data_parallel(module):
        where = _where(module, name)
        return RuntimeError(f"module: expected an unwrapped model, got data parallel {where}; convert first, then wrap")
    if _is_compiled(module):
        where = _where(module, name)
        return RuntimeError(f"module: expected a model before compilation, got compiled {where}; convert, then compile")
    return None


def _where(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__} at {name!r}" if name else type(module).__name__


def _why_not_concerned(module: nn.Module) -> str | None:
    """Returns why a module stays as it is that one might take for batch normalization; None for any other."""
    if isinstance(module, _NormBase):
        return "not batch normalization: it normalizes each sample by itself"
    if "batchnorm" in type(module).__name__.lower() or _has_running_stats(module):
        return "not derived from torch's batch normalization; register_converter makes it known"
    return None


def _has_running_stats(module: nn.Module) -> bool:
    return {"running_mean", "running_var"} <= module._buffers.keys() | module._parameters.keys()


def _warn_of_synchronized_strangers(findings: Iterable[Finding]) -> None:
    strangers = [finding for finding in findings if finding.synchronizes]
    if strangers:
        where = ", ".join(_where(finding.module, finding.names[0]) for finding in strangers)
        warnings.warn(
            f"module: these layers go on to synchronize by themselves: {where}; tell register_converter what they are "
            "to become, or that they are to stay",
            stacklevel=3,
        )


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported, not compiled: it takes a second to import
    return module._compiled_call_impl is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def _shallow_copy(layer: _Module) -> _Module:
    if isinstance(layer, LazyModuleMixin):
        return layer  # has hooks that are bound to the object, and cannot be copied
    twin = layer.__new__(type(layer))
    twin.__dict__ = {key: value.copy() if isinstance(value, dict) else value for key, value in vars(layer).items()}
    for name, child in _children(twin):
        if child is layer:
            twin._modules[name] = twin
    return twin
