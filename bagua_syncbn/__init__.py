"""Batch normalization synchronized across the ranks of a job: torch.distributed, Bagua, or a single process."""

try:
    import torch as _installed  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "bagua_syncbn needs PyTorch 2.10 or later: pip install torch (see https://pytorch.org)", name=error.name
    ) from None

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import (
    _cuda,  # noqa: F401  # compares the kernels of a CUDA device at their first use
    files,  # noqa: F401  # names what files contain
)
from ._groups import ProcessGroupLike
from ._reliability import unsynchronized as _unsynchronized  # noqa: F401  # warns about launched jobs without a group
from ._reliability.faults import check_ranks
from .bagua import with_bagua
from .communicators.torch_engine import sync_group
from .conversion import (
    conversion_report,
    convert_sync_batchnorm,
    patch_torch_converter,
    register_converter,
    revert_sync_batchnorm,
)
from .functional import sync_batch_norm
from .memory import Repeatable, fuse_activations, recompute_outputs
from .statistics import (
    accumulate_statistics,
    freeze_statistics,
    masked,
    mean_over_ranks,
    merge_statistics,
    recalibrate_statistics,
    unfreeze_statistics,
)
from .sync_batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from .verification import measure_batch_noise, verify_synchronization
from .version import __version__

# Groups and exchanges read and write their state under the GIL.
if not getattr(_sys, "_is_gil_enabled", lambda: True)():
    raise ImportError("bagua_syncbn needs the GIL, which this Python runs without; set PYTHON_GIL=1")

__all__ = [
    "ProcessGroupLike",
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
    "mean_over_ranks",
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

if not _TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Raises AttributeError; for a name of another package, the error names its counterpart here."""
        ours = {"convert_syncbn_model": "convert_sync_batchnorm", "create_syncbn_process_group": "sync_group"}.get(name)
        if name.startswith("SynchronizedBatchNorm") or name in ("convert_model", "DataParallelWithCallback"):
            ours = f"vacancy.{name}"
        hint = f"; use {__name__}.{ours}" if ours else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name)
