"""Classes of converted layers, and the classes that these layers had before."""

import copy
import sys
from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from ..sync_batchnorm import (
    BatchNorm,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    state_to_travel,
)
from .own_forward import ObservedSyncBatchNorm, observed_forward

_Class = TypeVar("_Class", bound=nn.Module)

# Classes of layers without a converter, made where they are first needed.
_synchronized: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    BatchNorm: SyncBatchNorm,
}
_replacing: dict[tuple[type[nn.Module], type[SyncBatchNorm]], type[SyncBatchNorm]] = {}


def synchronized_class(cls: type[nn.Module]) -> type[SyncBatchNorm]:
    """Returns the class that layers of class ``cls`` get without a converter."""
    if issubclass(cls, SyncBatchNorm):
        return cls
    if _is_sharded_class(cls):
        return _sharded_class(cls, synchronized_class(cls.__bases__[1]))
    if cls is nn.SyncBatchNorm:
        # No subclass of nn.SyncBatchNorm, which DistributedDataParallel refuses on CPU.
        return replacing_class(cls, SyncBatchNorm)
    if _is_parametrized_class(cls):
        return _derive_parametrized(cls)
    if cls not in _synchronized:
        _synchronized[cls] = _derive(cls)
    return _synchronized[cls]


def class_before_conversion(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that layers of the synchronized class ``cls`` had.

    Raises:
        TypeError: ``cls`` is a subclass of :class:`SyncBatchNorm` that does not name its ``local_class``.
    """
    if _is_parametrized_class(cls):
        return _class_before_parametrized(cls)
    if _is_sharded_class(cls):
        return _sharded_class(cls, class_before_conversion(cls.__bases__[1]))
    if "local_class" not in vars(cls):
        raise TypeError(
            f"module: expected layers whose class names its local_class, got {full_name(cls)}; "
            "set local_class in it to the class that its layers are to become"
        )
    return cast(type[SyncBatchNorm], cls).local_class


def _namespace(cls: type[nn.Module]) -> dict[str, Any]:
    return {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _reduce_ex, "local_class": cls}


class _InPlaceOfTorchs(type):
    """Metaclass that replaces ``nn.SyncBatchNorm`` by :class:`SyncBatchNorm` among the bases of a class."""

    def mro(cls) -> list[type]:
        # DistributedDataParallel refuses instances of nn.SyncBatchNorm on CPU.
        return [base for base in super().mro() if base is not nn.SyncBatchNorm]


def _derive(cls: type[nn.Module]) -> type[SyncBatchNorm]:
    namespace = _namespace(cls)
    base: type[SyncBatchNorm] = SyncBatchNorm
    if cls.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        base = ObservedSyncBatchNorm
        namespace["forward"] = observed_forward(cls.forward)
    becomes = getattr(cls, "cls_to_become", None)
    if becomes is not None:  # a Lazy layer, which changes class when it has seen its first input
        namespace["cls_to_become"] = synchronized_class(becomes)
    metaclass = _InPlaceOfTorchs if issubclass(cls, nn.SyncBatchNorm) else type
    return metaclass(f"Sync{cls.__name__.removeprefix('Sync')}", (cls, base), namespace)


def replacing_class(cls: type[nn.Module], target: type[SyncBatchNorm]) -> type[SyncBatchNorm]:
    """Returns a class with the methods of ``target`` alone, for layers that were of class ``cls``."""
    if (cls, target) not in _replacing:
        _replacing[cls, target] = type(f"Sync{cls.__name__.removeprefix('Sync')}", (target,), _namespace(cls))
    return _replacing[cls, target]


def full_name(cls: type) -> str:
    """Returns the name of ``cls`` with its module, for messages."""
    return f"{cls.__module__}.{cls.__qualname__}"


# Modules after fully_shard: torch gives them a class derived from FSDPModule and from their own class, in this order.


def _is_sharded_class(cls: type) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # absent if never used
    return fsdp is not None and cls.__bases__[0] is fsdp.FSDPModule


def _sharded_class(cls: type, base: type[_Class]) -> type[_Class]:
    """Returns the sharded class ``cls`` with ``base`` as its second base."""
    namespace = {name: value for name, value in vars(cls).items() if name in ("__module__", "__deepcopy__")}
    return type(f"FSDP{base.__name__}", (cls.__bases__[0], base), namespace)


# Parametrized layers: torch gives each layer a class of its own, derived from the layer's class, with a property for
# each parametrized tensor. torch later deletes properties from that class and, after the last one, gives the layer the
# first base. A synchronized class has the same structure: the properties in it, and the synchronized class as its base.


def _is_parametrized_class(cls: type) -> bool:
    return getattr(vars(cls).get("__getstate__"), "__module__", None) == parametrize.__name__


def _properties(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if isinstance(value, property)}


def _without_properties(cls: type) -> dict[str, Any]:
    kept = {"__module__", "__doc__", "__getstate__", "__deepcopy__"}
    return {name: value for name, value in vars(cls).items() if name in kept}


def _derive_parametrized(cls: type[nn.Module]) -> type[SyncBatchNorm]:
    base = synchronized_class(cls.__bases__[0])
    namespace = {**_without_properties(cls), **_properties(cls), "local_class": cls}
    if "__deepcopy__" in namespace:
        namespace["__deepcopy__"] = _deepcopy_parametrized
    return type(f"Sync{cls.__name__}", (base,), namespace)


def _class_before_parametrized(cls: type) -> type[nn.Module]:
    before = vars(cls).get("local_class")  # absent where the layer was parametrized after conversion
    if before is not None and _properties(before).keys() == _properties(cls).keys():
        return cast(type[nn.Module], before)
    base = class_before_conversion(cls.__bases__[0])
    return type(f"Parametrized{base.__name__}", (base,), {**_without_properties(before or cls), **_properties(cls)})


def _deepcopy_parametrized(layer: SyncBatchNorm, memo: dict[int, Any]) -> SyncBatchNorm:
    """Copies a parametrized layer as torch does, with the specification of its group in place of the group."""
    replica = layer.__new__(type(layer))
    memo[id(layer)] = replica
    replica.__dict__ = copy.deepcopy(SyncBatchNorm.__getstate__(layer), memo)
    return replica


# Pickling: derived classes cannot be imported by name, so a file holds the classes that they were made from.


def _reduce_ex(layer: SyncBatchNorm, protocol: Any) -> tuple[Any, ...]:
    reduced: Any = super(SyncBatchNorm, layer).__reduce_ex__(protocol)
    state = reduced[2]
    if isinstance(state, dict):
        state = state_to_travel(state)  # for a __getstate__ of the layer's own class that does not call ours
    cls = type(layer)
    made_from = (cls.local_class,) if issubclass(cls, cls.local_class) else (cls.local_class, cls.__bases__[0])
    return _new_layer, made_from, state, *reduced[3:]


def _new_layer(cls: type[nn.Module], target: type[SyncBatchNorm] | None = None) -> SyncBatchNorm:
    derived = synchronized_class(cls) if target is None else replacing_class(cls, target)
    return derived.__new__(derived)
