"""Statistics of a model: masks, DTensors and losses over all ranks; running statistics across batches and ranks."""

from . import sharded  # noqa: F401  # computes calls with DTensors
from .accumulation import accumulate_statistics
from .freezing import freeze_statistics, unfreeze_statistics
from .masked import masked
from .model_merge import merge_statistics
from .over_ranks import mean_over_ranks
from .recalibration import recalibrate_statistics

__all__ = [
    "accumulate_statistics",
    "freeze_statistics",
    "masked",
    "mean_over_ranks",
    "merge_statistics",
    "recalibrate_statistics",
    "unfreeze_statistics",
]
