"""Activation checkpointing: repeated calls reuse the statistics of the first run.

A repetition must not communicate, because peers may not repeat the call, and must not count the batch twice.
Repetitions are never inferred: each repeatable part of a forward is a :class:`Repeatable`, entered around the first run
and around each repetition. The checkpoint references this object, which lives as long as the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn

from .. import _ops as ops
from .._errors import restored
from .._step.call import Call
from .._step.checks import named
from .._step.hooks import hooks
from .._torch.autograd import unseen_by_selective_checkpointing
from .._torch.checkpoints import is_in_backward, observe_checkpoints

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
        RuntimeError: the object is reused for another forward pass. A later run is a repetition only if it is in a
            backward pass, or enables gradients that the first run disabled. Also raised if a repetition of an outer
            region enters the inner object of its first run: create inner objects inside the outer region.

    Example::

        >>> deepspeed.checkpointing.checkpoint(bagua_syncbn.Repeatable()(block), input)
    """

    _outer: tuple[ref[Repeatable], ...] | None = None
    """Regions whose first run contains the first run of this region; None before that."""
    _repeats_anywhere = False
    """True if every run after the first is a repetition, even outside of backward."""
    _calls: dict[nn.Module | None, list[Any]]
    """Results of each layer's calls in the first run, in order: a Normalization, or the raised error."""

    def __enter__(self) -> Repeatable:
        before = _current_run()
        try:
            self._begin()
            return self
        except BaseException:  # also Ctrl-C
            _set_run(before)
            raise

    def __exit__(self, *_: Any) -> None:
        run: Any = hooks.prepare
        while run is not None and run.owner() is not self:  # Ctrl-C may have interrupted the end of an inner region
            run = run.outer
        if run is not None:
            _set_run(run.outer)

    def __call__(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        def run(*args: Any, **kwargs: Any) -> _Result:
            with restored(partial(_set_run, _current_run())):
                self._begin()
                return function(*args, **kwargs)

        return run

    def _begin(self, owner: Any = None) -> None:
        """Begins a run of the region in this thread, which ends with the life of ``owner`` (default: the region)."""
        outer, owned_by = _current_run(), ref(self if owner is None else owner)
        this: ref[Repeatable] = ref(self)
        repeated, recording = (None, ()) if outer is None else (outer.repeated, outer.recording)
        if self._outer is None:
            self._outer, self._calls, self._had_grad = recording, {}, torch.is_grad_enabled()
            counts = Counter() if outer is None else outer.counts
            _set_run(_Run(outer, owned_by, repeated, (*recording, this), counts))
            return
        without_first_grad = torch.is_grad_enabled() and not self._had_grad
        may_repeat = self._repeats_anywhere or is_in_backward() or without_first_grad
        if not may_repeat or repeated in self._outer:
            raise RuntimeError(
                "Repeatable: already used by another forward pass; create an object for each forward pass, inside the "
                "regions that repeat it"
            )
        _set_run(_Run(outer, owned_by, this))


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A run of regions in this thread. Installed as the thread's ``prepare`` hook, it records or repeats each call."""

    outer: _Run | None
    owner: ref[Any]
    """An object that is freed when the run ends, even if Ctrl-C interrupts the end. Weak: a run keeps nothing alive."""
    repeated: ref[Repeatable] | None = None
    """Innermost region that this run repeats."""
    recording: tuple[ref[Repeatable], ...] = ()
    """Regions in their first run, outermost first. They are inside ``repeated``."""
    counts: Counter[nn.Module | None] = field(default_factory=Counter)
    """Number of repeated calls of each layer."""
    in_backward: bool = field(default_factory=is_in_backward)

    def is_over(self) -> bool:
        return self.owner() is None or (self.in_backward and not is_in_backward())

    def __call__(self, call: Call, make: Callable[[], Any]) -> Any:
        """Returns ``make()``, the normalization of ``call``; in a repetition, the normalization of the first run.

        Raises:
            RuntimeError: the first run made fewer calls of the layer.
        """
        if self.is_over():
            run = _current_run()
            _set_run(run)
            return make() if run is None else run(call, make)
        layer, made = call.layer, None
        repeated = None if self.repeated is None else self.repeated()
        with unseen_by_selective_checkpointing():  # a repetition does not gather
            if repeated is not None:
                calls, number = repeated._calls.get(layer, []), self.counts[layer]
                if number == len(calls):
                    _set_run(self.outer)  # Ctrl-C may have interrupted the end of the region
                    text = (
                        f"recomputation calls the layer more often than the first run, which made {number} call(s); a "
                        "checkpointed function must make the same calls each time; if Ctrl-C interrupted the end of a "
                        "Repeatable, repeat the step"
                    )
                    raise named(RuntimeError(text), layer)
                self.counts[layer] += 1
                made = calls[number]
            else:
                try:
                    made = make()
                except Exception as error:
                    made = error
            for region in filter(None, (each() for each in self.recording)):
                region._calls.setdefault(layer, []).append(made)
            if isinstance(made, Exception):
                raise made
            return made if repeated is None else made.for_repetition()


def _current_run() -> _Run | None:
    """Returns this thread's innermost run that is not over."""
    run: _Run | None = hooks.prepare
    while run is not None and run.is_over():
        run = run.outer
    return run


def _set_run(run: _Run | None) -> None:
    ops.this_thread.is_repeating = run is not None and run.repeated is not None
    hooks.prepare = run  # last, because the next call completes the removal of a run that is over


class _CheckpointRegion(Repeatable):
    """Region of a torch.utils.checkpoint, which repeats it whenever unsaved tensors are needed."""

    _repeats_anywhere = True
    begin = Repeatable._begin


# At import, not at the first layer: sync_batch_norm needs no layer, and the first call may be inside a checkpoint.
observe_checkpoints(_CheckpointRegion)
