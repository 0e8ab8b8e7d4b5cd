"""The ops in plain torch, for any device: the definitions that native kernels are tested against."""

from .backward_elemt import batch_norm_backward_elemt
from .backward_reduce import batch_norm_backward_reduce
from .elemt import batch_norm_elemt
from .gather_stats import batch_norm_gather_stats
from .stats import batch_norm_stats
