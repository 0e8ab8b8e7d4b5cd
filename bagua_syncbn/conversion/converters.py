"""Converters that users register for classes of layers that conversion would refuse or not recognize."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..communicators import bagua
from ..sync_batchnorm import SyncBatchNorm
from .classes import full_name, replacing_class, synchronized_class

Converter = Callable[[Any], type[SyncBatchNorm] | None]

# Attributes of a layer that the forward of SyncBatchNorm uses and the class does not have.
_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_ATTRIBUTES = (*_TENSORS, "eps", "momentum", "track_running_stats")

_converters: dict[type[nn.Module], Converter] = {}


def register_converter(cls: type[nn.Module], converter: Converter | None) -> None:
    """Registers the class that :func:`convert_sync_batchnorm` gives to layers of ``cls``.

    Register classes that conversion would refuse or not recognize. As in every conversion the layer stays the same
    object and changes its class, to the one that ``converter`` returns. Subclasses of ``cls`` are not affected.
    :func:`convert_sync_batchnorm` raises TypeError if that class is not synchronized, or has the forward of
    :class:`SyncBatchNorm` and neither it nor the layer has all attributes of a layer.

    The layer's process group becomes its ``process_group``, whichever attribute holds it, until
    :func:`revert_sync_batchnorm`. Other options are attributes that the methods of the new class find on the layer.

    Args:
        cls: the class of the layers, of batch normalization or not.
        converter: called with a layer, returns the subclass of :class:`SyncBatchNorm` whose methods the layer is to
            have, or None to leave the layer unchanged. None in place of a function removes the registration of ``cls``.

    Raises:
        TypeError: ``cls`` is not a class of modules, or is synchronized already; ``converter`` is no function.

    Example::

        >>> register_converter(fairscale.experimental.nn.SyncBatchNorm, lambda layer: bagua_syncbn.SyncBatchNorm)
        >>> register_converter(inplace_abn.InPlaceABNSync, lambda layer: None)  # goes on to synchronize by itself

    docs/switching.md has the classes for layers of other packages.
    """
    if not isinstance(cls, type) or not issubclass(cls, nn.Module) or issubclass(cls, SyncBatchNorm):
        raise TypeError(f"cls: expected a class of modules that is not one of bagua_syncbn's, got {cls!r}")
    if converter is None:
        _converters.pop(cls, None)
    elif callable(converter) and not isinstance(converter, type):
        _converters[cls] = converter
    else:
        got = full_name(converter if isinstance(converter, type) else type(converter))
        raise TypeError(f"converter: expected a function of a layer that returns a class, or None, got {got}")


def is_candidate(module: nn.Module) -> bool:
    """Whether conversion concerns ``module``."""
    return isinstance(module, _BatchNorm) or type(module) in _converters


def class_after_conversion(layer: nn.Module) -> type[SyncBatchNorm] | None:
    """Returns the class that conversion gives ``layer``, or None to leave it unchanged.

    Raises:
        TypeError: the converter of ``layer`` returned something else than a synchronized class.
    """
    cls, converter = type(layer), _converters.get(type(layer))
    if converter is None:
        return synchronized_class(cls)
    target = converter(layer)
    if target is None:
        return None
    if not isinstance(target, type) or not issubclass(target, SyncBatchNorm):
        raise TypeError(
            f"register_converter: expected a subclass of bagua_syncbn.SyncBatchNorm from the converter of "
            f"{full_name(cls)}, got {target!r}"
        )
    missing = [name for name in _ATTRIBUTES if not hasattr(layer, name) and not hasattr(target, name)]
    if missing and target.forward is SyncBatchNorm.forward:
        raise TypeError(
            f"register_converter: expected layers with the attributes that {full_name(target)} works with, got "
            f"{full_name(cls)} without {', '.join(missing)}; set them in the class that the converter returns"
        )
    return replacing_class(cls, target)


def groups_of(layer: nn.Module) -> dict[str, Any]:
    """Returns, by name, the attributes in which ``layer``, not synchronized yet, holds its process group.

    Attributes of other names than ``process_group`` count only where a converter replaces all methods of the layer,
    because the layer's own methods may use them.

    Raises:
        TypeError: the attributes hold different groups.
    """
    attributes = vars(layer)
    if "process_group" in attributes:
        return {"process_group": attributes["process_group"]}
    if type(layer) not in _converters:
        return {}
    kinds = (dist.ProcessGroup,) if dist.is_available() else ()
    groups = {
        name: value for name, value in attributes.items() if bagua.is_process_group(value) or isinstance(value, kinds)
    }
    if len({id(group) for group in groups.values()}) > 1:
        raise TypeError(
            f"module: expected layers with one process group, got {full_name(type(layer))} with "
            f"{' and '.join(groups)}; set process_group to the one to synchronize with"
        )
    return groups
