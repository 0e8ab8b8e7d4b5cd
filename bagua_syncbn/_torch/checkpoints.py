"""Extends both forms of torch.utils.checkpoint: reentrant and non-reentrant."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint


def observe_checkpoints(region: Callable[[], Any]) -> None:
    """Makes both forms of torch.utils.checkpoint run functions inside a region, created by ``region()``.

    Each checkpoint keeps one region for the first run and all repetitions. Raises ImportError in versions of torch that
    lack the functions to extend.
    """
    try:
        hook, forward = checkpoint._checkpoint_hook, checkpoint.CheckpointFunction.forward
    except AttributeError as error:
        raise ImportError(
            f"bagua_syncbn does not support torch {torch.__version__}: {error}; update bagua_syncbn, or install torch "
            "2.10 to 2.14"
        ) from None

    class ObservedHook(hook):
        """Context manager around the first run with use_reentrant=False.

        torch creates it in its ``with`` statement, and nothing else refers to it, so the region ends when this object
        is freed. An ``__exit__`` here could be interrupted by Ctrl-C before torch's, and torch's hooks would remain.
        """

        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            new = region()
            frame.recompute_fn = new(frame.recompute_fn)
            new.begin(self)

    def observed_forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Runs the function with use_reentrant=True; backward calls the same wrapped function."""
        return forward(ctx, region()(run_function), preserve_rng_state, *args)

    checkpoint._checkpoint_hook = ObservedHook
    checkpoint.CheckpointFunction.forward = staticmethod(observed_forward)  # pyrefly: ignore[method-assign]


def is_in_backward() -> bool:
    """Returns whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
