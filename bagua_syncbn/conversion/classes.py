"""Classes of layers after and before conversion."""

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from .._torch.modules import defined_in
from ..sync_batchnorm import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
)
from .own_forward import ObservedSyncBatchNorm, observed_forward

_OWN: dict[type[nn.Module], type[SyncBatchNorm]] = {
    cls.local_class: cls for cls in (SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d)
}


def synchronized_class(cls: Any) -> type[SyncBatchNorm]:
    """Returns the synchronized class for ``cls``, which has no registered converter."""
    if issubclass(cls, SyncBatchNorm):
        return cls
    if cls is nn.SyncBatchNorm:
        # Not a subclass of nn.SyncBatchNorm, which DistributedDataParallel rejects on CPU.
        return replacing_class(cls, SyncBatchNorm)
    if _is_on_top(cls):
        return cast(type[SyncBatchNorm], _rebased(cls, synchronized_class(cls.__bases__[-1])))
    return _OWN.get(cls) or _derived_class(cls)


def class_before_conversion(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the local class of the synchronized class ``cls``.

    Raises:
        TypeError: ``cls`` is a subclass of :class:`SyncBatchNorm` that does not define its ``local_class``.
    """
    if _is_on_top(cls):
        return _rebased(cls, class_before_conversion(cls.__bases__[-1]))
    if "local_class" not in vars(cls):
        raise TypeError(
            f"module: cannot revert {full_name(cls)}, which has no local_class; set it to the class of reverted layers"
        )
    return cast(type[SyncBatchNorm], cls).local_class


@functools.cache
def replacing_class(cls: Any, target: Any) -> type[SyncBatchNorm]:
    """Returns a subclass of ``target`` for layers of class ``cls``; it does not inherit the methods of ``cls``."""
    return type(f"Sync{cls.__name__.removeprefix('Sync')}", (target,), _namespace(cls))


def full_name(cls: type) -> str:
    """Returns the qualified name of ``cls``, for messages."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _namespace(cls: type[nn.Module]) -> dict[str, Any]:
    return {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _reduce_ex, "local_class": cls}


class _WithoutSyncBatchNorm(type):
    """Metaclass that omits ``nn.SyncBatchNorm`` from the MRO: DistributedDataParallel rejects it on CPU."""

    def mro(cls) -> list[type]:
        return [base for base in super().mro() if base is not nn.SyncBatchNorm]


@functools.cache
def _derived_class(cls: Any) -> type[SyncBatchNorm]:
    namespace = _namespace(cls)
    metaclass: Any = _WithoutSyncBatchNorm if issubclass(cls, nn.SyncBatchNorm) else type
    bases: tuple[type, ...] = cls, SyncBatchNorm
    if cls.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        namespace["forward"] = observed_forward(cls.forward)
        # The intermediate class supports `super(type(self), self).forward`: type(self) is no longer `cls`, so the
        # forward would recurse forever.
        bases = (metaclass(cls.__name__, (cls, ObservedSyncBatchNorm), {**_namespace(cls), "forward": _after(cls)}),)
    becomes = getattr(cls, "cls_to_become", None)
    if becomes is not None:  # a lazy layer, which changes its class on the first call
        namespace["cls_to_become"] = synchronized_class(becomes)
    return metaclass(f"Sync{cls.__name__.removeprefix('Sync')}", bases, namespace)


def _after(cls: Any) -> Callable[..., Any]:
    """Returns a method that calls the forward that follows ``cls`` in the method resolution order."""
    return lambda layer, *args, **kwargs: super(cls, layer).forward(*args, **kwargs)


# Parametrized, sharded and recomputing layers have a subclass of the layer's class; the layer's class is its last base.
# Parametrized tensors are properties of the subclass: removing a parametrization deletes the property, and removing the
# last one restores the layer's class.


def _is_on_top(cls: type) -> bool:
    is_parametrized = getattr(vars(cls).get("__getstate__"), "__module__", None) == parametrize.__name__
    is_sharded = cls.__bases__[0] is defined_in("torch.distributed.fsdp", "FSDPModule")
    return is_parametrized or is_sharded or "_derived_from" in vars(cls)


def _rebased(cls: type, base: type[nn.Module]) -> type[nn.Module]:
    """Returns ``cls`` with ``base`` as its last base."""
    if "_derived_from" in vars(cls):
        return cast(type[nn.Module], vars(cls)["_derived_from"](base))
    *others, before = cls.__bases__
    names = ("__module__", "__getstate__", "__deepcopy__")
    namespace = {name: value for name, value in vars(cls).items() if name in names or isinstance(value, property)}
    return type(f"{cls.__name__.removesuffix(before.__name__)}{base.__name__}", (*others, base), namespace)


# Pickling: derived classes cannot be imported by name, so a file refers to the base classes.


def _reduce_ex(layer: SyncBatchNorm, protocol: Any) -> tuple[Any, ...]:
    reduced: Any = SyncBatchNorm.__reduce_ex__(layer, protocol)
    cls: Any = next(cls for cls in type(layer).__mro__ if "local_class" in vars(cls))
    arguments = (cls.local_class,) if issubclass(cls, cls.local_class) else (cls.local_class, cls.__bases__[0])
    return _new_layer, arguments, *reduced[2:]


def _new_layer(cls: Any, target: Any = None) -> SyncBatchNorm:
    derived = synchronized_class(cls) if target is None else replacing_class(cls, target)
    return derived.__new__(derived)
