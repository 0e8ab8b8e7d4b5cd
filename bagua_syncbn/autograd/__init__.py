"""How the step is differentiated.

=====================  ================================================================================================
``step``               the step and its gradient: what runs in training, and what torch.compile traces
``fused``              the same with an activation, and what is added before it
``epilogue``           what these are
``differentiable``     the same step in parts that can be differentiated any number of times and in both directions
``checkpointing``      which call activation checkpointing repeats, and what that call gathered
``exchange``           what goes between ranks, and that no two sizes meet
``conversation``       what was said in a group, from which each rank knows what its peers expect
``agreement``          what a rank sends in place of the expected message: a question, an error
``identity``           who speaks in a message, and of what
``faults``             what the ops found wrong, where no host waits for them
``outputs``            outputs of layers that are not stored for backward but made anew
``replicas``           the step among replicas in one process
``torch_private``      what the files above use of torch that torch does not document
=====================  ================================================================================================
"""

from .agreement import tell_peers
from .checkpointing import Repeatable, as_in_first_run, is_plain, is_repetition
from .differentiable import differentiable_batch_norm
from .epilogue import Epilogue
from .exchange import Line, exchange_of, line_of
from .faults import check
from .fused import fused_evaluation
from .outputs import recompute_outputs, this_thread
from .replicas import replicated_batch_norm
from .step import plain_batch_norm, synchronized_batch_norm
from .torch_private import (
    guard_of,
    is_capturing,
    is_exporting,
    is_transforming,
    unseen_by_selective_checkpointing,
    unwrapped,
)

__all__ = [
    "Epilogue",
    "Line",
    "Repeatable",
    "as_in_first_run",
    "check",
    "differentiable_batch_norm",
    "exchange_of",
    "fused_evaluation",
    "guard_of",
    "is_capturing",
    "is_exporting",
    "is_plain",
    "is_repetition",
    "is_transforming",
    "line_of",
    "plain_batch_norm",
    "recompute_outputs",
    "replicated_batch_norm",
    "synchronized_batch_norm",
    "tell_peers",
    "this_thread",
    "unseen_by_selective_checkpointing",
    "unwrapped",
]
