"""Activation checkpointing: a layer knows when backward repeats its forward, and which call is repeated.

A repetition must not communicate, because other ranks need not repeat theirs, and must not count its batch again.
Repetitions are never inferred from numbers: the checkpoint tells. Each region that a checkpoint may repeat is a
:class:`Repeatable`, entered around the first run and around every repetition. In a repetition the n-th call of a layer
is its n-th call in the first run: the same options, masks, mode and statistics, whatever the layer has by now. The
checkpoint holds the region, so that the region lives as long as the graph.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .. import ops
from ..checks import check_tensors, named
from ..conversion.hooks import own_forward_contexts
from ..conversion.own_forward import restored_counter
from ..step.call import Call, Hooks, set_hook, this_thread
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals.autograd import unseen_by_selective_checkpointing
from ..torch_internals.checkpoints import (
    has_known_checkpoints,
    is_in_backward,
    observe_checkpoints,
    raise_if_under_unknown_checkpoint,
)

_Result = TypeVar("_Result")


class Repeatable:
    """A part of a forward pass that is run, and then repeated in backward.

    Enter the region around the first run and around each repetition. In the first run layers work as usual. In a
    repetition each call of a layer uses the statistics, options and masks of its call in the first run: the call does
    not communicate and changes no buffer. Regions may be nested, and entered in several threads.

    ``torch.utils.checkpoint`` is recognized and needs no Repeatable. Code that repeats forward passes by its own means
    makes one object for each pass; without one, a repetition is a forward like any other.

    Calling the object with a function returns the function wrapped to run within the region.

    Raises:
        RuntimeError: the region is entered for another first run, that is, again outside of a backward pass while
            gradients are disabled, or were enabled the first time.

    Example::

        >>> deepspeed.checkpointing.checkpoint(bagua_syncbn.Repeatable()(block), input)
    """

    def __init__(self) -> None:
        self._calls: _Calls = {}
        self._inner: WeakSet[Repeatable] = WeakSet()  # regions whose first run was within this one's
        self._first_runs = 0
        self._had_grad = False
        self.trained_replicas = False  # whether replicas ran in training, in threads that know no region

    def __enter__(self) -> Repeatable:
        is_first = not self._first_runs or (bool(self._calls) and self._is_first_run())
        # In evaluation, where nothing is gathered, a region may have several first runs, and no repetition then.
        gathered = any(call is not None and call.training for call in chain(*self._calls.values()))
        if gathered if is_first else self._first_runs > 1:
            raise RuntimeError(
                "Repeatable: expected a repetition, in a backward pass or with gradients after a first run without, "
                "got another first run; make one object for each forward pass"
            )
        if is_first:
            self._first_runs += 1
            self._calls, self._had_grad = {}, torch.is_grad_enabled()
            for around in _local.around_a_call()[1]:
                around.region._inner.add(self)
        _local.runs.append(_Run(self, not is_first))
        _note_runs()
        return self

    def _is_first_run(self) -> bool:
        """Whether a later entry is another first run. Repetitions run in backward, or with gradients newly enabled."""
        return not is_in_backward() and (self._had_grad or not torch.is_grad_enabled())

    def __exit__(self, *_: Any) -> None:
        _local.runs.pop()
        _note_runs()

    def __call__(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        def run(*args: Any, **kwargs: Any) -> _Result:
            with self:
                return function(*args, **kwargs)

        return run


class _Made(NamedTuple):
    """A call in the first run."""

    prepared: Any  # a Normalization, or what stands for one where F.batch_norm computes
    training: bool
    tracks: bool  # whether it had running statistics


# Calls of each layer in the first run, in their order; None for a call that was refused.
_Calls = dict["nn.Module | None", "list[_Made | None]"]


class _Run:
    """One run of a region in this thread, the first one or a repetition."""

    def __init__(self, region: Repeatable, repeats: bool) -> None:
        self.region, self.calls, self.repeats = region, region._calls, repeats
        self._repeated: Counter[nn.Module | None] = Counter()
        self._entered: set[Repeatable] = set()
        # Repetitions around this one whose first runs recorded the calls of its first run too: this repetition is the
        # first one within them, and so stands for that first run.
        self._around = [run for run in _local.runs if repeats and run.repeats and run._is_entered_by(region)]

    def _is_entered_by(self, region: Repeatable) -> bool:
        """Notes that ``region`` is entered. Returns whether it is in place of its first run, which was within."""
        is_first = region in self.region._inner and region not in self._entered
        self._entered.add(region)
        return is_first

    def recall(self, layer: nn.Module | None) -> _Made | None:
        """Returns the call that the next call of ``layer`` repeats."""
        found = []
        for run in (self, *self._around):
            calls, number = run.calls.get(layer, []), run._repeated[layer]
            if number == len(calls):
                raise RuntimeError(
                    "expected a repetition to call it no more often than the first run, which called it "
                    f"{number} time(s), got one call more"
                )
            run._repeated[layer] += 1
            found.append(calls[number])
        if any(made is not found[0] for made in found):
            raise RuntimeError("expected a repetition with the calls of the first run in their order, got another")
        return found[0]


class _Local(threading.local):
    def __init__(self) -> None:
        self.runs: list[_Run] = []  # that this thread is in, the innermost last

    def around_a_call(self) -> tuple[_Run | None, list[_Run]]:
        """Returns the innermost repetition, and the first runs inside of it, which record the calls of this thread."""
        first_runs: list[_Run] = []
        for run in reversed(self.runs):
            if run.repeats:
                return run, first_runs
            first_runs.append(run)
        return None, first_runs


_local = _Local()


def _note_runs() -> None:
    """Has calls of this thread be recorded or repeated, if it is in a run."""
    set_hook("prepare", _prepare_in_run if _local.runs or not has_known_checkpoints else None)
    ops.hold_buffers(is_repetition())


def _prepare_in_run(call: Call, make: Callable[[], Any]) -> Any:
    """Returns ``make()``, what ``call`` is normalized by; in a repetition, what the call was that it repeats.

    Raises:
        RuntimeError: the first run made fewer calls of the layer, or refused this one; or the checkpoints of this torch
            are not known.
    """
    layer, tracks = call.layer, call.buffers.running_mean is not None
    repetition, first_runs = _local.around_a_call()
    made = None
    try:
        raise_if_under_unknown_checkpoint()
        if repetition is not None:  # else it is checked where it is prepared
            made = repetition.recall(layer)
            check_tensors(call[:4], call.buffers, call.training, layer)
        # fairscale's checkpoint_wrapper leaves this attribute: it disables tracking in the first of its two passes.
        if made is not None and tracks and not made.tracks and hasattr(layer, "_track_running_stats_backup"):
            raise RuntimeError(
                "Repeatable: expected none within fairscale's checkpoint_wrapper, which has the second of its passes "
                "move running statistics, where a repetition moves none"
            )
    except (TypeError, ValueError, RuntimeError) as error:
        raise named(error, layer) from None
    try:
        with unseen_by_selective_checkpointing():  # a repetition gathers nothing
            prepared = make() if made is None else made.prepared.for_recompute()
        if repetition is not None and made is None:
            raise named(RuntimeError("expected a repetition to be refused as the first run was"), layer)
        made = made or _Made(prepared, call.training, tracks)
    finally:
        for run in first_runs:
            run.calls.setdefault(layer, []).append(made)
    return prepared


def refuse_to_recompute_replicas(name: str, in_training: bool) -> None:
    """Raises RuntimeError if a checkpoint recomputes replicas, whose threads would update running statistics again.

    Call it in the thread that starts the replicas. ``name`` is that of a layer in the model.
    """
    repetition, first_runs = _local.around_a_call()
    if repetition is not None and (in_training or repetition.region.trained_replicas):
        raise RuntimeError(
            f"{name}: activation checkpointing cannot recompute replicas, which would update the running statistics "
            "again; checkpoint parts of the model without synchronized layers, or use one process for each device"
        )
    for run in first_runs:
        run.region.trained_replicas |= in_training


def is_repetition() -> bool:
    """Whether this thread repeats an earlier run. False while torch.compile traces, which plans repetitions itself."""
    return not torch.compiler.is_compiling() and any(run.repeats for run in _local.runs)


@own_forward_contexts.register
def _counter_in_recomputation(layer: SyncBatchNorm) -> AbstractContextManager[None] | None:
    """Restores the counter of a layer whose own forward counts the batch again when it is recomputed."""
    counter = getattr(layer, "num_batches_tracked", None)
    return restored_counter(counter) if isinstance(counter, Tensor) and is_repetition() else None


class _CheckpointRegion(Repeatable):
    """Region of one pass in torch's checkpoint, which enters it again whenever backward needs unsaved tensors."""

    def _is_first_run(self) -> bool:
        return False


# At import, not when the first layer is made: sync_batch_norm needs no layer, and its first call may be in a
# checkpoint that has begun.
observe_checkpoints(_CheckpointRegion)
if not has_known_checkpoints:  # each call looks whether it is under one
    type(this_thread).hooks = Hooks(_prepare_in_run)
