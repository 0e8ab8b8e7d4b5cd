"""Activation checkpointing: a layer knows when backward repeats its forward, and which call is repeated.

A repetition must not communicate, because other ranks need not repeat theirs, and must not count its batch again.
Repetitions are never inferred from numbers: the checkpoint tells. Each region that a checkpoint may repeat is a
:class:`Repeatable`, entered around the first run and around every repetition. In a repetition the n-th call of a layer
uses the statistics that its n-th call in the first run gathered. The checkpoint holds the region, so that the region
lives as long as the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ..sync import name_of
from ..torch_internals import is_in_backward, is_untouched, observe_checkpoints, raise_if_under_unknown_checkpoint
from .outputs import this_thread

_Result = TypeVar("_Result")


class Repeatable:
    """A part of a forward pass that is run, and then repeated in backward.

    Enter the region around the first run and around each repetition. In the first run layers work as usual. In a
    repetition each call of a layer uses the statistics that its call in the first run gathered: the call does not
    communicate and changes no buffer. Regions may be nested, and entered in several threads.

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
        self._gathered: _Gathered | None = None
        self._depth = 0
        self._choices: _Choices = {}
        self._had_grad = False

    def __enter__(self) -> Repeatable:
        repeats = self._gathered is not None
        if self._gathered is None:
            self._gathered, self._depth = {}, this_thread.depth
            self._had_grad = torch.is_grad_enabled()
        elif (self._gathered or self._choices) and self._is_first_run():
            raise RuntimeError(
                "Repeatable: expected a repetition, in a backward pass or with gradients after a first run without, "
                "got another first run; make one object for each forward pass"
            )
        this_thread.runs.append(_Run(self._gathered, self._choices, repeats))
        this_thread.depth = self._depth
        return self

    def _is_first_run(self) -> bool:
        """Whether a later entry is another first run. Repetitions run in backward, or with gradients newly enabled."""
        return not is_in_backward() and (self._had_grad or not torch.is_grad_enabled())

    def __exit__(self, *_: Any) -> None:
        this_thread.depth = this_thread.runs.pop().depth_around

    def __call__(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        def run(*args: Any, **kwargs: Any) -> _Result:
            with self:
                return function(*args, **kwargs)

        return run


# Statistics that the calls of each layer gathered in the first run, in call order.
_Gathered = dict["nn.Module | None", list[Any]]
# Choices of as_in_first_run in the first run, by layer, in call order.
_Choices = dict["nn.Module | None", list[Any]]


class _Run:
    """One run of a region in this thread, the first one or a repetition."""

    def __init__(self, gathered: _Gathered, choices: _Choices, repeats: bool) -> None:
        self.gathered, self.choices, self.repeats = gathered, choices, repeats
        self.depth_around = this_thread.depth
        self._calls: Counter[nn.Module | None] = Counter()
        self._chosen: Counter[nn.Module | None] = Counter()

    def remember(self, layer: nn.Module | None, result: Any) -> None:
        self.gathered.setdefault(layer, []).append(result)

    def recall(self, layer: nn.Module | None) -> Any:
        gathered, number = self.gathered.get(layer, []), self._calls[layer]
        if number == len(gathered):
            raise RuntimeError(
                f"{name_of(layer)}: expected a repetition to call it no more often than the first run, in which it "
                f"was synchronized {number} time(s), got one call more"
            )
        self._calls[layer] += 1
        return gathered[number]

    def recall_choice(self, layer: nn.Module | None, default: Any) -> Any:
        choices, number = self.choices.get(layer, []), self._chosen[layer]
        self._chosen[layer] += 1
        return choices[number] if number < len(choices) else default


def result_of_call(layer: nn.Module | None, gather: Callable[[], _Result]) -> _Result:
    """Returns the result of ``gather``; in a repetition, the result in the repeated call of ``layer``.

    Raises:
        RuntimeError: the first run made fewer calls of ``layer``, or the checkpoints of this torch are not known.
    """
    raise_if_under_unknown_checkpoint()
    first_runs, repetition = _runs_of_call()
    result: _Result = gather() if repetition is None else repetition.recall(layer)
    for run in first_runs:
        run.remember(layer, result)
    return result


def as_in_first_run(layer: nn.Module | None, value: _Result) -> _Result:
    """Returns ``value``; in a repetition, the value in the repeated call of ``layer``."""
    first_runs, repetition = _runs_of_call()
    if repetition is not None:
        value = repetition.recall_choice(layer, value)
    for run in first_runs:
        run.choices.setdefault(layer, []).append(value)
    return value


def _runs_of_call() -> tuple[list[_Run], _Run | None]:
    """Returns the first runs that a call is in, inside of the innermost repetition, and that repetition or None."""
    first_runs: list[_Run] = []
    for run in reversed(this_thread.runs):
        if run.repeats:
            return first_runs, run
        first_runs.append(run)
    return first_runs, None


def is_repetition() -> bool:
    """Whether this thread repeats an earlier run. False while torch.compile traces, which plans repetitions itself."""
    if torch.compiler.is_compiling():
        return False
    raise_if_under_unknown_checkpoint()
    return any(run.repeats for run in this_thread.runs)


def is_plain() -> bool:
    """Whether only autograd is active in this thread: no repetition, recomputation, trace or transform.

    Must not be called while torch.compile traces.
    """
    return not (this_thread.runs or this_thread.depth) and is_untouched()


class _CheckpointRegion(Repeatable):
    """Region of one pass in torch's checkpoint, which enters it again whenever backward needs unsaved tensors."""

    def _is_first_run(self) -> bool:
        return False


observe_checkpoints(_CheckpointRegion)
