"""Synchronized batch normalization: the statistics of all ranks, under Bagua, torch.distributed or no job at all."""

from .accumulation import accumulate_statistics
from .autograd import Repeatable
from .communicators import sync_group
from .conversion import (
    conversion_report,
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    patch_torch_converter,
    recompute_outputs,
    register_converter,
    revert_sync_batchnorm,
    unfreeze_statistics,
)
from .functional import sync_batch_norm
from .masks import masked
from .merging import merge_statistics
from .recalibration import recalibrate_statistics
from .sync import check_ranks
from .sync_batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from .verification import measure_batch_noise, verify_synchronization
from .version import __version__
from .with_bagua import with_bagua

__all__ = [
    "Repeatable",
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "__version__",
    "accumulate_statistics",
    "check_ranks",
    "conversion_report",
    "convert_sync_batchnorm",
    "freeze_statistics",
    "fuse_activations",
    "masked",
    "measure_batch_noise",
    "merge_statistics",
    "patch_torch_converter",
    "recalibrate_statistics",
    "recompute_outputs",
    "register_converter",
    "revert_sync_batchnorm",
    "sync_batch_norm",
    "sync_group",
    "unfreeze_statistics",
    "verify_synchronization",
    "with_bagua",
]
