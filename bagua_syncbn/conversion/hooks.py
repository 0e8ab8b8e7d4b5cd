"""Registries by which other modules take part in conversion. Conversion imports none of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from ..registry import Registry
from ..sync_batchnorm import SyncBatchNorm

own_forward_contexts: Registry[Callable[[SyncBatchNorm], AbstractContextManager[object] | None]] = Registry()
"""Each returns a context for a training call of a layer with its own ``forward``; None if it needs none."""

undo_hooks: Registry[Callable[[nn.Module], Callable[[], None]]] = Registry()
"""Each undoes a change of a model before its layers change class, and returns a function that restores the change."""

report_notes: Registry[Callable[[nn.Module], Iterable[tuple[nn.Module, str]]]] = Registry()
"""Each yields notes on the layers of a model for :func:`~bagua_syncbn.conversion_report`."""


def undo_changes(module: nn.Module) -> Callable[[], None]:
    """Runs all undo hooks; returns a function that restores the changes."""
    restore = [undo(module) for undo in undo_hooks]

    def restore_all() -> None:
        for redo in restore:
            redo()

    return restore_all


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Context in which the changes that undo hooks know are undone."""
    restore = undo_changes(module)
    try:
        yield
    finally:
        restore()
