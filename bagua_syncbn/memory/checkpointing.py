"""Activation checkpointing: repeated calls reuse the statistics of the first run.

A repetition must not communicate, because peers may not repeat the call, and must not count the batch twice.
Repetitions are never inferred: each repeatable part of a forward is a :class:`Repeatable`, entered around the first run
and around each repetition. The checkpoint references this object, which lives as long as the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import ops
from ..checks import named
from ..conversion.hooks import own_forward_contexts
from ..conversion.own_forward import restored_counter
from ..step.call import Call
from ..sync_batchnorm import SyncBatchNorm
from ..threads import this_thread
from ..torch_internals.autograd import unseen_by_selective_checkpointing
from ..torch_internals.checkpoints import (
    has_known_checkpoints,
    is_in_backward,
    observe_checkpoints,
    raise_if_under_unknown_checkpoint,
)

_Result = TypeVar("_Result")


class Repeatable:
    """A part of a forward pass that backward repeats.

    Enter the region around the first run and around each repetition. In a repetition, a layer's n-th call uses the
    statistics, options, masks and mode of its n-th call in the first run; it does not communicate or change buffers.
    A repetition may run in a different thread. Regions may be nested if the inner one is created inside the outer one.

    ``torch.utils.checkpoint`` is recognized and needs no Repeatable. Code with custom recomputation creates an
    object for each pass; a repetition outside of a region is treated as a new forward pass.

    Calling the object with a function returns the function wrapped to run inside the region.

    Raises:
        RuntimeError: the region is entered for a second first run (outside of a backward pass while gradients are
            disabled, or were enabled the first time), or is repeated inside a repetition of an outer region that
            contains its first run.

    Example::

        >>> deepspeed.checkpointing.checkpoint(bagua_syncbn.Repeatable()(block), input)
    """

    trained_replicas = False
    """Whether replicas trained in the region; they run in threads outside it."""

    def __init__(self) -> None:
        # Results of the calls in the first run, in order: a Normalization, a ByTorch, or the error that was raised.
        self._calls: dict[nn.Module | None, list[Any]] = {}
        self._outer: tuple[Repeatable, ...] | None = None  # enclosing first runs; None before the first run
        self._had_grad = False

    def __enter__(self) -> Repeatable:
        current = _current_run()
        if self._outer is None:
            self._outer, self._had_grad = current.recording, torch.is_grad_enabled()
            _set_run(_Run(current, current.repeated, (*current.recording, self), current.counts))
            return self
        if not self._may_repeat() or current.repeated in self._outer:
            raise RuntimeError(
                "Repeatable: second first run of a region; create an object for each forward pass, inside the "
                "regions that repeat it"
            )
        _set_run(_Run(current, self, (), Counter()))
        return self

    def _may_repeat(self) -> bool:
        """Returns whether this entry is a repetition: in backward, or with gradients after a first run without
        gradients."""
        return is_in_backward() or (torch.is_grad_enabled() and not self._had_grad)

    def __exit__(self, *_: Any) -> None:
        _set_run(_current_run().outer)

    def __call__(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        def run(*args: Any, **kwargs: Any) -> _Result:
            with self:
                return function(*args, **kwargs)

        return run


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A run of regions in this thread. Installed as the thread's ``prepare`` hook, it records or repeats each call."""

    outer: _Run | None = None
    repeated: Repeatable | None = None
    """Innermost region that this run repeats."""
    recording: tuple[Repeatable, ...] = ()
    """Regions inside ``repeated`` in a first run, outermost first."""
    counts: Counter[nn.Module | None] = field(default_factory=Counter)
    """Number of repeated calls of each layer."""

    def __call__(self, call: Call, make: Callable[[], Any]) -> Any:
        """Returns ``make()``, the normalization of ``call``; in a repetition, the normalization of the first run.

        Raises:
            RuntimeError: the first run made fewer calls of the layer, or this torch's checkpoints are not supported.
        """
        if not has_known_checkpoints:
            raise_if_under_unknown_checkpoint()
        with unseen_by_selective_checkpointing():  # a repetition does not gather
            if self.repeated is not None:
                made = self._recall(self.repeated, call.layer)
            else:
                # fairscale's checkpoint_wrapper sets this attribute when it disables tracking, in its first pass.
                tracked = getattr(call.layer, "_track_running_stats_backup", False)
                is_disabled = tracked and call.buffers.running_mean is None
                if is_disabled and any(type(region) is Repeatable for region in self.recording):
                    raise RuntimeError(
                        "Repeatable cannot be used inside fairscale's checkpoint_wrapper, which updates running "
                        "statistics while recomputing"
                    )
                try:
                    made = make()
                except Exception as error:
                    made = error
            for region in self.recording:
                region._calls.setdefault(call.layer, []).append(made)
            if isinstance(made, Exception):
                raise made
            return made if self.repeated is None else made.for_recompute()

    def _recall(self, region: Repeatable, layer: nn.Module | None) -> Any:
        calls, number = region._calls.get(layer, []), self.counts[layer]
        if number == len(calls):
            text = f"recomputation calls the layer more often than the first run, which made {number} call(s)"
            raise named(RuntimeError(text), layer)
        self.counts[layer] += 1
        return calls[number]


_OUTSIDE = _Run()


def _current_run() -> _Run:
    run: Any = this_thread.prepare
    return run or _OUTSIDE


def _set_run(run: _Run | None) -> None:
    repeated = _current_run().repeated
    this_thread.prepare = None if run is _OUTSIDE and has_known_checkpoints else run
    if repeated is not _current_run().repeated:
        ops.hold_buffers(is_repetition())


def refuse_to_recompute_replicas(name: str, in_training: bool) -> None:
    """Raises RuntimeError if a checkpoint recomputes replicas: the threads would update running statistics twice.

    Call it in the thread that starts the replicas. ``name`` is the name of a layer in the model.
    """
    run = _current_run()
    if run.repeated is not None and (in_training or run.repeated.trained_replicas):
        raise RuntimeError(
            f"{name}: activation checkpointing cannot recompute replicas, which would update the running statistics "
            "twice; checkpoint parts of the model that have no synchronized layers, or use a process per device"
        )
    for region in run.recording:
        region.trained_replicas |= in_training


def is_repetition() -> bool:
    """Returns whether this thread is repeating an earlier run. False during tracing, because torch.compile itself
    schedules recomputation."""
    return not torch.compiler.is_compiling() and _current_run().repeated is not None


@own_forward_contexts.register
def _counter_in_recomputation(layer: SyncBatchNorm) -> AbstractContextManager[None] | None:
    """Restores the counter of a layer if a custom forward counts the batch a second time in a recomputation."""
    counter = getattr(layer, "num_batches_tracked", None)
    return restored_counter(counter) if isinstance(counter, Tensor) and is_repetition() else None


class _CheckpointRegion(Repeatable):
    """Region of a torch.utils.checkpoint, which repeats it whenever backward needs unsaved tensors."""

    def _may_repeat(self) -> bool:
        return True


# At import, not at the first layer: sync_batch_norm needs no layer, and the first call may be inside a checkpoint.
observe_checkpoints(_CheckpointRegion)
if not has_known_checkpoints:  # each call checks for a checkpoint
    type(this_thread).prepare = _OUTSIDE
