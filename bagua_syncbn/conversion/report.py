"""Report on how conversion treats each module of a model, and why."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .._names import name_of
from .._ops import activation_of
from .._step.checks import check_callable
from ..sync_batchnorm import SyncBatchNorm
from .converters import class_after_conversion, is_candidate
from .models import Filter, check_module, is_data_parallel, is_left_out, modules_with_names

Action = Literal["converted", "skipped", "refused"]

FOREIGN = "not derived from torch's batch normalization; register_converter can convert it"
_BATCH_NORM = re.compile("batch_?(re)?norm", re.IGNORECASE)


class Finding(NamedTuple):
    """How conversion treats a module, and why."""

    names: list[str]
    """All names that the module has in the model; ``[""]`` for the model itself."""
    module: nn.Module
    """The module, before conversion."""
    action: Action
    """``"converted"`` (also if already synchronized), ``"skipped"``, or ``"refused"`` (conversion raises an error)."""
    reason: str
    """Why, or the name of the new class."""
    target: type[SyncBatchNorm] | None = None
    """New class of a converted module."""
    error: Exception | None = None
    """Error that conversion raises for a refused module."""

    def __str__(self) -> str:
        names = ", ".join(name or "(the model itself)" for name in self.names)
        return f"{self.action:9}  {names}  {type(self.module).__name__}: {self.reason}"


@dataclass(frozen=True)
class ConversionReport:
    """Result of :func:`~bagua_syncbn.conversion_report`. ``str`` returns a summary and a line for each layer."""

    layers: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join([self.summary(), *map(str, self.layers)])

    def summary(self) -> str:
        """Returns the number of layers that are converted, skipped and refused."""
        if not self.layers:
            return "no batch normalization layers"
        counts = Counter(layer.action for layer in self.layers)
        actions: tuple[Action, ...] = ("converted", "skipped", "refused")
        return ", ".join(f"{counts[action]} {action}" for action in actions)


def conversion_report(module: nn.Module, *, filter: Filter | None = None) -> ConversionReport:
    """Previews :func:`convert_sync_batchnorm` and lists the layers of ``module``.

    The report has a line for each batch normalization layer, for each module that is refused with all its children,
    such as a TorchScript module, and for each skipped module that resembles batch normalization. Lines of synchronized
    layers also report a fused activation and frozen statistics (:func:`freeze_statistics`).

    Args:
        module: the model, converted or not, wrapped or not.
        filter: as for :func:`convert_sync_batchnorm`.

    Returns:
        A :class:`~bagua_syncbn.conversion.report.ConversionReport`. Its ``layers`` are a tuple of
        :class:`~bagua_syncbn.conversion.report.Finding`.

    Raises:
        TypeError: ``module`` is not a module; ``filter`` is not callable with a name and a module; a registered
            converter returns no layer class.

    Example::

        >>> print(bagua_syncbn.conversion_report(model))
        2 converted, 1 skipped, 0 refused
        converted  backbone.bn, neck.bn  BatchNorm2d: becomes SyncBatchNorm2d
        converted  head.1  BatchNormAct2d: becomes SyncBatchNormAct2d
        skipped    head.3  InstanceNorm2d: not batch normalization: it normalizes each sample by itself
    """
    check_module(module)
    check_callable("filter", filter, "name", "module")
    wrapped = {part: outer for outer in module.modules() if is_data_parallel(outer) for part in outer.modules()}
    errors: dict[nn.Module, Exception | None] = {}

    def is_refused(part: nn.Module, name: str) -> bool:
        errors[part] = _refusal(part, name)
        return errors[part] is not None

    modules = modules_with_names(module, is_closed=is_refused)
    rows = (_finding(part, names, filter, errors[part], wrapped.get(part)) for part, names in modules.items())
    return ConversionReport(tuple(row for row in rows if row is not None))


def _finding(
    module: nn.Module, names: list[str], filter: Filter | None, error: Exception | None, wrapper: nn.Module | None
) -> Finding | None:
    reason = "" if error or is_candidate(module) else _resemblance(module)
    if not (error or reason or is_candidate(module)):
        return None
    if is_left_out(module, names, filter):
        return Finding(names, module, "skipped", "left out by filter")
    if reason:
        return Finding(names, module, "skipped", reason)
    if wrapper is not None and _is_unsynchronized(module):
        where = f"{name_of(module, names[0])} in data parallel {type(wrapper).__name__}"
        error = RuntimeError(f"module: cannot convert {where}; convert first, then wrap")
    if error is not None:
        return Finding(names, module, "refused", str(error), error=error)
    target = class_after_conversion(module)
    if target is None:
        return Finding(names, module, "skipped", "left unchanged by its converter")
    if not isinstance(module, SyncBatchNorm):
        return Finding(names, module, "converted", f"becomes {target.__name__}", target)
    frozen = "" if module._sync_state.frozen_mode is None else "; statistics frozen"
    activation = activation_of(module.fused_activation)
    computes = "" if activation is None else f"; computes {activation}"
    return Finding(names, module, "converted", f"synchronized already{frozen}{computes}", target)


def _refusal(module: nn.Module, name: str) -> Exception | None:
    """Returns the error for a module that conversion refuses with all its children; None if it does not."""
    where = name_of(module, name)
    if isinstance(module, torch.jit.ScriptModule):
        return TypeError(
            f"module: cannot convert TorchScript {where}; convert and train the original module, and revert it before "
            "scripting"
        )
    if getattr(module, "allow_single_element", False) is True and _holds_batch_norm(module):
        return ValueError(
            f"module: expected allow_single_element=False in {where}, got True: a rank with a single element would "
            "hang its peers"
        )
    if _is_unsynchronized(module) and "forward" in vars(module):
        return TypeError(
            f"module: cannot convert {where} because its forward is assigned to the object; define it in a subclass, "
            "or convert before hooks such as accelerate's; or exclude the layer with filter"
        )
    return None


def _is_unsynchronized(module: nn.Module) -> bool:
    """Returns whether conversion would change the class of ``module``."""
    return is_candidate(module) and not isinstance(module, SyncBatchNorm)


def _resemblance(module: nn.Module) -> str:
    """Returns why ``module`` is skipped although it resembles batch normalization, or "" if it does not."""
    if isinstance(module, _NormBase):
        return "not batch normalization: it normalizes each sample by itself"
    name = type(module).__name__.lower()
    has_statistics = {"running_mean", "running_var"} <= module._buffers.keys() | module._parameters.keys()
    is_named_so = _BATCH_NORM.search(name) and not _holds_batch_norm(module)
    is_frozen = "frozen" in name  # by its name, so conversion does not warn
    if (is_named_so and not is_frozen) or (has_statistics and "sync" in name):
        return FOREIGN
    if has_statistics:
        return "has running statistics, but is not derived from torch's batch normalization"
    return "named like frozen batch normalization, but not derived from torch's" if is_named_so else ""


def _holds_batch_norm(module: nn.Module) -> bool:
    """Returns whether a child of ``module`` does the batch normalization, as in PyG's class."""
    return any(is_candidate(child) for child in module.children())
