"""What is computed, knowing nothing of ranks. See :mod:`bagua_syncbn.ops.schemas` for shapes and dtypes."""

import torch

from . import reference
from .activations import IDENTITY, Activation, activation_of, activation_recorded_by
from .fallback import cuda_problem
from .layout import laid_out_as
from .masking import Masking
from .merge import EPS_MODES, Kept, MergedStats, MergeOptions, clear_clamped, merge_stats
from .native import KERNELS, beat_torch, outrun_memory
from .reference import of_positions, parts_of, per_channel, reduced_dims, words_of_row
from .schemas import PARTS, WORDS, accumulate_dtype

batch_norm_stats = torch.ops.bagua_syncbn.batch_norm_stats.default
batch_norm_gather_stats = torch.ops.bagua_syncbn.batch_norm_gather_stats.default
batch_norm_elemt = torch.ops.bagua_syncbn.batch_norm_elemt.default
batch_norm_backward_reduce = torch.ops.bagua_syncbn.batch_norm_backward_reduce.default
batch_norm_backward_elemt = torch.ops.bagua_syncbn.batch_norm_backward_elemt.default
batch_norm_backward_elemt_ = torch.ops.bagua_syncbn.batch_norm_backward_elemt_.default
batch_norm_act_elemt = torch.ops.bagua_syncbn.batch_norm_act_elemt.default
batch_norm_act_backward_reduce = torch.ops.bagua_syncbn.batch_norm_act_backward_reduce.default
batch_norm_act_backward_elemt = torch.ops.bagua_syncbn.batch_norm_act_backward_elemt.default
batch_norm_masked_stats = torch.ops.bagua_syncbn.batch_norm_masked_stats.default
batch_norm_masked_elemt = torch.ops.bagua_syncbn.batch_norm_masked_elemt.default
batch_norm_masked_backward_reduce = torch.ops.bagua_syncbn.batch_norm_masked_backward_reduce.default
batch_norm_masked_backward_elemt = torch.ops.bagua_syncbn.batch_norm_masked_backward_elemt.default

__all__ = [
    "EPS_MODES",
    "IDENTITY",
    "KERNELS",
    "PARTS",
    "WORDS",
    "Activation",
    "Kept",
    "Masking",
    "MergeOptions",
    "MergedStats",
    "accumulate_dtype",
    "activation_of",
    "activation_recorded_by",
    "batch_norm_act_backward_elemt",
    "batch_norm_act_backward_reduce",
    "batch_norm_act_elemt",
    "batch_norm_backward_elemt",
    "batch_norm_backward_elemt_",
    "batch_norm_backward_reduce",
    "batch_norm_elemt",
    "batch_norm_gather_stats",
    "batch_norm_masked_backward_elemt",
    "batch_norm_masked_backward_reduce",
    "batch_norm_masked_elemt",
    "batch_norm_masked_stats",
    "batch_norm_stats",
    "beat_torch",
    "clear_clamped",
    "cuda_problem",
    "laid_out_as",
    "merge_stats",
    "of_positions",
    "outrun_memory",
    "parts_of",
    "per_channel",
    "reduced_dims",
    "reference",
    "words_of_row",
]
