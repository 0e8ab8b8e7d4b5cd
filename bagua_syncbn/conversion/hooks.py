"""Registries that let other modules hook into conversion. Conversion does not import those modules."""

from collections.abc import Callable, Iterable

from torch import nn

from ..registry import Registry

undo_hooks: Registry[Callable[[nn.Module], None]] = Registry()
"""Each undoes a change of a model before revert changes the layers' classes."""

report_notes: Registry[Callable[[nn.Module], Iterable[tuple[nn.Module, str]]]] = Registry()
"""Each yields notes on the layers of a model for :func:`~bagua_syncbn.conversion_report`."""
