"""Data parallelism within one process, as :class:`torch.nn.DataParallel` offers it, with synchronized layers.

Names and behaviour follow the package Synchronized-BatchNorm-PyTorch, so its users change only their imports.
Replicas may also share a device: ``device_ids=["cpu", "cpu"]`` runs two of them, in threads, on chunks of one batch.
"""

from .callbacks import execute_replication_callbacks
from .layers import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    patch_sync_batchnorm,
)
from .replicas import CallbackContext
from .wrapper import DataParallelWithCallback, patch_replication_callback

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
