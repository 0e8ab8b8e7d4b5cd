"""Functions that accumulate, freeze, merge and recalibrate running statistics."""

from .accumulation import accumulate_statistics
from .freezing import freeze_statistics, unfreeze_statistics
from .merging import merge_statistics
from .recalibration import recalibrate_statistics

__all__ = [
    "accumulate_statistics",
    "freeze_statistics",
    "merge_statistics",
    "recalibrate_statistics",
    "unfreeze_statistics",
]
