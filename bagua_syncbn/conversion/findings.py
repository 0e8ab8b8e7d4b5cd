"""Findings: for each module of a model, the action of conversion and the reason."""

import re
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..checks import check_callable
from ..models import Filter, check_module, is_data_parallel, is_left_out, modules_with_names
from ..names import name_of
from ..sync_batchnorm import SyncBatchNorm
from .converters import class_after_conversion, groups_of, is_candidate

Action = Literal["converted", "skipped", "refused"]

_LEFT_OUT = "left out by filter"
BY_ITSELF = "synchronizes by itself, in a class not derived from torch's; register_converter makes it known"
UNKNOWN = "not derived from torch's batch normalization; register_converter makes it known"
_BATCH_NORM = re.compile("batch_?(re)?norm", re.IGNORECASE)


class Finding(NamedTuple):
    """Action that conversion takes for one module, and the reason."""

    names: list[str]
    """All names that the module has in the model; ``[""]`` for the model itself."""
    module: nn.Module
    action: Action
    """``"converted"``, also for a synchronized layer; ``"skipped"``; or ``"refused"``, for which conversion raises."""
    reason: str
    target: type[SyncBatchNorm] | None = None
    """Class that the module gets, if it is converted."""
    error: Exception | None = None
    """Error that conversion raises, if the module is refused."""

    def __str__(self) -> str:
        names = ", ".join(name or "(the model itself)" for name in self.names)
        return f"{self.action:9}  {names}  {type(self.module).__name__}: {self.reason}"


def examine(module: nn.Module, filter: Filter | None = None) -> list[Finding]:
    """Returns a finding for each module of ``module`` that conversion concerns; changes nothing.

    Raises:
        TypeError: ``module`` is no module, or ``filter`` is not callable.
    """
    check_module(module)
    check_callable("filter", filter, "a function of a name and a module")
    modules = modules_with_names(module, is_closed=lambda found, name: _error_if_closed(found, name) is not None)
    findings = (_examine_one(found, names, filter) for found, names in modules.items())
    return [finding for finding in findings if finding is not None]


def _examine_one(module: nn.Module, names: list[str], filter: Filter | None) -> Finding | None:
    error = _error_if_closed(module, names[0])
    if error is None and not is_candidate(module):
        reason = _why_not_concerned(module)
        if reason in (BY_ITSELF, UNKNOWN) and is_left_out(module, names, filter):
            reason = _LEFT_OUT
        return Finding(names, module, "skipped", reason) if reason else None
    if is_left_out(module, names, filter):
        return Finding(names, module, "skipped", _LEFT_OUT)
    if error is None:
        try:
            target = _class_to_get(module, names[0])
        except TypeError as refusal:
            error = refusal
    if error is not None:
        return Finding(names, module, "refused", str(error), error=error)
    if target is None:
        return Finding(names, module, "skipped", "left as it is by its converter")
    reason = "synchronized already" if isinstance(module, SyncBatchNorm) else f"becomes {target.__name__}"
    return Finding(names, module, "converted", reason, target)


def _class_to_get(layer: nn.Module, name: str) -> type[SyncBatchNorm] | None:
    """Returns the class that conversion gives ``layer``, None to leave it as it is; raises TypeError to refuse it."""
    if "forward" in vars(layer):
        advice = (
            "from a hook of accelerate; convert before hooks, dispatch or offload"
            if "_hf_hook" in vars(layer)
            else "of its own; write it in a subclass, since a change of class does not reach it; or, if hooks or a "
            "wrapper put it there, convert before them"
        )
        raise TypeError(
            f"module: expected layers with the forward of their class, got {name_of(layer, name)} with one {advice}; "
            "or leave the layer out with filter"
        )
    target = class_after_conversion(layer)
    if target is not None and not isinstance(layer, SyncBatchNorm):
        groups_of(layer)  # raises if there are several
    return target


def _error_if_closed(module: nn.Module, name: str) -> Exception | None:
    """Returns the error for a module that can no longer be converted, nor can its children; None for others."""
    if isinstance(module, torch.jit.ScriptModule):
        where = name_of(module, name)
        return TypeError(f"module: expected a model of Python modules, got a TorchScript {where}; convert, then script")
    if is_data_parallel(module):
        where = name_of(module, name)
        return RuntimeError(f"module: expected an unwrapped model, got data parallel {where}; convert first, then wrap")
    if getattr(module, "allow_single_element", False) is True and _holds_batch_norm(module):
        return ValueError(
            f"module: expected allow_single_element=False, got True in {name_of(module, name)}: a rank with a single "
            "element would not take part, and the other ranks would wait for it; a synchronized layer works with one "
            "element on a rank, so set it to False"
        )
    return None


def _why_not_concerned(module: nn.Module) -> str | None:
    """Returns why ``module`` is skipped although it resembles batch normalization; None if it does not."""
    if isinstance(module, _NormBase):
        return "not batch normalization: it normalizes each sample by itself"
    name = type(module).__name__.lower()
    has_running_stats = {"running_mean", "running_var"} <= module._buffers.keys() | module._parameters.keys()
    if has_running_stats and "sync" in name:
        return BY_ITSELF
    if has_running_stats or (_BATCH_NORM.search(name) and not _holds_batch_norm(module)):
        return UNKNOWN
    return None


def is_unsynchronized(finding: Finding) -> bool:
    """Whether ``finding`` is of an unknown class that is called batch normalization, and not a frozen one."""
    name = type(finding.module).__name__
    return finding.reason == UNKNOWN and _BATCH_NORM.search(name) is not None and "frozen" not in name.lower()


def _holds_batch_norm(module: nn.Module) -> bool:
    """Whether a child of ``module`` does the batch normalization, as in PyG's class."""
    return any(is_candidate(child) for child in module.children())
