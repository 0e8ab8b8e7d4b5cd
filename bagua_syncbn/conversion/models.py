"""Modules of a model: names, filters, attachments, data parallel wrappers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from .._errors import restored
from .._groups import engines
from .._step.layer_state import Attachment
from .._warnings import warn
from ..sync_batchnorm import SyncBatchNorm

Filter = Callable[[str, nn.Module], bool]

_A = TypeVar("_A", bound=Attachment)


def check_module(module: object, name: str = "module") -> None:
    """Raises TypeError unless ``module`` (argument ``name``) is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {type(module).__name__}")


def modules_with_names(
    root: nn.Module, is_closed: Callable[[nn.Module, str], bool] = lambda module, name: False
) -> dict[nn.Module, list[str]]:
    """Returns all modules with all their names, in the order of ``named_modules``.

    Skips children of modules for which ``is_closed`` returns True.
    """
    found: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, name: str) -> None:
        if module in found:  # shared, or in a cycle
            found[module].append(name)
            return
        found[module] = [name]
        if not is_closed(module, name):
            for child_name, child in module._modules.items():
                if child is not None:
                    visit(child, f"{name}.{child_name}" if name else child_name)

    visit(root, "")
    return found


def is_left_out(module: nn.Module, names: list[str], filter: Filter | None) -> bool:
    """Returns whether ``filter`` returns False for all ``names`` of ``module``."""
    return filter is not None and not any(filter(name, module) for name in names)


def synchronized_layers(model: nn.Module, what: str) -> list[SyncBatchNorm]:
    """Returns the synchronized layers of ``model``. Warns, with the name ``what``, if there are none."""
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    if not layers:
        warn(f"{what}: found no synchronized layer in {type(model).__name__}")
    return layers


@contextmanager
def with_attachments(model: nn.Module, what: str, make: Callable[[Any], _A | None]) -> Iterator[dict[Any, _A]]:
    """Attaches ``make(layer)`` to each synchronized layer of ``model`` inside the context, as its outermost attachment.

    Skips layers for which ``make`` returns None. Yields a dict from layers to their new attachments. Warns, with the
    name ``what``, if ``model`` has no synchronized layer.
    """
    check_module(model, "model")
    layers = synchronized_layers(model, what)
    new = {layer: attachment for layer in layers if (attachment := make(layer)) is not None}
    states = {layer: layer._sync_state for layer in new}

    def detach() -> None:
        for layer, attachment in new.items():
            # A conversion that raised has restored a copy of the state.
            for state in (states[layer], vars(layer).get("_sync_state", states[layer])):
                state.attachments = tuple(each for each in state.attachments if each is not attachment)

    with restored(detach):
        for layer, attachment in new.items():
            states[layer].attachments += (attachment,)
        yield new


def is_data_parallel(module: nn.Module) -> bool:
    """Returns whether an engine has made ``module`` itself data parallel."""
    return any(engine.is_data_parallel(module) for engine in engines)
