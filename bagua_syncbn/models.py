"""Modules of a model: names, filters, data parallel wrappers."""

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .communicators import bagua
from .torch_internals.modules import is_replicated_in_place

Filter = Callable[[str, nn.Module], bool]


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


def is_data_parallel(module: nn.Module) -> bool:
    """Returns whether ``module`` itself was wrapped by ``with_bagua``, Bagua's method or DistributedDataParallel."""
    is_wrapped = isinstance(module, DistributedDataParallel) or bagua.is_data_parallel(module)
    return is_wrapped or is_replicated_in_place(module)
