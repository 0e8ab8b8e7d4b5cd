"""Data parallelism within one process, as in :class:`torch.nn.DataParallel`, with synchronized layers.

Names and behavior follow the package Synchronized-BatchNorm-PyTorch, so its users only change their imports.
"""

from .layers import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    patch_sync_batchnorm,
)
from .replicas import CallbackContext
from .wrapper import DataParallelWithCallback, execute_replication_callbacks, patch_replication_callback

__all__ = [
    "CallbackContext",
    "DataParallelWithCallback",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "convert_model",
    "execute_replication_callbacks",
    "patch_replication_callback",
    "patch_sync_batchnorm",
]
