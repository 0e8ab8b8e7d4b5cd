"""The ops in a single process: definition, schema, fake kernels, no host reads."""

import pytest
import torch

from bagua_syncbn import _ops as ops
from tests.helpers.cases import laid_out
from tests.helpers.observed import ForbidHostReads

pytestmark = pytest.mark.reference_too


def arguments(name, shape=(4, 3, 5), dtype=torch.float32, parameter_dtype=None, weight=True):
    """Returns sample arguments. ``name`` is an op's name, and optionally a space and a set of optional arguments."""
    channels = shape[1]
    accumulate = ops.accumulate_dtype(dtype)
    input, grad_output = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    mean, invstd = torch.randn(channels, dtype=accumulate), torch.rand(channels, dtype=accumulate) + 0.5
    scale, bias = (torch.randn(channels, dtype=parameter_dtype or dtype) if weight else None for _ in range(2))
    sums, count = torch.randn(2 * channels, dtype=accumulate), torch.tensor(17)
    running = torch.rand(2, channels).to(parameter_dtype or dtype).unbind()
    gathered = torch.stack([ops.batch_norm_stats(torch.randn(size, channels, 2).to(dtype)) for size in (2, 0, 3)])
    given = {
        "batch_norm_stats": (input,),
        "batch_norm_gather_stats": (gathered, *running, torch.tensor(3), 0.1, 1e-5),
        "batch_norm_elemt": (input, scale, bias, mean, invstd),
        "batch_norm_backward_reduce": (grad_output, input, mean, invstd, scale),
        "batch_norm_backward_elemt": (grad_output, input, scale, mean, invstd, sums, count),
    }[name.split()[0]]
    mask, residual = torch.rand(input.select(1, 0).shape) < 0.5, torch.randn(shape).to(dtype)
    more = {
        "batch_norm_stats mask": (None, 0, mask),
        "batch_norm_elemt act": (residual, 4, 0.5),
        "batch_norm_backward_reduce act": (None, bias, residual, 4, 0.5, torch.zeros_like(input)),
        "batch_norm_backward_elemt mask": (1, None, 0, mask),
        "batch_norm_backward_elemt act": (1, None, 0, None, bias, 4, 0.5),
    }
    return given + more.get(name, ())


OPS = [name for name in dir(ops) if name.startswith("batch_norm_")]
ACTIVATED = [f"batch_norm_{name} act" for name in ("elemt", "backward_reduce", "backward_elemt")]
NAMES = [*OPS, "batch_norm_stats mask", "batch_norm_backward_elemt mask", *ACTIVATED]


def op_of(name):
    return getattr(ops, name.split()[0])


@pytest.mark.parametrize("name", [*NAMES, "batch_norm_backward_elemt into"])
def test_schemas_fakes_and_gradients_pass_opcheck(name):
    args = [laid_out(a, "channels_last") if is_input(a) else a for a in arguments(name, (2, 3, 4, 5))]
    given = {"grad_input": torch.empty_like(args[0])} if name.endswith("into") else {}
    torch.library.opcheck(op_of(name), args, given)


def is_input(argument):
    return isinstance(argument, torch.Tensor) and argument.dim() == 4


# Skips the check that traces, which takes nearly all the time.
FAST_CHECKS = "test_schema", "test_autograd_registration", "test_faketensor"


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_shapes_and_dtypes(name):
    for given in (
        ((5, 3), torch.float32),
        ((2, 3, 4, 5), torch.float64, torch.float32, False),
        ((2, 3, 4, 5), torch.float16),
        ((1, 1, 1), torch.bfloat16, torch.float32),
        ((0, 3, 4), torch.float32),
    ):
        torch.library.opcheck(op_of(name), arguments(name, *given), test_utils=FAST_CHECKS)


@pytest.mark.parametrize("name", [*NAMES, "batch_norm_gather_stats average"])
def test_reads_nothing_on_the_host(name):
    args = arguments(name)
    with ForbidHostReads():
        op_of(name)(*args[:4], None, 1e-5) if name.endswith("average") else op_of(name)(*args)


def test_stats_by_hand():
    input = torch.tensor([[[1.0, 2.0], [-1.0, 5.0]], [[3.0, 6.0], [-1.0, 5.0]]])
    assert ops.batch_norm_stats(input).tolist() == [3.0, 2.0, 3.5, 9.0, 4.0, 0.0]


@pytest.mark.parametrize("count", [0, 7, 2**24 - 1, 2**24, 2**24 + 1])
def test_counts_are_exact(count):
    packed = ops.batch_norm_stats(torch.zeros((), dtype=torch.float16).expand(1, 1, count))
    assert packed.dtype == torch.float32
    assert int(packed[-2]) + 2**24 * int(packed[-1]) == count
    _, _, merged = ops.batch_norm_gather_stats(packed.expand(3, -1), None, None, None, None, 1e-5)
    assert merged.item() == 3 * count


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 1)])
def test_fewer_than_two_values_leave_the_buffers_unchanged(counts):
    rows = torch.stack([ops.batch_norm_stats(torch.full((count, 2), torch.nan)) for count in counts])
    buffers = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor(5)
    for momentum in (0.1, None):
        ops.batch_norm_gather_stats(rows, *buffers, momentum, 1e-5)
        assert [buffer.tolist() for buffer in buffers] == [[1.0, 2.0], [3.0, 4.0], 5]
