"""Costs of a layer in counts that no noise can change: ops, collectives, bytes on the wire, reads, allocations.

A count that grows fails here, whatever a clock would say.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_syncbn
from bagua_syncbn import ops
from tests.helpers.counted import EXCHANGE
from tests.helpers.dispatched import count_step
from tests.helpers.observed import MESSAGE
from tests.helpers.user_layers import BatchNormAct

CHANNELS = 6
SHAPE = (4, CHANNELS, 32, 32)  # nothing but what has the size of the input is as large as it

PACKED = 4 * (2 * CHANNELS + 2 + 3)  # mean, variance, a count of two words, and three of the header
SUMS = 4 * (2 * CHANNELS + 6)


class Pass(NamedTuple):
    """Upper bounds of a forward or a backward pass on each rank. No pass reads a value on the host."""

    ops: int  # dispatched; a kernel is one
    payload: int  # bytes of its collective; 0 for none
    large: int  # allocations of at least the size of the input


class Case(NamedTuple):
    forward: Pass
    backward: Pass
    peak: int = 2  # sizes of the input: output and gradient of the input
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    options: dict = {}  # noqa: RUF012 - of the layer
    input_grad: bool = True
    plain_grad: bool = True  # else one that autograd has expanded, as that of a sum


# Forward: stats, room for what is gathered, merge, normalize; by collectives a view of the room and the collective too.
# Backward: sums, gradient; by collectives room for what is gathered, a view of it, the collective and their total too.
SHARES = MESSAGE == EXCHANGE
FORWARD, BACKWARD = Pass(4 if SHARES else 6, PACKED, 1), Pass(2 if SHARES else 6, SUMS, 1)

CASES = {
    "float32": Case(FORWARD, BACKWARD),
    "channels_last": Case(FORWARD, BACKWARD, memory_format=torch.channels_last),
    "float64": Case(FORWARD._replace(payload=2 * PACKED), BACKWARD._replace(payload=2 * SUMS), dtype=torch.float64),
    "bfloat16": Case(FORWARD, BACKWARD, dtype=torch.bfloat16),
    "momentum=None": Case(  # adds num_batches_tracked to what ranks compare: a slice, an addition
        FORWARD._replace(ops=FORWARD.ops + 2), BACKWARD, options={"momentum": None}
    ),
    "not affine": Case(FORWARD, BACKWARD, options={"affine": False}),
    "no statistics": Case(FORWARD, BACKWARD, options={"track_running_stats": False}),
    "first layer": Case(FORWARD, Pass(1, 0, 0), peak=1, input_grad=False),
    # Made contiguous once, for the two kernels that read it.
    "expanded gradient": Case(FORWARD, BACKWARD._replace(ops=BACKWARD.ops + 2, large=2), peak=3, plain_grad=False),
}


def make(case):
    layer = bagua_syncbn.SyncBatchNorm2d(CHANNELS, **case.options)
    if case.dtype == torch.float64:
        layer.double()
    x = torch.randn(SHAPE).to(case.dtype, memory_format=case.memory_format).requires_grad_(case.input_grad)
    grad = torch.randn(SHAPE).to(case.dtype, memory_format=case.memory_format)
    return layer, x, grad if case.plain_grad else torch.randn((), dtype=case.dtype).expand(SHAPE)


def check_counts(case):
    """Counts a step of a layer on a rank, after the ranks have learned the order of calls."""
    layer, x, grad = make(case)
    for _ in range(2):
        output = layer(x)
        if output.requires_grad:
            output.backward(grad)
        layer.zero_grad()
        x.grad = None
    *passes, peak = count_step(layer, x, grad)
    is_native = not ops.KERNELS.startswith("reference")
    for most, counted in zip(case[:2], passes, strict=True):
        assert len(counted.ops) <= most.ops, counted.ops
        assert max(counted.collectives, counted.waits) <= (most.payload > 0)
        assert counted.payload <= most.payload
        assert counted.reads == 0
        assert counted.large <= most.large or not is_native
    assert peak // x.nbytes <= case.peak or not is_native


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_count_grows(pool, name, ranks):
    pool.run(check_counts, ranks, CASES[name])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "no statistics", "first layer", "momentum=None"])
def test_large_groups_cost_no_more_than_small_ones(large, name):
    """Except for a float64 message and, with momentum=None, operations on two squared words."""
    case = CASES[name]
    # Stats, merge, normalize; by collectives, the collective too.
    dispatched = (3 if SHARES else 4) + (13 if name == "momentum=None" else 0)
    forward = case.forward._replace(ops=dispatched, payload=8 * (2 * CHANNELS + 7))
    backward = case.backward._replace(ops=min(case.backward.ops, 2 if SHARES else 3))
    large.run(check_counts, 2, case._replace(forward=forward, backward=backward))


def masked(layer, x):
    with bagua_syncbn.masked(layer, torch.ones(1, 1, *SHAPE[2:], dtype=torch.bool)):
        return layer(x)


# Distinct functions of this package that each way of a call runs, forward and backward, from the layer to the wait for
# the answer of each collective: at most.
def after_evaluation(layer, x):
    layer.eval()(x)
    return layer.train()(x)


def without_a_layer(layer, x):
    buffers = layer.running_mean, layer.running_var
    return bagua_syncbn.sync_batch_norm(x, *buffers, layer.weight, layer.bias)


WAYS = {
    "a first call": (lambda layer, x: layer(x), 84, 20),
    "a later call": (lambda layer, x: layer(x), 20, 10),
    "evaluation": (lambda layer, x: layer.eval()(x), 12, 0),
    "after an evaluation": (after_evaluation, 26, 10),
    "without a layer": (without_a_layer, 22, 10),
    "masked": (masked, 40, 10),
    "checkpointed": (lambda layer, x: checkpoint(layer, x, use_reentrant=False), 40, 44),
}


def functions_of(way):
    """Returns the functions of this package that a call runs, forward and backward."""
    call, package = WAYS[way][0], str(Path(bagua_syncbn.__file__).parent)
    layer, x, grad = make(CASES["float32"])
    for _ in range(0 if way == "a first call" else 3):
        call(layer.train(), x).backward(grad)
    called = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.add((Path(frame.f_code.co_filename).stem, frame.f_code.co_name))

    def functions(part):
        called.clear()
        sys.setprofile(note)
        result = part()
        sys.setprofile(None)
        return sorted(called), result

    with torch.autograd.set_multithreading_enabled(False):
        forward, output = functions(lambda: call(layer, x))
        return forward, functions(lambda: output.backward(grad))[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_runs_few_functions(pool, way):
    for found in pool.run(functions_of, 2, way):
        for functions, most in zip(found, WAYS[way][1:], strict=True):
            assert len(functions) <= most, f"{len(functions)}: {functions}"


@pytest.mark.ranks(2)
def test_cumulative_averages_need_no_further_message():
    """With momentum=None, the weight of the batch changes in each step."""
    layer = bagua_syncbn.convert_sync_batchnorm(BatchNormAct(CHANNELS, momentum=None))
    x, grad = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    for _ in range(3):
        layer(x).backward(grad)
    assert [counted.collectives for counted in count_step(layer, x, grad)[:2]] == [1, 1]


def check_beside_torch(train):
    x, grad = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    ours, theirs = bagua_syncbn.SyncBatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
    assert count_step(ours.train(train), x, grad) == count_step(theirs.train(train), x, grad)


@pytest.mark.parametrize("train", [True, False])
def test_one_process_costs_the_same_as_torch(train):
    check_beside_torch(train)


def test_evaluation_costs_the_same_as_torch(pool):
    pool.run(check_beside_torch, 2, False)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("size", [SHAPE, (16, 64, 32, 32)])  # one of them left to F.batch_norm
def test_one_rank_of_a_job_sends_nothing(size):
    x, grad = torch.randn(size, requires_grad=True), torch.randn(size)
    forward, backward, _ = count_step(bagua_syncbn.SyncBatchNorm2d(size[1]), x, grad)
    assert forward.collectives + backward.collectives == 0
