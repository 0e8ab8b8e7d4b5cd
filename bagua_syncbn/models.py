"""Modules of a model: their names, which of them a filter leaves out, and whether they are data parallel."""

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .communicators import bagua
from .torch_internals.modules import is_replicated_in_place

Filter = Callable[[str, nn.Module], bool]


def check_module(module: object, name: str = "module") -> None:
    """Raises TypeError unless ``module``, of the argument ``name``, is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {type(module).__name__}")


def check_filter(filter: object) -> None:
    """Raises TypeError unless ``filter`` is a filter or None."""
    if filter is not None and not callable(filter):
        raise TypeError(f"filter: expected a function of a name and a module, or None, got {type(filter).__name__}")


def modules_with_names(
    root: nn.Module, is_closed: Callable[[nn.Module, str], bool] = lambda module, name: False
) -> dict[nn.Module, list[str]]:
    """Returns all modules in the order of ``named_modules``, each with all its names; shared modules have several.

    Children of modules for which ``is_closed`` is True are left out.
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
    """Whether ``filter`` returns False for all ``names`` of ``module``."""
    return filter is not None and not any(filter(name, module) for name in names)


def is_data_parallel(module: nn.Module) -> bool:
    """Whether ``module`` itself was wrapped, by ``with_bagua``, by Bagua's method or by DistributedDataParallel."""
    is_wrapped = isinstance(module, DistributedDataParallel) or bagua.is_data_parallel(module)
    return is_wrapped or is_replicated_in_place(module)
