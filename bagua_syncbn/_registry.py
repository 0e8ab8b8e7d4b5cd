"""Registries, where other modules add functions to the core."""

from typing import TypeVar

_T = TypeVar("_T")


class Registry(list[_T]):
    """Items that modules register, in the order in which the modules are imported."""

    def register(self, item: _T) -> _T:
        """Adds ``item`` and returns it, so that it works as a decorator."""
        self.append(item)
        return item
