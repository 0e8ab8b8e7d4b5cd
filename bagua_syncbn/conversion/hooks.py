"""Registries that let other modules hook into conversion. Conversion does not import those modules."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from torch import nn

from ..registry import Registry
from ..sync_batchnorm import SyncBatchNorm

own_forward_contexts: Registry[Callable[[SyncBatchNorm], AbstractContextManager[object] | None]] = Registry()
"""Each returns a context for a training call of a layer with a custom ``forward``, or None."""

undo_hooks: Registry[Callable[[nn.Module], None]] = Registry()
"""Each undoes a change of a model before revert changes the layers' classes."""

report_notes: Registry[Callable[[nn.Module], Iterable[tuple[nn.Module, str]]]] = Registry()
"""Each yields notes on the layers of a model for :func:`~bagua_syncbn.conversion_report`."""
