"""Activation checkpointing: repeated calls reuse the statistics of the first run.

A repetition must not communicate, because peers may not repeat their calls, and must not count its batch again. It is
never inferred: each part of a forward that may be repeated is a :class:`Repeatable`, entered around the first run and
around each repetition. The checkpoint holds this object, which lives as long as the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import ops
from ..checks import check_tensors, named
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
    """A part of one forward pass that backward repeats.

    Enter the region around the first run and around each repetition. In a repetition, a layer's n-th call uses the
    statistics, options, masks and mode of its n-th call in the first run; it sends nothing and changes no buffer.
    Regions may be nested if the inner one is created inside the outer one, and entered in several threads.

    ``torch.utils.checkpoint`` is recognized and needs no Repeatable. Code that repeats forward passes itself creates an
    object for each pass; a repetition outside of a region counts as a new forward pass.

    Calling the object with a function returns the function wrapped to run inside the region.

    Raises:
        RuntimeError: the region is entered for a second first run, that is, outside of a backward pass while gradients
            are disabled, or were enabled the first time; or it is repeated inside a repetition of an outer region that
            contains its first run.

    Example::

        >>> deepspeed.checkpointing.checkpoint(bagua_syncbn.Repeatable()(block), input)
    """

    trained_replicas = False
    """Whether replicas were trained in the region, in threads that are not in it."""

    def __init__(self) -> None:
        self._calls: dict[nn.Module | None, list[_Made | Exception]] = {}  # of the first run, in order
        self._outer: tuple[Repeatable, ...] | None = None  # in their first run too; None before the first run
        self._had_grad = False

    def __enter__(self) -> Repeatable:
        current = _current_run()
        if self._outer is None:
            self._outer, self._had_grad = current.recording, torch.is_grad_enabled()
            _set_run(_Run(current, current.repeated, (*current.recording, self), current.counts))
            return self
        if not self._may_repeat() or current.repeated in self._outer:
            raise RuntimeError(
                "Repeatable: this region already had its first run; create an object for each forward pass, inside the "
                "regions that repeat it"
            )
        _set_run(_Run(current, self, (), Counter()))
        return self

    def _may_repeat(self) -> bool:
        """Whether this entry is a repetition: in backward, or with gradients after a first run without gradients."""
        return is_in_backward() or (torch.is_grad_enabled() and not self._had_grad)

    def __exit__(self, *_: Any) -> None:
        _set_run(_current_run().outer)

    def __call__(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        def run(*args: Any, **kwargs: Any) -> _Result:
            with self:
                return function(*args, **kwargs)

        return run


class _Made(NamedTuple):
    """A call in the first run."""

    prepared: Any  # a Normalization or a ByTorch
    tracks: bool  # whether the call had running statistics


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A run of regions in this thread. As the thread's ``prepare`` hook, it records or repeats each call."""

    outer: _Run | None = None
    repeated: Repeatable | None = None
    """Innermost region that this run repeats."""
    recording: tuple[Repeatable, ...] = ()
    """Regions inside of it that are in their first run."""
    counts: Counter[nn.Module | None] = field(default_factory=Counter)
    """Number of repeated calls of each layer."""

    def __call__(self, call: Call, make: Callable[[], Any]) -> Any:
        """Returns ``make()``, the normalization of ``call``; in a repetition, that of the first run.

        Raises:
            RuntimeError: the first run made fewer calls of the layer, or the checkpoints of this torch are unknown.
        """
        try:
            raise_if_under_unknown_checkpoint()
            made = None if self.repeated is None else self._recall(self.repeated, call)
        except (TypeError, ValueError, RuntimeError) as error:
            raise named(error, call.layer) from None
        with unseen_by_selective_checkpointing():  # a repetition gathers nothing
            if made is None:
                try:
                    prepared = make()
                    made = _Made(prepared, call.buffers.running_mean is not None)
                except Exception as error:
                    made = error
            elif isinstance(made, _Made):
                prepared = made.prepared.for_recompute()
        for region in self.recording:
            region._calls.setdefault(call.layer, []).append(made)
        if isinstance(made, Exception):
            raise made
        return prepared

    def _recall(self, region: Repeatable, call: Call) -> _Made | Exception:
        """Returns the record of the call that ``call`` repeats."""
        calls, number = region._calls.get(call.layer, []), self.counts[call.layer]
        if number == len(calls):
            raise RuntimeError(
                f"recomputation calls the layer more often than the first run, which made {number} call(s)"
            )
        self.counts[call.layer] += 1
        check_tensors(call[:4], call.buffers, call.training, call.layer)
        made = calls[number]
        # fairscale's checkpoint_wrapper leaves this attribute: it disables tracking in the first of its two passes.
        is_fairscales = call.buffers.running_mean is not None and hasattr(call.layer, "_track_running_stats_backup")
        if is_fairscales and isinstance(made, _Made) and not made.tracks:
            raise RuntimeError(
                "Repeatable cannot be used inside fairscale's checkpoint_wrapper, which updates running statistics "
                "while recomputing"
            )
        return made


_OUTSIDE = _Run()


def _current_run() -> _Run:
    run: Any = this_thread.prepare
    return run or _OUTSIDE


def _set_run(run: _Run | None) -> None:
    this_thread.prepare = None if run is _OUTSIDE and has_known_checkpoints else run
    ops.hold_buffers(is_repetition())


def refuse_to_recompute_replicas(name: str, in_training: bool) -> None:
    """Raises RuntimeError if a checkpoint recomputes replicas, whose threads would update running statistics again.

    Call it in the thread that starts the replicas. ``name`` is that of a layer in the model.
    """
    run = _current_run()
    if run.repeated is not None and (in_training or run.repeated.trained_replicas):
        raise RuntimeError(
            f"{name}: activation checkpointing cannot recompute replicas, which would update the running statistics "
            "again; checkpoint parts of the model without synchronized layers, or use one process for each device"
        )
    for region in run.recording:
        region.trained_replicas |= in_training


def is_repetition() -> bool:
    """Whether this thread repeats an earlier run. False while torch.compile traces, which plans repetitions itself."""
    return not torch.compiler.is_compiling() and _current_run().repeated is not None


@own_forward_contexts.register
def _counter_in_recomputation(layer: SyncBatchNorm) -> AbstractContextManager[None] | None:
    """Restores the counter of a layer whose own forward counts the batch again when it is recomputed."""
    counter = getattr(layer, "num_batches_tracked", None)
    return restored_counter(counter) if isinstance(counter, Tensor) and is_repetition() else None


class _CheckpointRegion(Repeatable):
    """Region of one pass in torch's checkpoint, which enters it again whenever backward needs unsaved tensors."""

    def _may_repeat(self) -> bool:
        return True


# At import, not when the first layer is made: sync_batch_norm needs no layer, and its first call may be in a
# checkpoint that has begun.
observe_checkpoints(_CheckpointRegion)
if not has_known_checkpoints:  # each call checks whether it is under one
    type(this_thread).prepare = _OUTSIDE
