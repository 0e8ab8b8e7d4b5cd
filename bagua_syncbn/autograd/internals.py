"""What torch knows of itself and does not document: in one place, and missing where a torch has it not."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch, checkpoint

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_has_transforms: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_dispatch_modes: Callable[[], list[Any]] = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list)
_selective_modes = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
_seen = nullcontext()


def is_in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread. Never while torch.compile traces."""
    return not torch.compiler.is_compiling() and _graph_task() != -1


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
