"""How the step is differentiated. Read ``step`` first, then ``exchange``, which has all that goes between ranks.

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
from .agreement import tell_peers
from .checkpointing import Repeatable, as_in_first_run, is_plain, is_repetition
from .epilogue import Epilogue
from .exchange import Line, line_of
from .faults import check, check_ranks
from .fused import fused_evaluation
from .identity import speaker_of
from .outputs import Recomputed, this_thread
from .replicas import replicated_batch_norm
from .step import plain_batch_norm, synchronized_batch_norm

__all__ = [
    "Epilogue",
    "Line",
    "Recomputed",
    "Repeatable",
    "as_in_first_run",
    "check",
    "check_ranks",
    "fused_evaluation",
    "guard_of",
    "is_capturing",
    "is_exporting",
    "is_plain",
    "is_repetition",
    "is_transforming",
    "line_of",
    "plain_batch_norm",
    "replicated_batch_norm",
    "speaker_of",
    "synchronized_batch_norm",
    "tell_peers",
    "this_thread",
    "unseen_by_selective_checkpointing",
    "unwrapped",
]
