"""Conversion between local and synchronized layers, by change of class.

A converted layer is the same object: parameters, buffers, hooks, attributes, training flag and all references to it
stay what they are. What changes is ``layer.__class__``, to a class that inherits from the old one and from
:class:`SyncBatchNorm`, in that order, so that method resolution meets ``SyncBatchNorm.forward`` just where it used to
meet torch's.
"""

import inspect
import sys
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .communicators import check_process_group
from .sync_batchnorm import BatchNorm, SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from .wrapper import is_data_parallel

_Module = TypeVar("_Module", bound=nn.Module)


def convert_sync_batchnorm(module: _Module, process_group: Any = None) -> _Module:
    """Makes every batch normalization layer of ``module`` a synchronized one, in place.

    The layers stay the same objects and only change their class, so optimizers may be made before or after, and
    parameters, buffers, hooks, attributes and training flags stay. Subclasses of torch's layers keep their own
    ``forward`` if it calls ``super().forward``. Layers of :class:`torch.nn.SyncBatchNorm` are converted too. Convert
    before the model is wrapped or compiled.

    Args:
        module: the model. If it is itself a batch normalization layer, a converted copy that shares its parameters and
            buffers is returned and ``module`` stays as it is, as with torch's converter (but a Lazy layer, which torch
            cannot copy, is converted in place).
        process_group: the ranks to synchronize with, see :func:`sync_batch_norm`. None leaves layers that have a group
            with theirs, and gives the others the default group.

    Returns:
        ``module``, or its converted copy.

    Raises:
        TypeError: ``module`` holds a batch normalization layer that conversion cannot synchronize, or is TorchScript;
            ``process_group`` is of no known kind.
        ValueError: this rank is not in ``process_group``.
        RuntimeError: ``module`` is data parallel or compiled already.

    If it raises, ``module`` is unchanged.

    Example::

        >>> model = bagua_syncbn.convert_sync_batchnorm(model)
        >>> model = bagua_syncbn.with_bagua(model, [optimizer])
    """
    check_process_group(process_group)
    for name, child in module.named_modules():
        _check_convertible(name, child)
    if _is_batch_norm(module):
        module = _shallow_copy(module)
    # The classes first: one layer that is refused leaves all as they were.
    classes = {layer: synchronized_class(type(layer)) for layer in module.modules() if _is_batch_norm(layer)}
    for layer, cls in classes.items():
        layer.__class__ = cls
        if process_group is not None:
            layer.process_group = process_group
    return module


def revert_sync_batchnorm(module: _Module) -> _Module:
    """Gives every synchronized layer of ``module`` the class that it had before conversion, in place.

    Layers that were made as :class:`SyncBatchNorm1d`, ``2d`` or ``3d`` become :class:`torch.nn.BatchNorm1d`, ``2d`` or
    ``3d``, and those made as :class:`SyncBatchNorm` become :class:`~bagua_syncbn.sync_batchnorm.BatchNorm`. Layers that
    were :class:`torch.nn.SyncBatchNorm` become that again.

    Args:
        module: the model. If it is itself a synchronized layer, a reverted copy that shares its parameters and buffers
            is returned.

    Returns:
        ``module``, or its reverted copy.

    Raises:
        TypeError: ``module`` holds a layer of a subclass of :class:`SyncBatchNorm` that does not say what its
            ``local_class`` is.

    If it raises, ``module`` is unchanged.
    """
    if isinstance(module, SyncBatchNorm):
        module = _shallow_copy(module)
    classes = {layer: _local_class(type(layer)) for layer in module.modules() if isinstance(layer, SyncBatchNorm)}
    for layer, local_class in classes.items():
        # torch's own layer has a group too, and keeps it.
        if local_class is not nn.SyncBatchNorm:
            vars(layer).pop("process_group", None)
        object.__setattr__(layer, "__class__", local_class)
    return module


_STANDARD_CLASSES: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    BatchNorm: SyncBatchNorm,
}

# Neither side is kept alive: parametrized layers have a class each.
_derived_classes: WeakKeyDictionary[type[nn.Module], ReferenceType[type[SyncBatchNorm]]] = WeakKeyDictionary()


def synchronized_class(cls: type[nn.Module]) -> type[SyncBatchNorm]:
    """Returns the class that layers of class ``cls`` get, made at the first call.

    Raises:
        TypeError: a ``forward`` of ``cls`` does not lead to that of :class:`SyncBatchNorm`.
    """
    if issubclass(cls, SyncBatchNorm):
        return cls
    if cls in _STANDARD_CLASSES:
        return _STANDARD_CLASSES[cls]
    cached = _derived_classes.get(cls)
    derived = cached() if cached else None
    if derived is None:
        derived = _derive(cls)
        _derived_classes[cls] = ref(derived)
    return derived


def _derive(cls: type[nn.Module]) -> type[SyncBatchNorm]:
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce_ex,
        "local_class": cls,
    }
    if cls is nn.SyncBatchNorm:
        # Not a subclass of it: DistributedDataParallel refuses those on CPU.
        return type("SyncBatchNorm", (SyncBatchNorm,), namespace)
    _check_forward(cls)
    becomes = getattr(cls, "cls_to_become", None)
    if becomes is not None:  # a Lazy layer, which changes class when it has seen its first input
        namespace["cls_to_become"] = synchronized_class(becomes)
    return type(f"Sync{cls.__name__}", (cls, SyncBatchNorm), namespace)


def _check_forward(cls: type[nn.Module]) -> None:
    """Raises unless each ``forward`` that ``cls`` adds to torch's calls ``super().forward``.

    Any other would normalize by this rank's statistics and leave nobody the wiser.
    """
    for base in cls.__mro__[: cls.__mro__.index(_BatchNorm)]:
        if "forward" not in vars(base):
            continue
        code = getattr(inspect.unwrap(vars(base)["forward"]), "__code__", None)
        if code is None or not {"super", "forward"} <= set(code.co_names):
            raise TypeError(
                "module: expected batch normalization layers whose forward calls super().forward, got "
                f"{base.__module__}.{base.__qualname__}, whose forward does not and would stay unsynchronized"
            )


def _local_class(cls: type[SyncBatchNorm]) -> type[nn.Module]:
    if "local_class" not in vars(cls):
        raise TypeError(
            f"module: expected layers whose class names its local_class, got {cls.__module__}.{cls.__qualname__}; "
            "set local_class in it to the class that its layers are to become"
        )
    return cls.local_class


def _reduce_ex(layer: SyncBatchNorm, protocol: Any) -> tuple[Any, ...]:
    # A derived class cannot be imported by name: a file holds the class that it was made from.
    reduced: Any = super(SyncBatchNorm, layer).__reduce_ex__(protocol)
    return _new_layer, (type(layer).local_class,), *reduced[2:]


def _new_layer(cls: type[nn.Module]) -> SyncBatchNorm:
    derived = synchronized_class(cls)
    return derived.__new__(derived)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)


def _check_convertible(name: str, module: nn.Module) -> None:
    where = f"{type(module).__name__} at {name!r}" if name else type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"module: expected a model of Python modules, got a TorchScript {where}; convert, then script")
    if is_data_parallel(module):
        raise RuntimeError(f"module: expected an unwrapped model, got data parallel {where}; convert first, then wrap")
    if _is_compiled(module):
        raise RuntimeError(f"module: expected a model before compilation, got compiled {where}; convert, then compile")
    if _is_batch_norm(module) and "forward" in vars(module):
        raise TypeError(f"module: expected layers with the forward of their class, got {where} with one of its own")


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported, not compiled: it takes a second to import
    return module._compiled_call_impl is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def _shallow_copy(layer: _Module) -> _Module:
    if isinstance(layer, LazyModuleMixin):
        return layer  # has hooks that are bound to the object, and cannot be copied
    twin = layer.__new__(type(layer))
    twin.__dict__ = {key: value.copy() if isinstance(value, dict) else value for key, value in vars(layer).items()}
    return twin
