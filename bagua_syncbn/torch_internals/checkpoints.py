"""Both forms of torch.utils.checkpoint, reentrant or not."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint


def _begins_with(cls: str, method: str, *names: str) -> bool:
    """Returns whether the parameters of ``method`` in torch's class ``cls`` begin with ``names``."""
    function = getattr(getattr(checkpoint, cls, None), method, None)
    return function is not None and tuple(inspect.signature(function).parameters)[: len(names)] == names


# Whether torch.utils.checkpoint has the structure of torch 2.10 to 2.14, which this module relies on.
has_known_checkpoints = (
    _begins_with("_checkpoint_hook", "__init__", "self", "frame")
    and _begins_with("_CheckpointFrame", "__init__", "self", "recompute_fn")
    and _begins_with("CheckpointFunction", "forward", "ctx", "run_function", "preserve_rng_state")
)


def observe_checkpoints(region: Callable[[], Any]) -> None:
    """Makes both forms of torch.utils.checkpoint run functions inside a region, created by ``region()``.

    Each checkpoint keeps one region for the first run and all repetitions.
    """
    if not has_known_checkpoints:
        return

    class ObservedHook(checkpoint._checkpoint_hook):
        """Context manager around the first run with use_reentrant=False."""

        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            self.region = region()
            repeat = frame.recompute_fn
            frame.recompute_fn = self.region(repeat)

        def __enter__(self) -> None:
            super().__enter__()
            self.region.__enter__()

        def __exit__(self, *args: object) -> None:
            self.region.__exit__(*args)
            super().__exit__(*args)

    forward = checkpoint.CheckpointFunction.forward

    def observed_forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Runs the function with use_reentrant=True; backward calls the same wrapped function."""
        return forward(ctx, region()(run_function), preserve_rng_state, *args)

    checkpoint._checkpoint_hook = ObservedHook  # type: ignore[misc]
    checkpoint.CheckpointFunction.forward = staticmethod(observed_forward)  # type: ignore[method-assign]


def raise_if_under_unknown_checkpoint() -> None:
    """Raises RuntimeError inside a torch.utils.checkpoint that :func:`observe_checkpoints` does not support."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals is vars(checkpoint):
            raise RuntimeError(
                f"torch.utils.checkpoint of torch {torch.__version__} is unknown (expected torch 2.10 to 2.14); update "
                "bagua_syncbn, or do not checkpoint synchronized layers"
            )


def is_in_backward() -> bool:
    """Returns whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
