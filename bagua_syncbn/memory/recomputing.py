"""Models that recompute the outputs of layers in backward."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

from torch import nn

from .._step.checks import check_flag
from .._warnings import context
from ..conversion.convert import undo_hooks
from ..conversion.models import check_module, synchronized_layers
from .recipes import saved_as_recipes

_Module = TypeVar("_Module", bound=nn.Module)


@overload
def recompute_outputs(module: None = None) -> AbstractContextManager[None]: ...
@overload
def recompute_outputs(module: _Module, *, enabled: bool = True) -> _Module: ...
def recompute_outputs(module: _Module | None = None, *, enabled: bool = True) -> _Module | AbstractContextManager[None]:
    """Recomputes the outputs of synchronized layers in the backward pass instead of storing them.

    Subsequent layers may save a synchronized layer's output, a view of it, or its activation (module or function,
    in-place or not). Backward recomputes these tensors with elementwise passes over the layer's input, which is stored
    anyway. The values are bitwise equal, because the same kernels run on the same input. In a single process, the
    layers use the kernels of this package instead of :func:`torch.nn.functional.batch_norm`.

    Recomputation stores as little as `In-Place Activated BatchNorm (Rota Bulò, Porzi and Kontschieder, 2018)
    <https://arxiv.org/abs/1712.02616>`__, which stores the activation's output and inverts the activation.

    Outputs are stored in evaluation, under :func:`torch.no_grad`, in compiled code, inside saved-tensor hooks such as
    activation checkpointing and :func:`torch.autograd.graph.save_on_cpu`, and if the layer has a residual, or a
    recomputed output as input.

    Args:
        module: a model that will recompute outputs. The call changes the model's class, which copies and files keep.
            None returns a context manager for forward passes in this thread; backward can run outside the context.
        enabled: False to turn it off for ``module``. :func:`revert_sync_batchnorm` also turns it off.

    Returns:
        ``module``, the same object, or the context manager.

    Raises:
        TypeError: ``module`` is not a module, or ``enabled`` not a bool.

    Warns if ``module`` has no synchronized layer, and if the context manager is not entered. Backward raises
    RuntimeError if the input of a layer was written to after its forward pass, except through ``.data``.

    Example::

        >>> with bagua_syncbn.recompute_outputs():
        ...     loss = model(images).square().mean()
        >>> loss.backward()

        >>> model = bagua_syncbn.recompute_outputs(model)
    """
    check_flag("enabled", enabled)
    if module is None and enabled:
        return _recompute_outputs()
    check_module(module)
    model: Any = module
    if enabled:
        synchronized_layers(model, "recompute_outputs")  # warns if there are none
    return _set_recomputing(model, enabled)


@context
def _recompute_outputs() -> Iterator[None]:
    with saved_as_recipes():
        yield


def _set_recomputing(model: Any, enabled: bool) -> Any:
    # Set on the wrapped module, which keeps the setting when the wrapper is removed.
    target = model.module if isinstance(model, nn.DataParallel) else model
    if enabled != _recomputes(target):
        cls: Any = type(target)
        object.__setattr__(target, "__class__", _recomputing_class(cls) if enabled else cls.__bases__[0])
    return model


@functools.cache
def _recomputing_class(cls: Any) -> Any:
    """Returns a subclass of ``cls`` that recomputes outputs in its calls.

    A pair of hooks would not work, because torch does not call forward hooks after Ctrl-C in the forward. With an
    instance attribute, copies and replicas would call the forward of the original module.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with saved_as_recipes():
            return cls.forward(self, *args, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = cls.__reduce_ex__(self, protocol)
        make, arguments, *rest = reduced
        return _make_recomputing, (make, *(cls if given is type(self) else given for given in arguments)), *rest

    namespace = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce_ex,
        "forward": functools.wraps(cls.forward)(forward),
        "_derived_from": _recomputing_class,  # conversion uses it to derive a class from the synchronized class
    }
    return type(cls.__name__, (cls,), namespace)


def _recomputes(module: nn.Module) -> bool:
    return vars(type(module)).get("_derived_from") is _recomputing_class


def _make_recomputing(make: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    """Creates a module when a copy or pickle is loaded."""
    return _set_recomputing(make(*arguments), True)


def _undo(module: nn.Module) -> None:
    for part in module.modules():
        _set_recomputing(part, False)


undo_hooks.append(_undo)
