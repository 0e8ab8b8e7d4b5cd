"""Autograd functions of the step. Read ``function`` first; messages between ranks are in :mod:`bagua_syncbn.sync`."""

from .checkpointing import Repeatable, call_in_first_run, is_in_region, is_plain, is_repetition
from .function import Call, cached_batch_norm, evaluated_batch_norm, follow, synchronized_batch_norm
from .outputs import Recomputed, this_thread
from .replicas import replicated_batch_norm

__all__ = [
    "Call",
    "Recomputed",
    "Repeatable",
    "cached_batch_norm",
    "call_in_first_run",
    "evaluated_batch_norm",
    "follow",
    "is_in_region",
    "is_plain",
    "is_repetition",
    "replicated_batch_norm",
    "synchronized_batch_norm",
    "this_thread",
]
