"""Section layers: whole layers on ranks, peer beside peer in the same processes, on the same batch, in turn."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua_syncbn import ops
from bagua_syncbn.communicators import Communicator, spec_of

from ..core.batches import Shape, layouts, make_batch
from ..core.machine import thread_counts
from ..core.timing import Workload
from ..core.waiting import CollectiveClock
from ..cpu.host import BareStep
from ..peers import Maker
from .gathering import time_on_ranks

# For each rank: ResNet-50 at several batches, a U-Net's first layer, 3-D, and shapes of published figures.
SHAPES: tuple[Shape, ...] = (
    (4, 32, 16, 16),
    (64, 256),
    (64, 2048),
    (4, 512, 7, 7),
    (16, 256, 14, 14),
    (2, 64, 112, 112),
    (8, 64, 56, 56),
    (50, 2048, 7, 7),
    (2, 32, 48, 48, 48),
    (1, 32, 512, 512),
    (32, 256, 56, 56),
    (32, 64, 112, 112),
    (64, 8, 224, 224),
)

# Inputs of so many values are measured on at most two ranks and in one way only, but for one of them.
_HUGE = 25_000_000
_MEASURED_IN_FULL = (32, 256, 56, 56)


def cases(job: dict[str, Any], world_size: int) -> list[tuple[Shape, str, int]]:
    """Interleaved input on two ranks, and several threads on one and two, which leave cores idle."""
    chosen = []
    for shape in map(tuple, job["shapes"] or SHAPES):
        huge = math.prod(shape) >= _HUGE and shape != _MEASURED_IN_FULL
        if huge and world_size > 2:
            continue
        simple = job["quick"] or huge or world_size > 2
        chosen_layouts = layouts(shape)[: 2 if world_size == 2 and not simple else 1]
        threads = [1] if simple or job["device"] != "cpu" else thread_counts(world_size)
        chosen += itertools.product([shape], chosen_layouts, threads)
    return chosen


class Bare(nn.BatchNorm1d):
    """A layer in as little Python as can be: the five ops and the two messages."""

    def __init__(self, channels: int, communicator: Communicator) -> None:
        super().__init__(channels)
        self._communicator = communicator

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = BareStep.apply(input, *self.parameters(), *self.buffers(), self._communicator)
        return output


class TimedStep:
    """Forward and backward of a layer, with the time of each and the host's time in collectives in each."""

    def __init__(self, layer: nn.Module, x: Tensor, grad_output: Tensor, clock: CollectiveClock) -> None:
        self._layer, self._x, self._grad_output, self._clock = layer, x, grad_output, clock
        self._inputs = (x, *layer.parameters())
        self._wait: Callable[[], None] = torch.cuda.synchronize if x.is_cuda else lambda: None
        self._parts: dict[str, float] = {}

    def __call__(self) -> None:
        times, waited = [time.perf_counter()], [self._clock.seconds]
        y = self._layer(self._x)
        self._wait()
        times.append(time.perf_counter())
        waited.append(self._clock.seconds)
        # Not y.backward(), which would also time that the gradients are added to those of the leaves.
        torch.autograd.grad(y, self._inputs, self._grad_output)
        self._wait()
        times.append(time.perf_counter())
        waited.append(self._clock.seconds)
        for i, name in enumerate(("forward", "backward")):
            self._parts[name] = self._parts.get(name, 0.0) + times[i + 1] - times[i]
            part = f"{name} collectives"
            self._parts[part] = self._parts.get(part, 0.0) + waited[i + 1] - waited[i]

    def take_parts(self) -> dict[str, float]:
        parts, self._parts = self._parts, {}
        return parts


def make_ops(x: Tensor, dy: Tensor) -> Callable[[], object]:
    """The five ops of a step, one after another, without autograd and messages."""
    weight, running = torch.ones(x.size(1), device=x.device), torch.zeros(2, x.size(1), device=x.device)
    batches = torch.tensor(0, device=x.device)

    def run() -> Tensor:
        gathered = ops.batch_norm_stats(x)[None]
        mean, invstd, count = ops.batch_norm_gather_stats(gathered, *running, batches, 0.1, 1e-5)
        ops.batch_norm_elemt(x, weight, weight, mean, invstd)
        sums, *_ = ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight)
        return ops.batch_norm_backward_elemt(dy, x, weight, mean, invstd, sums, count)

    return run


def make(shape: Shape, layout: str, makers: dict[str, Maker], device: torch.device, clock: CollectiveClock) -> Workload:
    """Returns a step of each peer's layer, and what a step is made of on its own."""
    x = make_batch(shape, layout).to(device).requires_grad_()
    grad_output = make_batch(shape, layout).to(device)
    copy, source = torch.empty_like(grad_output), x.detach()
    layers = {name: maker(shape[1], len(shape)).to(device) for name, maker in makers.items()}
    communicator = spec_of(None).communicator()
    layers["bare"] = Bare(shape[1], communicator).to(device)
    workload: Workload = {name: TimedStep(layer, x, grad_output, clock) for name, layer in layers.items()}
    workload["copy"] = lambda: copy.copy_(source)
    packed, sums = torch.zeros(2 * shape[1] + 2, device=device), torch.zeros(2 * shape[1], device=device)
    workload["collectives"] = lambda: (communicator.all_gather(packed), communicator.all_reduce(sums))
    workload["ops"] = make_ops(source, grad_output)
    return workload


def measure(
    shape: Shape, layout: str, threads: int, job: dict[str, Any], makers: dict[str, Maker], device: torch.device
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    clock = CollectiveClock()
    workload = make(shape, layout, makers, device, clock)
    with clock.installed():
        timed = time_on_ranks(workload, job)
    return {
        "section": "layers",
        "ranks": dist.get_world_size(),
        "device": device.type,
        "shape": shape,
        "layout": layout,
        "threads": threads,
        **timed,
    }
