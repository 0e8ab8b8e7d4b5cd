"""Drop-in replacement for Synchronized-BatchNorm-PyTorch: ``from bagua_syncbn.vacancy import …``.

Equals :mod:`bagua_syncbn.data_parallel`, but training replicas divide by
:math:`\\sqrt{\\max(\\mathrm{Var}[x], \\epsilon)}` instead of :math:`\\sqrt{\\mathrm{Var}[x] + \\epsilon}`.
"""

from typing import Any, TypeVar

from torch import nn

from . import data_parallel
from .data_parallel import (  # noqa: F401  # __all__ names them
    CallbackContext,
    DataParallelWithCallback,
    execute_replication_callbacks,
    patch_replication_callback,
)
from .sync_batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d

__all__ = data_parallel.__all__

_Module = TypeVar("_Module", bound=nn.Module)


class _Clamping(SyncBatchNorm):
    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)  # pyrefly: ignore[not-callable]
        if self.training:
            self.eps_mode = "clamp"  # only in this replica, which lives for one forward pass


def _clamping(cls: type[SyncBatchNorm]) -> Any:
    namespace = {"__module__": __name__, "__doc__": cls.__doc__, "local_class": cls.local_class}
    return type(cls.__name__.replace("Sync", "Synchronized"), (_Clamping, cls), namespace)


_CLASSES: dict[Any, Any] = {cls: _clamping(cls) for cls in (SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d)}
SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d = _CLASSES.values()


def convert_model(module: _Module) -> _Module:
    """Works like :func:`bagua_syncbn.data_parallel.convert_model`, with the classes of this module.

    Subclasses of ``nn.BatchNorm2d`` keep their forward and their ``eps_mode`` (default: ``"plus"``).
    """
    for child in data_parallel.convert_model(module).modules():
        child.__class__ = _CLASSES.get(type(child), type(child))
    return module
