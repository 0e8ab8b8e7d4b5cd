"""The package's thread-local state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._step.call import Call


class _Thread(threading.local):
    prepare: Callable[[Call, Callable[[], Any]], Any] | None = None
    """Hook of activation checkpointing: called with a call and a function that prepares it. Returns the function's
    result, or in a recomputation the result of the first run."""

    see_output: Callable[..., None] | None = None
    """Hook of recomputed outputs: called with output, input, weight, bias, residual and normalization of each call."""

    holds_buffers = False
    """True while this thread recomputes a forward, whose first run already updated the buffers."""

    @property
    def has_hooks(self) -> bool:
        return self.prepare is not None or self.see_output is not None


this_thread = _Thread()
