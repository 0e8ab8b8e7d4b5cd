"""Other methods for modules of any class, by changing their class to a derived class, and back."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

_Class = TypeVar("_Class", bound=nn.Module)

Change = Callable[[Any], dict[str, Any]]
"""An importable function that returns, for a class of modules, the methods of the class derived from it."""

# Keeps neither class alive.
_made: WeakKeyDictionary[type[nn.Module], dict[object, ReferenceType[type]]] = WeakKeyDictionary()


def made_once(cls: type[nn.Module], key: object, make: Callable[[], type[_Class]]) -> type[_Class]:
    """Returns the class that ``make`` makes of ``cls`` for ``key``, the same one as long as anybody has it."""
    known = _made.setdefault(cls, {})
    made: Any = known[key]() if key in known else None
    if made is None:
        made = make()
        known[key] = ref(made)
    return cast(type[_Class], made)


def class_with(cls: type[nn.Module], change: Change) -> type[nn.Module]:
    """Returns a class derived from ``cls``, of the same name, with the methods of ``change``."""

    def reduce_ex(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
        # The derived class cannot be imported by name, so a file holds the class and the change it was made from.
        reduced: Any = cls.__reduce_ex__(module, protocol)
        function, arguments, *state = reduced
        arguments = tuple(cls if argument is type(module) else argument for argument in arguments)
        return _new_module, (change, function, arguments), *state

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made_by = {"__reduce_ex__": reduce_ex, "change_and_class": (change, cls)}
    return made_once(cls, change, lambda: type(cls.__name__, (cls,), {**names, **made_by, **change(cls)}))


def class_without(cls: type[nn.Module], change: Change) -> type[nn.Module]:
    """Returns the class that modules of ``cls``, a class with ``change``, had before that change.

    Raises:
        TypeError: other code derived ``cls`` from a class that this package made.
    """
    if is_sharded_class(cls):
        return sharded_class(cls, class_without(cls.__bases__[1], change))
    made_by, before = change_and_class(cls)
    if made_by is None:
        raise TypeError(f"module: expected a class as this package made it, got {cls}, which was derived from that")
    return before if made_by is change else class_with(class_without(before, change), made_by)


def change_and_class(cls: type[nn.Module]) -> tuple[Change | None, type[nn.Module]]:
    """Returns the change that ``cls`` was made by and the class it was made from; else None and ``cls``."""
    found: tuple[Change | None, type[nn.Module]] = vars(cls).get("change_and_class", (None, cls))
    return found


def class_before_changes(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that ``cls`` was made from by all its changes; ``cls`` where it has none."""
    while (made_from := change_and_class(cls))[0] is not None:
        cls = made_from[1]
    return cls


def class_with_changes_of(cls: type[nn.Module], base: type[_Class]) -> type[_Class]:
    """Returns ``base`` with all changes that ``cls`` has."""
    change, before = change_and_class(cls)
    return base if change is None else cast(type[_Class], class_with(class_with_changes_of(before, base), change))


def has(cls: type[nn.Module], change: Change) -> bool:
    """Whether modules of ``cls`` have the methods of ``change``."""
    return any(vars(base).get("change_and_class", (None,))[0] is change for base in cls.__mro__)


def apply(module: nn.Module, change: Change) -> None:
    cls = type(module)
    if not has(cls, change):
        object.__setattr__(module, "__class__", class_with(cls, change))


def undo(module: nn.Module, change: Change) -> None:
    cls = type(module)
    if has(cls, change):
        object.__setattr__(module, "__class__", class_without(cls, change))


def forget_compiled_code(module: nn.Module) -> None:
    """Makes the next call of a compiled model compile it with the classes that its layers have now."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # absent unless something was compiled; imports in a second
    if dynamo is not None and any(
        part._compiled_call_impl is not None or isinstance(part, dynamo.OptimizedModule) for part in module.modules()
    ):
        # torch's guards would see that a class has changed, but options of torch.compile can leave them out.
        torch.compiler.reset()


def _new_module(change: Change, function: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    module = function(*arguments)
    apply(module, change)
    return module


# Modules after fully_shard: torch gives them a class derived from FSDPModule and from their own class, in this order.


def is_sharded_class(cls: type) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # absent if never used
    return fsdp is not None and cls.__bases__[0] is fsdp.FSDPModule


def sharded_class(cls: type, base: type[_Class]) -> type[_Class]:
    """Returns the sharded class ``cls`` with ``base`` as its second base."""
    namespace = {name: value for name, value in vars(cls).items() if name in ("__module__", "__deepcopy__")}
    return type(f"FSDP{base.__name__}", (cls.__bases__[0], base), namespace)
