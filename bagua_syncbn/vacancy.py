"""Names and numbers of Synchronized-BatchNorm-PyTorch: ``from bagua_syncbn.vacancy import …`` for ``sync_batchnorm``.

All is as in :mod:`bagua_syncbn.data_parallel`, except for the divisor in training in replicas, which is
:math:`\\sqrt{\\max(\\mathrm{Var}[x], \\epsilon)}`. In evaluation, and without replicas, both divide by
:math:`\\sqrt{\\mathrm{Var}[x] + \\epsilon}`.
"""

from contextlib import AbstractContextManager
from typing import TypeVar

from torch import nn

from . import data_parallel
from .checks import check_eps_mode
from .data_parallel import (  # noqa: F401  # __all__ names them
    CallbackContext,
    DataParallelWithCallback,
    execute_replication_callbacks,
    layers,
    patch_replication_callback,
)
from .sync_batchnorm import SyncBatchNorm

__all__ = [*data_parallel.__all__, "set_sbn_eps_mode"]

_Module = TypeVar("_Module", bound=nn.Module)

_eps_mode = "clamp"


def set_sbn_eps_mode(mode: str) -> None:
    """Chooses the divisor for all layers of this module, in training in replicas, from the next forward pass on.

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
            self.eps_mode = _eps_mode  # in this copy, which lives for one forward pass


class SynchronizedBatchNorm1d(_ClampsInReplicas, layers.SynchronizedBatchNorm1d):
    """:class:`bagua_syncbn.data_parallel.SynchronizedBatchNorm1d` with the divisor of :func:`set_sbn_eps_mode`."""

    local_class = nn.BatchNorm1d


class SynchronizedBatchNorm2d(_ClampsInReplicas, layers.SynchronizedBatchNorm2d):
    """:class:`SynchronizedBatchNorm1d` for input of 4 dimensions, (N, C, H, W)."""

    local_class = nn.BatchNorm2d


class SynchronizedBatchNorm3d(_ClampsInReplicas, layers.SynchronizedBatchNorm3d):
    """:class:`SynchronizedBatchNorm1d` for input of 5 dimensions, (N, C, D, H, W)."""

    local_class = nn.BatchNorm3d


_CLASSES: layers.Classes = SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d


def convert_model(module: _Module) -> _Module:
    """Works as :func:`bagua_syncbn.data_parallel.convert_model`, and gives the layers the classes of this module.

    A subclass of ``nn.BatchNorm2d`` keeps its forward and divides by what its ``eps_mode`` says, ``"plus"`` unless set.
    """
    return layers.convert_to(_CLASSES, module)


def patch_sync_batchnorm() -> AbstractContextManager[None]:
    """Works as :func:`bagua_syncbn.data_parallel.patch_sync_batchnorm`, with the classes of this module."""
    return layers.stand_for_torchs(_CLASSES)
