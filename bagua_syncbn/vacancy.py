"""Drop-in replacement for Synchronized-BatchNorm-PyTorch: ``from bagua_syncbn.vacancy import …``.

Equals :mod:`bagua_syncbn.data_parallel`, but training replicas divide by
:math:`\\sqrt{\\max(\\mathrm{Var}[x], \\epsilon)}` instead of :math:`\\sqrt{\\mathrm{Var}[x] + \\epsilon}`.
"""

from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import nn

from . import data_parallel
from .checks import check_eps_mode
from .data_parallel import (  # noqa: F401  # __all__ names them
    CallbackContext,
    DataParallelWithCallback,
    execute_replication_callbacks,
    patch_replication_callback,
)
from .data_parallel.wrapper import replace_in_torch
from .sync_batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d

__all__ = [*data_parallel.__all__, "set_sbn_eps_mode"]

_Module = TypeVar("_Module", bound=nn.Module)

_eps_mode = "clamp"


def set_sbn_eps_mode(mode: str) -> None:
    """Sets the divisor of all layers of this module in training replicas, starting with the next forward pass.

    Args:
        mode: ``"clamp"``, the default, or ``"plus"``, see :class:`bagua_syncbn.SyncBatchNorm`.
    """
    global _eps_mode
    check_eps_mode(mode)
    _eps_mode = mode


class _Clamping(SyncBatchNorm):
    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)  # type: ignore[misc]
        if self.training:
            self.eps_mode = _eps_mode  # only in this replica, which lives for one forward pass


def _clamping(cls: type[SyncBatchNorm]) -> Any:
    namespace = {"__module__": __name__, "__doc__": cls.__doc__, "local_class": cls.local_class}
    return type(cls.__name__.replace("Sync", "Synchronized"), (_Clamping, cls), namespace)


_CLASSES: dict[Any, Any] = {cls: _clamping(cls) for cls in (SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d)}
SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d = _CLASSES.values()


def convert_model(module: _Module) -> _Module:
    """Works like :func:`bagua_syncbn.data_parallel.convert_model`, with the classes of this module.

    Subclasses of ``nn.BatchNorm2d`` keep forward and ``eps_mode``, ``"plus"`` by default.
    """
    for child in data_parallel.convert_model(module).modules():
        child.__class__ = _CLASSES.get(type(child), type(child))
    return module


def patch_sync_batchnorm() -> AbstractContextManager[Any]:
    """Works like :func:`bagua_syncbn.data_parallel.patch_sync_batchnorm`, with the classes of this module."""
    return replace_in_torch(*_CLASSES.values())
