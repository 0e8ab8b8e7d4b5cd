"""Drop-in replacement for Synchronized-BatchNorm-PyTorch: ``from bagua_syncbn.vacancy import …``.

Equals :mod:`bagua_syncbn.data_parallel`, except for the divisor in training in replicas, which is
:math:`\\sqrt{\\max(\\mathrm{Var}[x], \\epsilon)}`. In evaluation and without replicas, both divide by
:math:`\\sqrt{\\mathrm{Var}[x] + \\epsilon}`.
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
from .data_parallel.layers import CLASSES, convert_to, replace_torchs
from .sync_batchnorm import SyncBatchNorm

__all__ = [*data_parallel.__all__, "set_sbn_eps_mode"]

_Module = TypeVar("_Module", bound=nn.Module)

_eps_mode = "clamp"


def set_sbn_eps_mode(mode: str) -> None:
    """Sets the divisor for all layers of this module, in training in replicas, from the next forward pass on.

    Args:
        mode: ``"clamp"``, the default, or ``"plus"``, see :class:`bagua_syncbn.SyncBatchNorm`.

    Raises:
        ValueError: ``mode`` is neither of the two.
    """
    global _eps_mode
    check_eps_mode(mode)
    _eps_mode = mode


class _ClampsInReplicas(SyncBatchNorm):
    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)  # type: ignore[misc]
        if self.training:
            self.eps_mode = _eps_mode  # only in this copy, which lives for one forward pass


def _clamping(cls: type[SyncBatchNorm]) -> Any:
    doc = f":class:`bagua_syncbn.data_parallel.{cls.__name__}` with the divisor of :func:`set_sbn_eps_mode`."
    namespace = {"__module__": __name__, "__doc__": doc, "local_class": cls.local_class}
    return type(cls.__name__, (_ClampsInReplicas, cls), namespace)


_CLASSES = SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d = (*map(_clamping, CLASSES),)


def convert_model(module: _Module) -> _Module:
    """Works like :func:`bagua_syncbn.data_parallel.convert_model`, with the classes of this module.

    A subclass of ``nn.BatchNorm2d`` keeps its forward and its ``eps_mode``, which is ``"plus"`` unless set.
    """
    return convert_to(_CLASSES, module)


def patch_sync_batchnorm() -> AbstractContextManager[None]:
    """Works like :func:`bagua_syncbn.data_parallel.patch_sync_batchnorm`, with the classes of this module."""
    return replace_torchs(_CLASSES)
