"""The step of a call, and other ways through it. Read ``function`` first; :mod:`bagua_syncbn.sync` has the messages."""

from .call import Call, follow
from .checkpointing import Repeatable, call_in_first_run, is_repetition
from .function import synchronized_batch_norm
from .recomputation import Recomputed, this_thread
from .replicas import replicated_batch_norm

__all__ = [
    "Call",
    "Recomputed",
    "Repeatable",
    "call_in_first_run",
    "follow",
    "is_repetition",
    "replicated_batch_norm",
    "synchronized_batch_norm",
    "this_thread",
]
