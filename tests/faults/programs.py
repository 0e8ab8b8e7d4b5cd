"""Training steps on several ranks, with a divergence on the last rank.

A step is a line of words, such as "a b c backward":

    a, b, c                  forward pass of a layer on new data; a and b have 8 channels, c has 12
    backward                 one backward pass for all outputs since the previous backward
    backward-in-order        one backward pass per output, first to last
    differentiable           one backward pass per output with create_graph=True, first to last
    differentiable-reversed  one backward pass per output with create_graph=True, last to first
    error                    an exception that ends the step; the training loop catches it
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua_syncbn
from bagua_syncbn._groups import spec_of
from tests.helpers.messages import message_of

STEPS = 3
STEP = "a b c backward"

Change = Callable[["Model"], Any]


class CaughtError(Exception):
    """An exception that the training loop catches."""


def _backward(outputs: Sequence[Tensor], create_graph: bool = False) -> None:
    torch.autograd.backward(outputs, [torch.randn_like(each) for each in outputs], create_graph=create_graph)


BACKWARD: dict[str, Callable[[list[Tensor]], Any]] = {
    "backward": _backward,
    "backward-in-order": lambda outputs: [_backward([each]) for each in outputs],
    "differentiable": lambda outputs: [_backward([each], True) for each in outputs],
    "differentiable-reversed": lambda outputs: [_backward([each], True) for each in reversed(outputs)],
}


class Model(nn.Module):
    """Three layers, and attributes that a rank can change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.BatchNorm1d(12)
        self.no_gradient_for = self.raises_in_backward = ""  # names of layers
        # Functions that replace calls, keyed by layer name.
        self.calls: dict[str, Callable[[Any, Tensor], Tensor]] = {}

    def run(self, step: str) -> None:
        outputs: list[Tensor] = []
        for word in step.split():
            if word == "error":
                raise CaughtError
            if word in BACKWARD:
                BACKWARD[word](outputs)
                outputs = []
            else:
                output = self.call(word)
                outputs += [output] * output.requires_grad

    def call(self, name: str) -> Tensor:
        layer = getattr(self, name)
        x = torch.randn(4, layer.num_features, dtype=layer.weight.dtype)
        before = [buffer.clone() for buffer in layer.buffers()]
        try:
            normalize = self.calls.get(name, nn.Module.__call__)
            output: Tensor = normalize(layer, x.requires_grad_(name != self.no_gradient_for))
        except RuntimeError:
            assert all(map(torch.equal, before, layer.buffers())), "buffers changed in a failed call"
            raise
        if name == self.raises_in_backward:
            output.register_hook(_raise_caught)
        return output


class Critic(nn.Sequential):
    """A model of another class."""


def _raise_caught(_: Any) -> None:
    raise CaughtError


def forward(layer: str) -> str:
    """Returns how errors name the forward pass of a layer of :class:`Model`."""
    return f"forward of SyncBatchNorm1d '{layer}' of Model ({12 if layer == 'c' else 8} channels"


def backward(layer: str) -> str:
    return forward(layer).replace("forward", "backward")


@contextmanager
def own_group(seconds: float = 300.0) -> Iterator[Any]:
    """Yields a communicator for a new group of all ranks."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    try:
        yield spec_of(group).communicator()
    finally:
        dist.destroy_process_group(group)


@contextmanager
def own_model(seconds: float = 300.0) -> Iterator[Any]:
    with own_group(seconds) as communicator:
        yield bagua_syncbn.convert_sync_batchnorm(Model(), communicator)


def is_odd() -> bool:
    """Returns True on the last rank, which diverges."""
    return dist.get_rank() == dist.get_world_size() - 1


@dataclass(frozen=True)
class Program:
    """Three steps in which the last rank diverges from its peers."""

    last_rank: str = STEP  # the last rank's step once it diverges
    change: Change = nn.Module.train  # called with the last rank's model when it diverges
    named: tuple[str, ...] = ()  # text in each rank's error
    step: str = STEP  # all ranks' step before the divergence
    prepare: Change = nn.Module.train  # called with each rank's model at the start

    def run(self, when: int, end: Change = nn.Module.train) -> str:
        """Runs the steps; the last rank diverges starting at step ``when``. Returns the message."""
        torch.manual_seed(dist.get_rank())

        def take_steps() -> None:
            for number in range(STEPS):
                differs = is_odd() and number >= when
                if differs and number == when:
                    self.change(model)
                with suppress(CaughtError):
                    model.run(self.last_rank if differs else self.step)

        with own_model() as model:
            self.prepare(model)
            message = message_of(take_steps)
            end(model)
            return message


def set_in(layer: str, **values: Any) -> Change:
    """Returns a change that sets attributes of a layer."""
    return lambda model: [setattr(getattr(model, layer), name, value) for name, value in values.items()]


# Invalid calls, keyed by a part of the error.


def _function_with_wrong_weight(layer: Any, x: Tensor) -> Tensor:
    tensors = layer.running_mean, layer.running_var, 1.0
    return bagua_syncbn.sync_batch_norm(x, *tensors, process_group=layer.process_group, layer=layer)


class SyncBatchNorm1d(bagua_syncbn.SyncBatchNorm1d):
    """A class with a raising forward."""

    def forward(self, input: Tensor) -> Tensor:
        raise KeyError("a custom forward")


REFUSED = {
    "int64": lambda layer, x: layer(x.long()),
    "expected 8 channels": lambda layer, x: layer(x[:, 1:]),
    "missing 1 required positional argument: 'input'": lambda layer, x: layer(),
    "a custom forward": SyncBatchNorm1d.forward,
    "got float": _function_with_wrong_weight,
}
