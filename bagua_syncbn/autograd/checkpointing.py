"""What activation checkpointing repeats in backward: the layers know that it is a repetition, and of which call.

A repetition must not communicate, because nothing says that the other ranks repeat theirs, nor count its batch once
more. Which calls are repetitions is never concluded from numbers: the checkpoint says so. Each region that it may
repeat is a :class:`Repeatable`, entered around the first run and around every repetition. In a repetition the n-th call
of a layer takes what its n-th call in the first run gathered. The checkpoint itself holds the region, so that it lives
as long as the graph.
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

    To be entered around the first run and around each repetition. The first time, layers work as ever. From the second
    time on, each call of a layer takes the statistics that its call in the first run gathered: it does not communicate,
    and changes no buffer. Regions may be nested, and entered in several threads.

    ``torch.utils.checkpoint`` needs none of this: it is recognized. Code that repeats forward passes by its own means
    makes one object for each pass; what it repeats without is a forward like any other.

    Called with a function, it returns that function as it runs within the region.

    Raises:
        RuntimeError: it is entered for another first run. That is where it is entered outside of a backward pass again,
            and gradients are disabled, or were enabled the first time.

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
        """Whether an entry is no repetition: these are for gradients, and in backward where there is a graph."""
        return not is_in_backward() and (self._had_grad or not torch.is_grad_enabled())

    def __exit__(self, *_: Any) -> None:
        this_thread.depth = this_thread.runs.pop().depth_around

    def __call__(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        def run(*args: Any, **kwargs: Any) -> _Result:
            with self:
                return function(*args, **kwargs)

        return run


# What the calls of each layer gathered in the first run, in their order.
_Gathered = dict["nn.Module | None", list[Any]]
# And how they were made.
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
    """Returns what the call of ``layer`` that this one repeats has gathered, or what ``gather`` returns.

    Raises:
        RuntimeError: the first run did not get as far, or this torch's checkpoints are not known.
    """
    raise_if_under_unknown_checkpoint()
    first_runs, repetition = _runs_of_call()
    result: _Result = gather() if repetition is None else repetition.recall(layer)
    for run in first_runs:
        run.remember(layer, result)
    return result


def as_in_first_run(layer: nn.Module | None, value: _Result) -> _Result:
    """Returns ``value``, in a repetition what it was in the call of ``layer`` that this one repeats."""
    first_runs, repetition = _runs_of_call()
    if repetition is not None:
        value = repetition.recall_choice(layer, value)
    for run in first_runs:
        run.choices.setdefault(layer, []).append(value)
    return value


def _runs_of_call() -> tuple[list[_Run], _Run | None]:
    """Returns the first runs that a call is in, up to the innermost repetition, and that repetition."""
    first_runs: list[_Run] = []
    for run in reversed(this_thread.runs):
        if run.repeats:
            return first_runs, run
        first_runs.append(run)
    return first_runs, None


def is_repetition() -> bool:
    """Whether this thread is repeating what was run before. Never while torch.compile traces: it plans by itself."""
    if torch.compiler.is_compiling():
        return False
    raise_if_under_unknown_checkpoint()
    return any(run.repeats for run in this_thread.runs)


def is_plain() -> bool:
    """Whether nothing but autograd is at work in this thread: nothing repeats, recomputes, traces or transforms.

    Not asked where torch.compile traces.
    """
    return not (this_thread.runs or this_thread.depth) and is_untouched()


class _OfCheckpoint(Repeatable):
    """Made by a checkpoint of torch for one pass, and entered whenever somebody asks for what was not saved."""

    def _is_first_run(self) -> bool:
        return False


observe_checkpoints(_OfCheckpoint)
