"""What torch knows of itself and does not document: in one place, and missing where a torch has it not."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch, checkpoint

# The number of the backward pass that autograd runs in this thread.
NO_GRAPH_TASK = -1
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: NO_GRAPH_TASK)

_has_transforms: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_dispatch_modes: Callable[[], list[Any]] = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list)
_selective_modes = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
_seen = nullcontext()

# The number of the next node that autograd makes in this thread. Without torch's, they only tell what is newer.
_has_numbers = hasattr(torch._C._autograd, "_get_sequence_nr") and hasattr(torch._C, "_current_autograd_node")
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr if _has_numbers else count().__next__


def is_in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread. Never while torch.compile traces."""
    return not torch.compiler.is_compiling() and graph_task() != NO_GRAPH_TASK


def running_node_number() -> int:
    """The number that the node that autograd runs in this thread got where it was made; past all if it is not known."""
    node = torch._C._current_autograd_node() if _has_numbers else None
    return sys.maxsize if node is None else node._sequence_nr()


def is_capturing() -> bool:
    """Whether the work of this thread's current stream goes to a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_transforming() -> bool:
    """Whether a transform of :mod:`torch.func` or forward-mode differentiation is at work.

    Never while torch.compile traces: that traces the step that runs in training.
    """
    if torch.compiler.is_compiling():
        return False
    return _has_transforms() or getattr(forward_ad, "_current_level", -1) >= 0


def unseen_by_selective_checkpointing() -> AbstractContextManager[Any]:
    """What runs in it is not seen by selective checkpointing, which expects a repetition to repeat all that it saw."""
    if torch.compiler.is_compiling():
        return _seen
    for mode in _dispatch_modes():
        if isinstance(mode, _selective_modes):
            return torch._C._DisableTorchDispatch()
    return _seen
