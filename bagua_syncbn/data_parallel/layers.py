"""Layers with the names and arguments of Synchronized-BatchNorm-PyTorch, and conversion to them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import nn

from ..conversion import convert_sync_batchnorm
from ..conversion.classes import synchronized_class
from ..sync_batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from .wrapper import patch_replication_callback

_Module = TypeVar("_Module", bound=nn.Module)


class _SynchronizedBatchNorm(SyncBatchNorm):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, None, device, dtype, **options)


class SynchronizedBatchNorm1d(_SynchronizedBatchNorm, SyncBatchNorm1d):
    r"""Batch normalization over (N, C) or (N, C, L) with the statistics of all replicas.

    A :class:`~bagua_syncbn.SyncBatchNorm1d` with the arguments of :class:`torch.nn.BatchNorm1d`, in the same order,
    and no ``process_group``.
    """

    local_class = nn.BatchNorm1d


class SynchronizedBatchNorm2d(_SynchronizedBatchNorm, SyncBatchNorm2d):
    """:class:`SynchronizedBatchNorm1d` for 4-dimensional input, (N, C, H, W)."""

    local_class = nn.BatchNorm2d


class SynchronizedBatchNorm3d(_SynchronizedBatchNorm, SyncBatchNorm3d):
    """:class:`SynchronizedBatchNorm1d` for 5-dimensional input, (N, C, D, H, W)."""

    local_class = nn.BatchNorm3d


Classes = Sequence[type[SyncBatchNorm]]

CLASSES: Classes = SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d


def convert_model(module: _Module) -> _Module:
    """Makes every batch normalization layer of ``module`` a synchronized one, in place.

    Works like :func:`bagua_syncbn.convert_sync_batchnorm`, except that :class:`torch.nn.BatchNorm2d` becomes
    :class:`SynchronizedBatchNorm2d`, and that :func:`patch_replication_callback` patches each
    :class:`torch.nn.DataParallel` in ``module``.

    Args:
        module: the model, wrapped or not.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError, RuntimeError: :func:`bagua_syncbn.convert_sync_batchnorm` raises it.

    If it raises, ``module`` is unchanged.
    """
    return convert_to(CLASSES, module)


def convert_to(classes: Classes, module: _Module) -> _Module:
    """Implements :func:`convert_model`; torch's layers become ``classes``."""
    convert_sync_batchnorm(module)
    becomes: dict[Any, Any] = {synchronized_class(cls.local_class): cls for cls in classes}
    for child in module.modules():
        if type(child) in becomes:
            child.__class__ = becomes[type(child)]
        elif isinstance(child, nn.DataParallel):
            patch_replication_callback(child)
    return module


def patch_sync_batchnorm() -> AbstractContextManager[None]:
    """Replaces ``torch.nn.BatchNorm1d``, ``2d`` and ``3d`` by the synchronized classes inside the context.

    Code that builds its layers as ``nn.BatchNorm2d(...)`` then builds synchronized ones. Only these three attributes of
    the module ``torch.nn`` change, for all threads. A name imported before, as in ``from torch.nn import BatchNorm2d``,
    is still torch's class.

    Example::

        >>> with patch_sync_batchnorm():
        ...     model = torchvision.models.resnet18()
    """
    return replace_torchs(CLASSES)


@contextmanager
def replace_torchs(classes: Classes) -> Iterator[None]:
    """Implements :func:`patch_sync_batchnorm` for ``classes``."""
    patched = {cls.local_class.__name__: cls for cls in classes}
    saved = {name: getattr(nn, name) for name in patched}
    try:
        for name, cls in patched.items():
            setattr(nn, name, cls)
        yield
    finally:
        for name, before in saved.items():
            setattr(nn, name, before)
