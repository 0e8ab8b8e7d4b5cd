"""The classes of converted layers, and the way back from them."""

import copy
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from .communicators import bagua
from .redirect import ObservedSyncBatchNorm, observed_forward
from .sync_batchnorm import (
    BatchNorm,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    state_to_travel,
)

Converter = Callable[[Any], type[SyncBatchNorm] | None]

_STANDARD_CLASSES: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    BatchNorm: SyncBatchNorm,
}

# Neither side is kept alive.
_derived_classes: WeakKeyDictionary[type[nn.Module], ReferenceType[type[SyncBatchNorm]]] = WeakKeyDictionary()
_replacing_classes: dict[tuple[type[nn.Module], type[SyncBatchNorm]], type[SyncBatchNorm]] = {}
_converters: dict[type[nn.Module], Converter] = {}

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def register_converter(cls: type[nn.Module], converter: Converter | None) -> None:
    """Tells :func:`convert_sync_batchnorm` what layers of a class become that it would refuse or not recognize.

    As in every conversion the layer stays the object that it is and changes its class; ``converter`` names the class.
    Subclasses of ``cls`` are not concerned.

    The layer's process group becomes its ``process_group``, whatever attribute holds it, until
    :func:`revert_sync_batchnorm`. Conversion raises TypeError where the class that is named would drop something: an
    argument of ``forward``, or an option of the layer's constructor that is on and that no method of the class uses.

    Args:
        cls: the class of the layers, of batch normalization or not.
        converter: called with a layer, returns the subclass of :class:`SyncBatchNorm` whose methods the layer is to
            have, or None to leave the layer as it is. None in its place takes an earlier registration back.

    Raises:
        TypeError: ``cls`` is not a class of modules, or is synchronized already; ``converter`` is not callable.

    Example::

        >>> register_converter(fairscale.experimental.nn.SyncBatchNorm, lambda layer: bagua_syncbn.SyncBatchNorm)

        >>> # These two weigh ranks or samples alike; after conversion it is the elements of the batch.
        >>> register_converter(detectron2.layers.NaiveSyncBatchNorm, lambda layer: bagua_syncbn.SyncBatchNorm2d)

        >>> class FromMMCV(bagua_syncbn.SyncBatchNorm):
        ...     stats_mode = None  # says that the option is known, and without effect
        >>> register_converter(mmcv.ops.SyncBatchNorm, lambda layer: FromMMCV)

        >>> class FromApex(bagua_syncbn.SyncBatchNorm):
        ...     channel_last = fuse_relu = False  # where its version has no such options
        ...
        ...     def forward(self, input, z=None):
        ...         channel = -1 if self.channel_last else 1
        ...         output = super().forward(input.movedim(channel, 1)).movedim(1, channel)
        ...         output = output if z is None else output + z
        ...         return output.relu() if self.fuse_relu else output
        >>> register_converter(apex.parallel.SyncBatchNorm, lambda layer: FromApex)

        >>> # Works in place and scales by abs(weight) + eps, as nothing here does: it goes on to synchronize by itself.
        >>> register_converter(inplace_abn.InPlaceABNSync, lambda layer: None)
    """
    if not isinstance(cls, type) or not issubclass(cls, nn.Module) or issubclass(cls, SyncBatchNorm):
        raise TypeError(f"cls: expected a class of modules that is not one of bagua_syncbn's, got {cls!r}")
    if converter is None:
        _converters.pop(cls, None)
    elif callable(converter):
        _converters[cls] = converter
    else:
        raise TypeError(f"converter: expected a function of a layer, or None, got {type(converter).__name__}")


def is_candidate(module: nn.Module) -> bool:
    """Whether conversion concerns ``module``."""
    return isinstance(module, _BatchNorm) or type(module) in _converters


def class_after_conversion(layer: nn.Module) -> type[SyncBatchNorm] | None:
    """Returns the class that conversion gives ``layer``, or None to leave it as it is.

    Raises:
        TypeError: it would not be synchronized, or its converter returned something else than a class.
    """
    cls = type(layer)
    if cls not in _converters:
        return _checked_layout(cls, synchronized_class(cls))
    target = _converters[cls](layer)
    if target is None:
        return None
    if not isinstance(target, type) or not issubclass(target, SyncBatchNorm):
        raise TypeError(
            f"register_converter: expected a subclass of bagua_syncbn.SyncBatchNorm from the converter of "
            f"{_full_name(cls)}, got {target!r}"
        )
    _check_arguments(cls, target)
    _check_options(layer, target)
    return _checked_layout(cls, _replacing_class(cls, target))


def groups_of(layer: nn.Module) -> dict[str, Any]:
    """Returns by name the attributes with which ``layer``, not synchronized yet, has its process group.

    Attributes of other names count where a converter brings all methods: those of the layer's own may use them.

    Raises:
        TypeError: they hold different groups.
    """
    attributes = vars(layer)
    if "process_group" in attributes:
        return {"process_group": attributes["process_group"]}
    if type(layer) not in _converters:
        return {}
    groups = {name: value for name, value in attributes.items() if _is_group(value)}
    if len({id(group) for group in groups.values()}) > 1:
        raise TypeError(
            f"module: expected layers with one process group, got {_full_name(type(layer))} with "
            f"{' and '.join(groups)}; set process_group to that of them to synchronize with"
        )
    return groups


def synchronized_class(cls: type[nn.Module]) -> type[SyncBatchNorm]:
    """Returns the class that layers of class ``cls`` get without a converter; the same for all but parametrized ones.

    Raises:
        TypeError: a ``forward`` of ``cls`` can be seen not to lead to that of :class:`SyncBatchNorm`.
    """
    if issubclass(cls, SyncBatchNorm):
        return cls
    if cls in _STANDARD_CLASSES:
        return _STANDARD_CLASSES[cls]
    if cls is nn.SyncBatchNorm:
        # Not a subclass of it: DistributedDataParallel refuses those on CPU.
        return _replacing_class(cls, SyncBatchNorm)
    if _is_parametrized_class(cls):
        return _derive_parametrized(cls)
    cached = _derived_classes.get(cls)
    derived = cached() if cached else None
    if derived is None:
        derived = _derive(cls)
        _derived_classes[cls] = ref(derived)
    return derived


def class_before_conversion(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that layers of the synchronized class ``cls`` had.

    Raises:
        TypeError: ``cls`` is a subclass of :class:`SyncBatchNorm` that does not name its ``local_class``.
    """
    if _is_parametrized_class(cls):
        return _class_before_parametrized(cls)
    if "local_class" not in vars(cls):
        raise TypeError(
            f"module: expected layers whose class names its local_class, got {_full_name(cls)}; "
            "set local_class in it to the class that its layers are to become"
        )
    return cast(type[SyncBatchNorm], cls).local_class


def _namespace(cls: type[nn.Module]) -> dict[str, Any]:
    return {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _reduce_ex, "local_class": cls}


def _derive(cls: type[nn.Module]) -> type[SyncBatchNorm]:
    namespace = _namespace(cls)
    base: type[SyncBatchNorm] = SyncBatchNorm
    owners = [owner for owner in _own_classes(cls) if "forward" in vars(owner)]
    if owners:
        for owner in owners:
            _check_forward(cls, owner)
        base = ObservedSyncBatchNorm
        namespace["forward"] = observed_forward(cls.forward, any(_calls_function(cls, owner) for owner in owners))
    becomes = getattr(cls, "cls_to_become", None)
    if becomes is not None:  # a Lazy layer, which changes class when it has seen its first input
        namespace["cls_to_become"] = synchronized_class(becomes)
    return type(f"Sync{cls.__name__}", (cls, base), namespace)


def _replacing_class(cls: type[nn.Module], target: type[SyncBatchNorm]) -> type[SyncBatchNorm]:
    """A class with the methods of ``target`` alone, for layers that were of class ``cls``."""
    if (cls, target) not in _replacing_classes:
        name = f"Sync{cls.__name__.removeprefix('Sync')}"
        _replacing_classes[cls, target] = type(name, (target,), _namespace(cls))
    return _replacing_classes[cls, target]


def _check_arguments(cls: type[nn.Module], target: type[SyncBatchNorm]) -> None:
    """Raises if ``forward`` of ``cls`` takes more than that of ``target``."""
    taken = inspect.signature(target.forward).parameters.values()
    if any(parameter.kind in _VARIADIC for parameter in taken):
        return
    given = [p for p in inspect.signature(cls.forward).parameters.values() if p.kind not in _VARIADIC]
    if len(given) > len(taken):
        raise TypeError(
            f"register_converter: expected a class whose forward takes the arguments of {_full_name(cls)}, got "
            f"{_full_name(target)}, which does not take {', '.join(p.name for p in given[len(taken) :])}"
        )


def _check_options(layer: nn.Module, target: type[SyncBatchNorm]) -> None:
    """Raises if ``layer`` was made with an option that is on and that ``target`` knows nothing of."""
    cls = type(layer)
    bases = [base for base in cls.__mro__[: cls.__mro__.index(nn.Module)] if "__init__" in vars(base)]
    options = {name for base in bases for name in inspect.signature(vars(base)["__init__"]).parameters}
    own = target.__mro__[: target.__mro__.index(SyncBatchNorm)]
    read = {name for base in own for method in vars(base).values() for name in _names_in(method, own)}
    unknown = options - read - set(inspect.signature(SyncBatchNorm).parameters) - set(dir(target))
    values = {name: value for name, value in {**vars(layer), **layer._modules}.items() if name in unknown}
    lost = [f"{name}={value!r}" for name, value in values.items() if not (_is_off(value) or _is_group(value))]
    if lost:
        raise TypeError(
            f"register_converter: expected a class that knows the options of {_full_name(cls)}, got "
            f"{_full_name(target)} for one with {', '.join(lost)}; derive a class whose methods use it, or that has an "
            "attribute of this name where it changes nothing"
        )


def _is_off(value: Any) -> bool:
    return value is None or (isinstance(value, (bool, int, float, str)) and not value)


def _is_group(value: Any) -> bool:
    return bagua.is_process_group(value) or (dist.is_available() and isinstance(value, dist.ProcessGroup))


def _checked_layout(cls: type[nn.Module], target: type[SyncBatchNorm]) -> type[SyncBatchNorm]:
    """Raises TypeError if Python does not let objects of class ``cls`` become ones of ``target``."""
    try:
        object.__setattr__(object.__new__(cls), "__class__", target)
    except TypeError as error:
        raise TypeError(
            f"module: expected layers that can change their class, got {_full_name(cls)}, with __slots__ or other "
            f"storage that {target.__name__} does not have: {error}"
        ) from None
    return target


def _own_classes(cls: type[nn.Module]) -> tuple[type, ...]:
    """The classes from ``cls`` up to the base of torch's own."""
    return cls.__mro__[: cls.__mro__.index(_BatchNorm)]


def _check_forward(cls: type[nn.Module], owner: type) -> None:
    """Raises if the forward of ``cls`` that is in ``owner`` does not call torch's, or synchronizes by itself.

    What remains is watched when it runs, in :mod:`bagua_syncbn.redirect`.
    """
    if not {"forward", "batch_norm"} & _names_in(vars(owner)["forward"], _own_classes(cls)):
        raise TypeError(
            "module: expected batch normalization layers whose forward calls super().forward or F.batch_norm, got "
            f"{_full_name(owner)}, whose forward does not and would stay unsynchronized"
        )
    if "Sync" in owner.__name__:
        raise TypeError(
            f"module: expected batch normalization layers of one process, got {_full_name(cls)}, which synchronizes "
            "by itself; revert it first, or register_converter a class for it"
        )


def _calls_function(cls: type[nn.Module], owner: type) -> bool:
    """Whether the forward of ``cls`` in ``owner`` uses something else than ``super().forward``, or may."""
    names = _names_in(vars(owner)["forward"], _own_classes(cls))
    return "batch_norm" in names or "super" not in names or any(base.__name__ in names for base in cls.__mro__)


def _names_in(function: Any, classes: Iterable[type]) -> set[str]:
    """The names that ``function`` uses, and those that the methods of ``classes`` use which it names."""
    names: set[str] = set()
    pending = [function]
    while pending:
        code = getattr(inspect.unwrap(pending.pop()), "__code__", None)
        new = set(_names(code)) - names if code else set()
        names |= new
        pending += [vars(cls)[name] for cls in classes for name in new if callable(vars(cls).get(name))]
    return names


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# Parametrized layers. torch gives each a class of its own, derived from the layer's, with a property for each tensor;
# it deletes properties from the class and, with the last one, gives the layer the class's first base. So the
# synchronized class is built the same way: the properties in itself, and the synchronized class as its base.


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
    """torch's, but with the group as it travels."""
    if id(layer) in memo:
        return cast(SyncBatchNorm, memo[id(layer)])
    replica = layer.__new__(type(layer))
    memo[id(layer)] = replica
    replica.__dict__ = copy.deepcopy(SyncBatchNorm.__getstate__(layer), memo)
    return replica


# Pickling. A derived class cannot be imported by name: a file holds the classes that it was made from.


def _reduce_ex(layer: SyncBatchNorm, protocol: Any) -> tuple[Any, ...]:
    reduced: Any = super(SyncBatchNorm, layer).__reduce_ex__(protocol)
    state = reduced[2]
    if isinstance(state, dict):
        state = state_to_travel(state)  # again, as a __getstate__ of the layer's own may not have come to ours
    cls = type(layer)
    made_from = (cls.local_class,) if issubclass(cls, cls.local_class) else (cls.local_class, cls.__bases__[0])
    return _new_layer, made_from, state, *reduced[3:]


def _new_layer(cls: type[nn.Module], target: type[SyncBatchNorm] | None = None) -> SyncBatchNorm:
    derived = synchronized_class(cls) if target is None else _replacing_class(cls, target)
    return derived.__new__(derived)
