"""Programs for ranks that diverge: strings of calls, and what one rank does otherwise.

``a``, ``b``, ``c`` call a layer in forward on data of its own: ``a`` and ``b`` of 8 channels, ``c`` of 12. ``<`` is a
backward pass of all that was called since the last one, ``>`` the same one by one, from the first call to the last.
``^`` is that as a pass that can be differentiated again, ``v`` such a one from the last call to the first. ``!`` is an
exception that the program catches and goes on with its next step.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from observed import collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import bagua_syncbn
from bagua_syncbn.communicators import LOCAL, TorchCommunicator, communicator_of
from bagua_syncbn.sync.history import CallHistory, history_in

STEPS = 3

Change = Callable[["Model"], Any]


class SwallowedError(Exception):
    """An exception that a program raises and catches."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.BatchNorm1d(12)
        self.no_gradient_for = self.raises_in_backward = ""
        self.grad = True
        self.spoiled: dict[str, Callable[[Any, Tensor], Tensor]] = {}

    def run(self, program: str) -> None:
        outputs: list[Tensor] = []
        for call in program:
            if call == "!":
                raise SwallowedError
            if call in "<>^v":
                parts = [outputs] if call == "<" else [[output] for output in outputs]
                for part in reversed(parts) if call == "v" else parts:
                    grads = [torch.randn_like(output) for output in part]
                    torch.autograd.backward(part, grads, create_graph=call in "^v")
                outputs = []
            else:
                output = self.call(call)
                if output.requires_grad:
                    outputs.append(output)

    def call(self, name: str) -> Tensor:
        layer = getattr(self, name)
        x = torch.randn(4, layer.num_features, dtype=layer.weight.dtype)
        before = [buffer.clone() for buffer in layer.buffers()]
        try:
            with torch.set_grad_enabled(self.grad):
                normalize = self.spoiled.get(name, nn.Module.__call__)
                output: Tensor = normalize(layer, x.requires_grad_(name not in self.no_gradient_for))
        except RuntimeError:
            assert all(map(torch.equal, before, layer.buffers())), "buffers changed in a call that failed"
            raise
        if name in self.raises_in_backward:
            output.register_hook(_raise_swallowed)
        return output


def _raise_swallowed(_: Any) -> None:
    raise SwallowedError


@contextmanager
def own_group(seconds: float = 300.0) -> Iterator[Any]:
    """Yields a communicator over all ranks, of a group that nothing else uses."""
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
    """Whether this is the last rank, which does something else."""
    return dist.get_rank() == dist.get_world_size() - 1


def message_of(function: Callable[[], Any]) -> str:
    """Returns the message of the error in which ``function`` ends, or "finished"."""
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "finished"


def run(base: str, program: str, change: Change | None, when: int, timeout: float, prepare: Change | None) -> str:
    """Runs ``base`` for three steps; on the last rank, from step ``when`` on, ``program``, after ``change``.

    All of them begin with ``prepare``.
    """
    torch.manual_seed(dist.get_rank())

    def run_steps() -> None:
        for step in range(STEPS):
            diverges = is_odd() and step >= when
            if diverges and step == when and change is not None:
                change(model)
            with suppress(SwallowedError):
                model.run(program if diverges else base)

    with own_model(timeout) as model:
        if prepare is not None:
            prepare(model)
        return message_of(run_steps)


def _other_buffer(layer: Any, x: Tensor) -> Tensor:
    before, layer.running_var = layer.running_var, torch.ones(9)
    try:
        return layer(x)  # type: ignore[no-any-return]
    finally:
        layer.running_var = before


def _partial(layer: Any, x: Tensor) -> Tensor:
    mesh = DeviceMesh("cpu", torch.tensor([dist.get_rank()]), _init_backend=False)
    return layer(DTensor.from_local(x, mesh, [Partial()], run_check=False))  # type: ignore[no-any-return]


def _replicated(layer: Any, x: Tensor) -> Tensor:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), _init_backend=False)
    return layer(DTensor.from_local(x, mesh, [Replicate()], run_check=False))  # type: ignore[no-any-return]


def _repeated_too_often(layer: Any, x: Tensor) -> Tensor:
    region = bagua_syncbn.Repeatable()
    with region:
        pass
    with region:
        return layer(x)  # type: ignore[no-any-return]


# Calls that a rank is refused because of its own data, by a word of the error.
REFUSED = {
    "int64": lambda layer, x: layer(x.long()),
    "2D or 3D input": lambda layer, x: layer(x[0]),
    "running_var: expected 8 elements": _other_buffer,
    "DTensor": _partial,
    "process_group: expected ranks": _replicated,
    "no more often than the first run": _repeated_too_often,
}


def run_refused(kind: str, on_all: bool) -> list[str]:
    """Three steps that go on after errors; in the second one the last rank, or each, is refused a call of ``b``."""
    messages = []
    with own_model() as model:
        for step in range(STEPS):
            model.spoiled = {"b": REFUSED[kind]} if step == 1 and (on_all or is_odd()) else {}
            messages.append(message_of(lambda: model.run("abc<")))
    return [message for message in messages if message != "finished"]


def count_messages(programs: Sequence[str], most: int) -> tuple[list[int], int]:
    """Runs a program in each step, on all ranks. Returns the collectives of each step, and how much is remembered."""
    counts = []
    before, CallHistory.most = CallHistory.most, most
    with own_group() as communicator:
        model: Any = bagua_syncbn.convert_sync_batchnorm(Model(), communicator)
        for program in programs:
            with collectives() as counted:
                model.run(program)
            counts.append(counted.total())
        remembered = len(history_in(communicator).after_step)
    CallHistory.most = before
    return counts, remembered


def run_refused_first() -> int:
    """The last rank is refused a call before the group's first message, which no other rank expects of it by then."""
    with own_model() as model:
        if is_odd():
            message_of(lambda: model.a(torch.ones(4, 8, dtype=torch.int64)))
        model.a(torch.randn(4, 8))
    return int(model.a.num_batches_tracked)


def run_partly_compiled() -> Tensor:
    """Two steps, of which the last rank runs the second as it is written."""
    layer = bagua_syncbn.SyncBatchNorm(8, momentum=1.0)
    compiled = torch.compile(layer, backend="eager")
    for step in range(2):
        x = torch.full((2, 8), float(dist.get_rank()), requires_grad=True)
        call = layer if step and is_odd() else compiled
        call(x).backward(torch.randn(2, 8))
    return layer.running_mean


def run_compiled() -> list[str]:
    """A compiled model in which the last rank has another ``eps``. Returns the messages of what finds out later."""
    messages = []
    with own_group() as communicator:
        model: Any = bagua_syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8)), communicator)
        alike = bagua_syncbn.SyncBatchNorm(8, process_group=communicator)
        if is_odd():
            model[0].eps = 1e-3
        before = [buffer.clone() for buffer in model.buffers()]
        compiled = torch.compile(model, backend="eager")
        for find_out in (bagua_syncbn.check_ranks, lambda: alike(torch.randn(4, 8))):
            assert compiled(torch.randn(4, 8)).isnan().all()
            assert all(map(torch.equal, before, model.buffers()))
            messages.append(message_of(find_out))
        assert alike.num_batches_tracked == 0, "found out in a call that was made"
    return messages


def run_after_failure() -> list[str]:
    """Two calls of ranks that do not agree. Returns the messages of both."""
    with own_model() as model:
        return [message_of(lambda: model.call("b" if dist.get_rank() else "a")) for _ in range(2)]


def run_under_meta() -> str:
    """The last rank calls another layer, while tensors are made elsewhere."""
    with own_model() as model:
        layer = model.c if is_odd() else model.a
        input = torch.randn(4, layer.num_features)
        with torch.device("meta"):
            return message_of(lambda: layer(input))


class Critic(nn.Sequential):
    pass


class Judge(nn.Sequential):
    pass


def message_of_steps(steps: Sequence[Sequence[nn.Module]]) -> str:
    """Calls some modules in each step."""

    def run_steps() -> None:
        for step in steps:
            for module in step:
                module(torch.randn(4, 8, requires_grad=True)).sum().backward()

    return message_of(run_steps)


def run_swapped(kind: str) -> str:
    """Three steps of two models, of which the last rank swaps them in the last."""
    with own_group() as communicator:
        first: nn.Module = Critic(nn.BatchNorm1d(8))
        second: nn.Module = (Judge if kind == "models of two classes" else Critic)(nn.BatchNorm1d(8))
        for model in (first, second):
            bagua_syncbn.convert_sync_batchnorm(model, communicator)
        if kind == "a model and its copy":
            second = copy.deepcopy(first)
        if kind == "layers made by hand":
            first, second = (bagua_syncbn.SyncBatchNorm1d(8, process_group=communicator) for _ in range(2))
        return message_of_steps([[first, second]] * 2 + [[second, first] if is_odd() else [first, second]])


# The last rank has, besides the model that all train: more models, of which it trains none in this group.
MORE: dict[str, Callable[[nn.Sequential, TorchCommunicator], Any]] = {
    "a norm that nothing calls": lambda model, _: model.add_module("unused", nn.BatchNorm1d(8)),
    "a head of its own": lambda model, _: model.add_module(
        "head", bagua_syncbn.SyncBatchNorm1d(8, process_group=LOCAL)
    ),
    "a model converted before": lambda model, communicator: bagua_syncbn.convert_sync_batchnorm(
        Critic(nn.BatchNorm1d(8)), communicator
    ),
    "a copy that it evaluates": lambda model, communicator: copy.deepcopy(
        bagua_syncbn.convert_sync_batchnorm(model, communicator)
    ).eval()(torch.ones(2, 8)),
}


def run_with_more(more: str) -> str:
    """Three steps of two models of one class; the last rank has one thing more."""
    models: list[Any] = [Critic(), Critic()]
    with own_group() as communicator:
        for model in models:
            model.add_module("norm", nn.BatchNorm1d(8))
            if is_odd():
                MORE[more](model, communicator)
            bagua_syncbn.convert_sync_batchnorm(model, communicator, filter=lambda name, _: name != "head")
            if is_odd() and more == "a norm that nothing calls":
                model.forward = model.norm.forward
        return message_of_steps([models] * 3)


def run_under_long_names() -> str:
    """The last rank has another ``eps`` in a layer of a very long name."""
    model = nn.Sequential()
    model.add_module("x" * 1000, nn.BatchNorm1d(8))
    with own_group() as communicator:
        bagua_syncbn.convert_sync_batchnorm(model, communicator)
        if is_odd():
            model[0].eps = 1.0000001e-5
        return message_of_steps([[model]])


def run_beside_compiled(program: str) -> str:
    """Steps of a compiled model and one that is not, of which the last rank runs another ``program`` in the second."""
    with own_group() as communicator:
        model: Any = bagua_syncbn.convert_sync_batchnorm(Model(), communicator)
        judge = bagua_syncbn.convert_sync_batchnorm(Judge(nn.BatchNorm1d(8)), communicator)
        compiled = torch.compile(judge, backend="eager")

        def run_steps() -> None:
            for step in range(3):
                compiled(torch.randn(4, 8, requires_grad=True)).sum().backward()
                model.run(program if step and is_odd() else "abc<")

        return message_of(run_steps)


def run_compiled_on_one(times: int) -> str:
    """After so many calls the last rank compiles a model, the others do not."""
    with own_group() as communicator:
        model: Any = bagua_syncbn.convert_sync_batchnorm(Judge(nn.BatchNorm1d(8)), communicator)
        for _ in range(times):
            model(torch.randn(4, 8))
        if is_odd():
            model = torch.compile(model, backend="eager")
        return message_of(lambda: (model(torch.randn(4, 8)), bagua_syncbn.check_ranks()))
