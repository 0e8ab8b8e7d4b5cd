"""Costs of a layer in counts without noise: ops, collectives, bytes on the wire, host reads, allocations, functions.

All limits are upper bounds.
"""

import gc
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_syncbn
from bagua_syncbn import _ops as ops
from tests.helpers.observed import EXCHANGE, MESSAGE, count_step

CHANNELS = 6
SHAPE = (4, CHANNELS, 32, 32)  # larger than all tensors except those of the input's size

PACKED = 4 * (2 * CHANNELS + 2 + 3)  # mean, variance, a count in two words, a header of three words
SUMS = 4 * (2 * CHANNELS + 6)


class Pass(NamedTuple):
    """Upper bounds of a forward or a backward pass on each rank. No pass reads device values on the host."""

    ops: int  # dispatched ops; a native kernel counts as one
    payload: int  # bytes of its collective; 0 for none
    large: int  # allocations of at least the size of the input


class Costs(NamedTuple):
    forward: Pass
    backward: Pass
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    options: dict = {}  # noqa: RUF012 - of the layer
    input_grad: bool = True
    expanded_grad: bool = False  # an output gradient that autograd expanded, as for a sum


# Forward has four ops: stats, a buffer for the gathered rows, merge, normalize. Collectives add two: a view of the
# buffer and the collective. Backward has two ops: sums and gradient. Collectives add four: a buffer for the gathered
# sums, a view, the collective and the total.
SHARES = MESSAGE == EXCHANGE
FORWARD, BACKWARD = Pass(4 if SHARES else 6, PACKED, 1), Pass(2 if SHARES else 6, SUMS, 1)
# Large groups send float64: stats, merge, normalize; with collectives, also the collective.
LARGE = FORWARD._replace(ops=3 if SHARES else 4, payload=8 * (2 * CHANNELS + 7))
LARGE_BACKWARD = BACKWARD._replace(ops=2 if SHARES else 3)

COSTS = {
    "float32": Costs(FORWARD, BACKWARD),
    "channels_last": Costs(FORWARD, BACKWARD, memory_format=torch.channels_last),
    "float64": Costs(FORWARD._replace(payload=2 * PACKED), BACKWARD._replace(payload=2 * SUMS), dtype=torch.float64),
    "bfloat16": Costs(FORWARD, BACKWARD, dtype=torch.bfloat16),
    "momentum=None": Costs(FORWARD, BACKWARD, options={"momentum": None}),
    "first layer": Costs(FORWARD, Pass(1, 0, 0), input_grad=False),
    # Made contiguous once for the two kernels that read it.
    "expanded gradient": Costs(FORWARD, BACKWARD._replace(ops=BACKWARD.ops + 2, large=2), expanded_grad=True),
    "large: float32": Costs(LARGE, LARGE_BACKWARD),
    "large: first layer": Costs(LARGE, Pass(1, 0, 0), input_grad=False),
}


def make(costs):
    layer = bagua_syncbn.SyncBatchNorm2d(CHANNELS, **costs.options)
    if costs.dtype == torch.float64:
        layer.double()
    x, grad = (torch.randn(SHAPE).to(costs.dtype, memory_format=costs.memory_format) for _ in range(2))
    if costs.expanded_grad:
        grad = grad[:1, :1, :1, :1].expand(SHAPE)
    return layer, x.requires_grad_(costs.input_grad), grad


def check_costs(costs):
    for most, counted in zip(costs[:2], count_step(*make(costs)), strict=True):
        assert len(counted.ops) <= most.ops, counted.ops
        assert len(counted.payloads) <= (most.payload > 0)
        assert sum(counted.payloads) <= most.payload
        assert counted.reads == 0
        assert counted.large <= most.large or ops.KERNELS.startswith("reference")


@pytest.mark.parametrize("name", COSTS)
def test_no_count_grows(request, name):
    request.getfixturevalue("large" if name.startswith("large") else "pool").run(check_costs, 2, COSTS[name])


def mask_of(layer):
    return bagua_syncbn.masked(layer, torch.ones(1, 1, *SHAPE[2:], dtype=torch.bool))


def masked(layer, x):
    with mask_of(layer):
        return layer(x)


def inside_masked(layer, x):
    """Enters the context, and checks and expands the mask, only in the first call, as for the layers of a model."""
    if not hasattr(layer, "context"):
        layer.context = mask_of(layer)
        layer.context.__enter__()
    return layer(x)


def after_evaluation(layer, x):
    layer.eval()(x)
    return layer.train()(x)


def without_a_layer(layer, x):
    buffers = layer.running_mean, layer.running_var
    return bagua_syncbn.sync_batch_norm(x, *buffers, layer.weight, layer.bias)


# Calls, and the maximum numbers of this package's functions that they run in forward and backward, without
# comprehensions.
CALLS = {
    "a later call": (lambda layer, x: layer(x), 13, 5),
    "evaluation": (lambda layer, x: layer.eval()(x), 10, 0),
    "after an evaluation": (after_evaluation, 21, 6),
    "without a layer": (without_a_layer, 17, 6),
    "masked": (masked, 41, 7),
    "a later layer inside masked": (inside_masked, 22, 7),
    "checkpointed": (lambda layer, x: checkpoint(layer, x, use_reentrant=False), 26, 29),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_few_functions(name):
    call, *most = CALLS[name]
    package = str(Path(bagua_syncbn.__file__).parent)
    gc.collect()  # a context that an earlier call left open would end, and count, in this call
    layer, x, grad = make(COSTS["float32"])
    for _ in range(3):
        call(layer.train(), x).backward(grad)

    def functions(part):
        called = set()

        def note(frame, event, _):
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(package) and not code.co_name.endswith("comp>"):
                called.add((Path(code.co_filename).stem, code.co_name))

        sys.setprofile(note)
        result = part()
        sys.setprofile(None)
        return sorted(called), result

    with torch.autograd.set_multithreading_enabled(False):
        forward, output = functions(lambda: call(layer, x))
        backward, _ = functions(lambda: output.backward(grad))
    assert len(forward) <= most[0], f"{len(forward)}: {forward}"
    assert len(backward) <= most[1], f"{len(backward)}: {backward}"


def check_against_torch(train):
    ours, x, grad = make(COSTS["float32"])
    assert count_step(ours.train(train), x, grad) == count_step(nn.BatchNorm2d(CHANNELS).train(train), x, grad)


def test_one_process_and_evaluation_cost_the_same_as_torch(pool):
    check_against_torch(True)
    check_against_torch(False)
    pool.run(check_against_torch, 2, False)
