"""User-registered converters for layer classes that conversion would refuse or not recognize."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._groups import text_of_argument
from .._step.checks import check_callable
from ..communicators.torch_engine import is_process_group
from ..sync_batchnorm import SyncBatchNorm
from .classes import full_name, replacing_class, synchronized_class

Converter = Callable[[Any], type[SyncBatchNorm] | None]

_converters: dict[type[nn.Module], Converter] = {}


def register_converter(cls: type[nn.Module], converter: Converter | None) -> None:
    """Registers the synchronized class for layers of ``cls`` in :func:`convert_sync_batchnorm`.

    Use it for classes that conversion would refuse or not recognize. ``converter`` returns the new class, which must
    define the attributes that :class:`SyncBatchNorm` uses and the layer lacks. The layer remains the same object, so
    the new class can read the layer's options. The layer keeps its process group, whichever attribute stores it.
    Subclasses of ``cls`` are not affected.

    Args:
        cls: the class of the layers, derived from torch's batch normalization or not.
        converter: called with a layer, returns a subclass of :class:`SyncBatchNorm`, or None to skip the layer. None
            instead of a function removes the registration of ``cls``.

    Raises:
        TypeError: ``cls`` is not a class of modules, or is synchronized already; ``converter`` is not a function of a
            layer.

    Example::

        >>> register_converter(fairscale.experimental.nn.SyncBatchNorm, lambda layer: bagua_syncbn.SyncBatchNorm)
        >>> register_converter(inplace_abn.InPlaceABNSync, lambda layer: None)  # continues to synchronize itself

    docs/migrating.md contains examples for layers of several packages.
    """
    if not isinstance(cls, type) or not issubclass(cls, nn.Module) or issubclass(cls, SyncBatchNorm):
        got = text_of_argument(cls)
        raise TypeError(f"cls: expected a subclass of torch.nn.Module, but not of SyncBatchNorm, got {got}")
    if isinstance(converter, (type, nn.Module)):
        example = "such as lambda layer: bagua_syncbn.SyncBatchNorm"
        raise TypeError(f"converter: expected a function of a layer, {example}, got {text_of_argument(converter)}")
    check_callable("converter", converter, "layer")
    if converter is None:
        _converters.pop(cls, None)
    else:
        _converters[cls] = converter


def is_candidate(module: nn.Module) -> bool:
    """Returns whether conversion applies to ``module``."""
    return isinstance(module, _BatchNorm) or type(module) in _converters


def class_after_conversion(layer: nn.Module) -> type[SyncBatchNorm] | None:
    """Returns the synchronized class of ``layer``, or None to skip the layer.

    Raises:
        TypeError: the converter of ``layer`` did not return a synchronized class.
    """
    cls: Any = type(layer)
    converter = _converters.get(cls)
    if converter is None:
        return synchronized_class(cls)
    target: Any = converter(layer)
    if target is None:
        return None
    if not isinstance(target, type) or not issubclass(target, SyncBatchNorm):
        raise TypeError(
            f"converter of {full_name(cls)}: expected it to return a subclass of bagua_syncbn.SyncBatchNorm or None, "
            f"got {text_of_argument(target)}"
        )
    return replacing_class(cls, target)


def group_of(layer: nn.Module) -> Any:
    """Returns the process group in an attribute of ``layer``, whose class has a converter; None if there is none.

    Raises:
        TypeError: the layer has several groups.
    """
    attributes = vars(layer) if type(layer) in _converters else {}
    groups = {id(value): value for value in attributes.values() if is_process_group(value)}
    if len(groups) > 1:
        raise TypeError(
            f"module: {full_name(type(layer))} has several process groups; set its attribute process_group to the "
            "group to synchronize with"
        )
    return next(iter(groups.values()), None)
