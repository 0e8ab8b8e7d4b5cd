"""Programs for ranks that diverge: strings of calls, and what one rank does otherwise.

``a``, ``b``, ``c`` call a layer in forward on data of its own: ``a`` and ``b`` of 8 channels, ``c`` of 12. ``<`` is a
backward pass of all that was called since the last one, ``>`` the same one by one, from the first call to the last.
``^`` is that as a pass that can be differentiated again, ``v`` such a one from the last call to the first. ``!`` is an
exception that the program catches and goes on with its next step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import bagua_syncbn
from bagua_syncbn import ops
from bagua_syncbn.agreement import faults
from bagua_syncbn.agreement.history import CallHistory, history_in
from bagua_syncbn.communicators.c10d import communicator_of
from tests.helpers.observed import collectives

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
    except Exception as error:
        return str(error)
    return "finished"


def run(
    base: str,
    program: str,
    change: Change | None,
    when: int,
    timeout: float,
    prepare: Change | None,
    see_end: Change | None = None,
) -> str:
    """Runs ``base`` for three steps; on the last rank, from step ``when`` on, ``program``, after ``change``.

    All of them begin with ``prepare``, and end with ``see_end``.
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
        message = message_of(run_steps)
        if see_end is not None:
            see_end(model)
        return message


class Late:
    """The kind in a fault record, which the host does not see the first times: the device is behind."""

    def __init__(self, kind: Any, times: int) -> None:
        self._kind, self._times = kind, times

    @property
    def value(self) -> int:
        if not self._kind.value or not self._times:
            return int(self._kind.value)
        self._times -= 1
        return 0


def run_where_no_host_looks(
    base: str, program: str, change: Change | None, prepare: Change | None, late: int, timeout: float
) -> tuple[str, str, int]:
    """Runs as :func:`run` does, from the second step on, with hosts that look for faults before each call, as on CUDA.

    They do not see a fault the first ``late`` times. Returns what tells of the divergence, then the error of one more
    step, and how many collectives that step sent.
    """
    later: list[Any] = []

    def prepare_model(model: Any) -> None:
        history = history_in(model.a.process_group)
        record = faults.RECORDS[history.name, "cpu"] = faults.FaultRecord("cpu")
        record.is_on_cpu = False
        record.kind = Late(record.kind, late)  # type: ignore[assignment]
        if prepare is not None:
            prepare(model)

    def see_end(model: Any) -> None:
        later.append(message_of(bagua_syncbn.check_ranks))
        with collectives() as counted:
            later.append(message_of(lambda: model.run("abc<")))
        later.append(counted.total())

    message = run(base, program, change, 1, timeout, prepare_model, see_end)
    found, again, sent = later
    return found if message == "finished" else message, again, sent


def _with(name: str, value: object) -> Callable[[Any, Tensor], Tensor]:
    """Returns a call of a layer with another value of an attribute."""

    def call(layer: Any, x: Tensor) -> Tensor:
        before = getattr(layer, name)
        setattr(layer, name, value)
        try:
            return layer(x)  # type: ignore[no-any-return]
        finally:
            setattr(layer, name, before)

    return call


def _by_function(**options: Any) -> Callable[[Any, Tensor], Tensor]:
    """Returns a call of the function in place of a layer, which it names."""

    def call(layer: Any, x: Tensor) -> Tensor:
        given = {"process_group": layer.process_group, "layer": layer, **options}
        return bagua_syncbn.sync_batch_norm(x, layer.running_mean, layer.running_var, **given)

    return call


class SyncBatchNorm1d(bagua_syncbn.SyncBatchNorm1d):
    """A class with a forward of its own, which raises."""

    def forward(self, input: Tensor) -> Tensor:
        raise KeyError("a forward of its own")


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
    "got NoneType": lambda layer, x: layer(None),
    "got list": lambda layer, x: layer(x.tolist()),
    "got ndarray": lambda layer, x: layer(x.detach().numpy()),
    "got str": lambda layer, x: layer("x"),
    "missing 1 required positional argument: 'input'": lambda layer, x: layer(),
    "unexpected keyword argument 'wat'": lambda layer, x: layer.forward(x, wat=1),
    "a forward of its own": _with("__class__", SyncBatchNorm1d),
    "momentum: expected": _with("momentum", torch.ones(2)),
    "skip_nonfinite: expected": _with("skip_nonfinite", torch.ones(2)),
    "got float": _by_function(weight=1.0),
    "got int": _by_function(num_batches_tracked=3),
    "unexpected keyword argument 'what'": _by_function(what=1),
}


def run_refused(kind: str, on_all: bool) -> list[str]:
    """Three steps that go on after errors; in the second one the last rank, or each, is refused a call of ``b``."""
    messages = []
    with own_model() as model:
        for step in range(STEPS):
            model.spoiled = {"b": REFUSED[kind]} if step == 1 and (on_all or is_odd()) else {}
            messages.append(message_of(lambda: model.run("abc<")))
    return [message for message in messages if message != "finished"]


def run_failing_backward() -> list[str]:
    """Two steps; in the second one the backward pass of ``c`` raises on the last rank."""
    reduce = ops.batch_norm_backward_reduce

    def fail(*_: Any) -> None:
        raise MemoryError("in a backward pass")

    messages = []
    with own_model() as model:
        for step in range(2):
            ops.batch_norm_backward_reduce = fail if step and is_odd() else reduce
            messages.append(message_of(lambda: model.run("abc<")))
    ops.batch_norm_backward_reduce = reduce
    return messages


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


def run_partly_compiled(momentum: float | None) -> Tensor:
    """Two steps, of which the last rank runs the second as it is written."""
    layer = bagua_syncbn.SyncBatchNorm(8, momentum=momentum)
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
