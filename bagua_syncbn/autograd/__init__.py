"""How the step is differentiated. Read ``step`` first; all that goes between ranks is in :mod:`bagua_syncbn.sync`.

The first line of each file says what it is for.
"""

from ..torch_internals import (
    guard_of,
    is_capturing,
    is_exporting,
    is_transforming,
    unseen_by_selective_checkpointing,
    unwrapped,
)
from .checkpointing import Repeatable, as_in_first_run, is_plain, is_repetition
from .epilogue import Epilogue
from .fused import fused_evaluation
from .outputs import Recomputed, this_thread
from .replicas import replicated_batch_norm
from .step import plain_batch_norm, synchronized_batch_norm

__all__ = [
    "Epilogue",
    "Recomputed",
    "Repeatable",
    "as_in_first_run",
    "fused_evaluation",
    "guard_of",
    "is_capturing",
    "is_exporting",
    "is_plain",
    "is_repetition",
    "is_transforming",
    "plain_batch_norm",
    "replicated_batch_norm",
    "synchronized_batch_norm",
    "this_thread",
    "unseen_by_selective_checkpointing",
    "unwrapped",
]
