"""Hooks of calls, for the current thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Hooks(threading.local):
    prepare: Any = None
    """Hook of activation checkpointing: called with a call and a function that prepares it. Returns the function's
    result, or in a recomputation the result of the first run. Its ``is_over()`` returns whether the checkpoint has
    ended; the next call then removes it."""

    see_output: Callable[..., None] | None = None
    """Hook of recomputed outputs: called with output, input, weight, bias, residual and normalization of each call."""

    @property
    def are_set(self) -> bool:
        return self.prepare is not None or self.see_output is not None

    @property
    def in_checkpoint(self) -> bool:
        return self.prepare is not None and not self.prepare.is_over()


hooks = _Hooks()
