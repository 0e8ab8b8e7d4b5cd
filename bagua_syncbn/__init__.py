"""Synchronized batch normalization: the statistics of all ranks, under Bagua, torch.distributed or no job at all."""

from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .functional import sync_batch_norm
from .sync_batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from .version import __version__
from .wrapper import with_bagua

__all__ = [
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "__version__",
    "convert_sync_batchnorm",
    "revert_sync_batchnorm",
    "sync_batch_norm",
    "with_bagua",
]
