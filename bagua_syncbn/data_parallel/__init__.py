"""Synchronized layers for :class:`torch.nn.DataParallel`, with the names of Synchronized-BatchNorm-PyTorch."""

from ..sync_batchnorm import SyncBatchNorm1d as SynchronizedBatchNorm1d
from ..sync_batchnorm import SyncBatchNorm2d as SynchronizedBatchNorm2d
from ..sync_batchnorm import SyncBatchNorm3d as SynchronizedBatchNorm3d
from .replicas import CallbackContext
from .wrapper import (
    DataParallelWithCallback,
    convert_model,
    execute_replication_callbacks,
    patch_replication_callback,
)

__all__ = [
    "CallbackContext",
    "DataParallelWithCallback",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "convert_model",
    "execute_replication_callbacks",
    "patch_replication_callback",
]
