"""How the step is differentiated.

=====================  ================================================================================================
``step``               the step and its gradient: what runs in training, and what torch.compile traces
``differentiable``     the same step in parts that can be differentiated any number of times and in both directions
``checkpointing``      which call activation checkpointing repeats, and what that call gathered
``replicas``           the step among replicas in one process
``torch_private``      what the files above use of torch that torch does not document
=====================  ================================================================================================
"""

from .checkpointing import Repeatable, is_repetition
from .differentiable import differentiable_batch_norm
from .replicas import replicated_batch_norm
from .step import synchronized_batch_norm
from .torch_private import is_transforming, unseen_by_selective_checkpointing

__all__ = [
    "Repeatable",
    "differentiable_batch_norm",
    "is_repetition",
    "is_transforming",
    "replicated_batch_norm",
    "synchronized_batch_norm",
    "unseen_by_selective_checkpointing",
]
