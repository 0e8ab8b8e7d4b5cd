"""How the step is differentiated. Read ``function`` first; all that goes between ranks is in :mod:`bagua_syncbn.sync`.

The first line of each file says what it is for.
"""

from .call import Call, follow
from .checkpointing import Repeatable, as_in_first_run, is_plain, is_repetition
from .function import cached_batch_norm, evaluated_batch_norm, synchronized_batch_norm
from .outputs import Recomputed, this_thread
from .replicas import replicated_batch_norm

__all__ = [
    "Call",
    "Recomputed",
    "Repeatable",
    "as_in_first_run",
    "cached_batch_norm",
    "evaluated_batch_norm",
    "follow",
    "is_plain",
    "is_repetition",
    "replicated_batch_norm",
    "synchronized_batch_norm",
    "this_thread",
]
