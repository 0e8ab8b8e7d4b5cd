"""Training steps on several ranks, with a divergence on the last rank.

A step is a line of words, such as "a b c backward":

    a, b, c                    forward pass of a layer on new data; a and b have 8 channels, c has 12
    backward                   one backward pass for all outputs since the previous backward
    backward-in-order          one backward pass per output, first to last
    differentiable-in-order    one backward pass per output with create_graph=True, first to last
    differentiable-in-reverse  one backward pass per output with create_graph=True, last to first
    error                      an exception that ends the step; the training loop catches it
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import bagua_syncbn
from bagua_syncbn.communicators.c10d import communicator_of

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
    "differentiable-in-order": lambda outputs: [_backward([each], True) for each in outputs],
    "differentiable-in-reverse": lambda outputs: [_backward([each], True) for each in reversed(outputs)],
}


class Model(nn.Module):
    """Three layers, and the attributes that a rank can change.

    Attributes:
        no_gradient_for: name of a layer; its input does not require a gradient.
        raises_in_backward: name of a layer; its backward pass raises.
        has_grad: whether layers are called with gradients enabled.
        calls: replacements for calls of layers: functions of the layer and its input, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.BatchNorm1d(12)
        self.no_gradient_for = self.raises_in_backward = ""
        self.has_grad = True
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
            with torch.set_grad_enabled(self.has_grad):
                normalize = self.calls.get(name, nn.Module.__call__)
                output: Tensor = normalize(layer, x.requires_grad_(name != self.no_gradient_for))
        except RuntimeError:
            assert all(map(torch.equal, before, layer.buffers())), "buffers changed in a call that failed"
            raise
        if name == self.raises_in_backward:
            output.register_hook(_raise_caught)
        return output


def _raise_caught(_: Any) -> None:
    raise CaughtError


@contextmanager
def own_group(seconds: float = 300.0) -> Iterator[Any]:
    """Yields a communicator for a new group of all ranks."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    try:
        yield communicator_of(group)
    finally:
        dist.destroy_process_group(group)


@contextmanager
def own_model(seconds: float = 300.0) -> Iterator[Any]:
    with own_group(seconds) as communicator:
        yield bagua_syncbn.convert_sync_batchnorm(Model(), communicator)


def is_odd() -> bool:
    """Returns True on the last rank, the one that diverges."""
    return dist.get_rank() == dist.get_world_size() - 1


def message_of(function: Callable[[], Any]) -> str:
    """Returns the message of the error that ends ``function``, or "finished"."""
    try:
        function()
    except Exception as error:
        return str(error)
    return "finished"


@dataclass(frozen=True)
class Row:
    """A divergence of the last rank, and the error that all ranks raise.

    Attributes:
        step: the step that the last rank runs once it diverges.
        change: called on the last rank when it diverges.
        layers: names of the layers in each error.
        says: other parts of each error.
        others: the step of the other ranks, and of the last rank before it diverges.
        prepare: called on all ranks at the beginning.
    """

    step: str = STEP
    change: Change | None = None
    layers: str = ""
    says: tuple[str, ...] = ()
    others: str = STEP
    prepare: Change | None = None

    def missing_in(self, message: str) -> list[str]:
        """Returns the expected parts that are not in ``message``."""
        names = [f"'{name}' of Model ({12 if name == 'c' else 8} channels" for name in self.layers]
        return [part for part in (*names, *self.says) if part not in message]

    def run(self, when: int, seconds: float = 300.0, begin: Change | None = None, end: Change | None = None) -> str:
        """Runs three steps; the last rank diverges from step ``when`` on. Returns the message."""
        torch.manual_seed(dist.get_rank())

        def take_steps() -> None:
            for number in range(STEPS):
                differs = is_odd() and number >= when
                if differs and number == when and self.change is not None:
                    self.change(model)
                with suppress(CaughtError):
                    model.run(self.step if differs else self.others)

        with own_model(seconds) as model:
            for prepare in (self.prepare, begin):
                if prepare is not None:
                    prepare(model)
            message = message_of(take_steps)
            if end is not None:
                end(model)
            return message


def set_in(layer: str, **values: Any) -> Change:
    """Returns a change that sets attributes of a layer."""
    return lambda model: [setattr(getattr(model, layer), name, value) for name, value in values.items()]


# Invalid calls, by a part of their error.


def _with(**values: Any) -> Callable[[Any, Tensor], Tensor]:
    """Returns a call of a layer with these attributes."""

    def call(layer: Any, x: Tensor) -> Tensor:
        before = {name: getattr(layer, name) for name in values}
        try:
            for name, value in values.items():
                setattr(layer, name, value)
            return layer(x)  # type: ignore[no-any-return]
        finally:
            for name, value in before.items():
                setattr(layer, name, value)

    return call


def _by_function(**options: Any) -> Callable[[Any, Tensor], Tensor]:
    """Returns a call of the function on behalf of a layer."""

    def call(layer: Any, x: Tensor) -> Tensor:
        given = {"process_group": layer.process_group, "layer": layer, **options}
        return bagua_syncbn.sync_batch_norm(x, layer.running_mean, layer.running_var, **given)

    return call


def _placed(placement: Any, on_all: bool) -> Callable[[Any, Tensor], Tensor]:
    """Returns a call of a layer with a DTensor on a mesh of all ranks, or only of this rank."""

    def call(layer: Any, x: Tensor) -> Tensor:
        ranks = torch.arange(dist.get_world_size()) if on_all else torch.tensor([dist.get_rank()])
        mesh = DeviceMesh("cpu", ranks, _init_backend=False)
        return layer(DTensor.from_local(x, mesh, [placement], run_check=False))  # type: ignore[no-any-return]

    return call


def _repeated_too_often(layer: Any, x: Tensor) -> Tensor:
    region = bagua_syncbn.Repeatable()
    with region:
        pass
    with region:
        return layer(x)  # type: ignore[no-any-return]


class SyncBatchNorm1d(bagua_syncbn.SyncBatchNorm1d):
    """A class with a forward that raises."""

    def forward(self, input: Tensor) -> Tensor:
        raise KeyError("a forward of its own")


REFUSED = {
    "int64": lambda layer, x: layer(x.long()),
    "2D or 3D input": lambda layer, x: layer(x[0]),
    "running_var: expected 8 elements": _with(running_var=torch.ones(9)),
    "DTensor": _placed(Partial(), on_all=False),
    "process_group: expected ranks": _placed(Replicate(), on_all=True),
    "no more often than the first run": _repeated_too_often,
    "got NoneType": lambda layer, x: layer(None),
    "got list": lambda layer, x: layer(x.tolist()),
    "got ndarray": lambda layer, x: layer(x.detach().numpy()),
    "got str": lambda layer, x: layer("x"),
    "missing 1 required positional argument: 'input'": lambda layer, x: layer(),
    "unexpected keyword argument 'wat'": lambda layer, x: layer.forward(x, wat=1),
    "a forward of its own": _with(__class__=SyncBatchNorm1d),
    "momentum: expected": _with(momentum=torch.ones(2)),
    "skip_nonfinite: expected": _with(skip_nonfinite=torch.ones(2)),
    "got float": _by_function(weight=1.0),
    "got int": _by_function(num_batches_tracked=3),
    "unexpected keyword argument 'what'": _by_function(what=1),
}
