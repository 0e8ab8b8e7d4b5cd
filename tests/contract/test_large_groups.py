"""Large groups sum statistics in float64 instead of gathering rows: accuracy, size of messages, hundreds of ranks."""

import math

import pytest
import torch
from torch import nn

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm
from bagua_syncbn import _ops as ops
from tests.helpers.cases import Case, compare, run_rank
from tests.helpers.messages import message_of
from tests.helpers.threads import run_threads

pytestmark = pytest.mark.usefixtures("single_threaded")


def row(mean, var, count):
    return torch.tensor([*mean, *var, count % 2**24, count // 2**24], dtype=torch.float32)


def sums_of(row):
    """Computes, by definition, the sums that replace ``row`` in large groups."""
    mean, var, (low, high) = row.double().split(2)
    count = low + high * 2**24
    return torch.cat([count * mean, count * (var + mean.square()), count.view(1), torch.tensor(ops.header_sums_of(7))])


def merged(gathered, ranks):
    """Returns the updated running statistics, the count and the number of batches."""
    mean, var, batches = torch.zeros(2).double(), torch.ones(2).double(), torch.tensor(0)
    *_, count = ops.batch_norm_gather_stats(gathered, mean, var, batches, 1.0, 0.0, None, False, ranks)
    return mean, var, count, batches


# Rows of all ranks, and the tolerance of the variance.
HARD = {
    "a mean of a million deviations": ([row([1e3, -1e3], [1e-6, 1e-6], 100)] * 4, 1e-4),
    "counts above 2**24": ([row([1.0, 2.0], [3.0, 4.0], 2**24 + 1), row([1.5, -2.0], [1.0, 5.0], 2**40 + 3)], 1e-12),
    "no deviation": ([row([0.1, 7.7], [0.0, 0.0], 3)] * 3, 0.0),
    "NaN in one channel": ([row([math.nan, 1.0], [math.nan, 1.0], 40), row([1.5, -2.0], [1.0, 5.0], 3)], 1e-12),
    "inf in one channel": ([row([-math.inf, 1.0], [math.nan, 1.0], 40), row([1.5, -2.0], [1.0, 5.0], 3)], 1e-12),
}


@pytest.mark.parametrize("name", HARD)
def test_summed_statistics_equal_gathered_statistics(name):
    rows, tolerance = HARD[name]
    mean, var, count, batches = merged(torch.stack([sums_of(row) for row in rows]).sum(0), len(rows))
    expected = merged(torch.stack(rows), 1)
    torch.testing.assert_close(mean, expected[0], rtol=1e-12, atol=0, equal_nan=True)
    # If all values are equal, rounding leaves a variance of up to 1e-16 times the squared mean.
    torch.testing.assert_close(var, expected[1], rtol=tolerance, atol=1e-14, equal_nan=True)
    assert (count, batches) == expected[2:]


def forward_message(ranks, dtype=torch.float32, sums_float64=True):
    def send(communicator):
        communicator.sums_float64 = sums_float64
        SyncBatchNorm(3, process_group=communicator, dtype=dtype)(torch.randn(2, 3, dtype=dtype))
        return communicator.sent[-1]

    (message,) = set(run_threads(ranks, send))
    return message


def test_from_32_ranks_on_messages_do_not_grow():
    gathered, summed = ("gather", 4 * (2 * 3 + 5)), ("sum", 8 * (2 * 3 + 7))
    assert forward_message(31) == gathered
    assert forward_message(32) == forward_message(64) == forward_message(32, torch.bfloat16) == summed
    assert forward_message(32, torch.float64) == ("gather", 8 * (2 * 3 + 5))  # there is no wider dtype
    assert forward_message(32, sums_float64=False) == gathered


# Cases, and an extra tolerance: rounding a mean of 1e4 deviations adds an error to each value.
CASES = {
    "float16": ({"dtype": torch.float16, "mean": 5.0, "masks": "random", "zero_masked": True}, 0),
    "bfloat16": ({"dtype": torch.bfloat16, "parameter_dtype": torch.float32}, 0),
    "float32": ({"options": {"momentum": None}, "residual": True}, 0),
    "float64": ({"dtype": torch.float64, "masks": "random"}, 0),
    "one rank is not padding": ({"masks": "padded rank"}, 0),
    "a mean of 1e4 deviations": ({"mean": 1e4, "std": 1.0}, 1e-2),
}


@pytest.mark.parametrize("size", [64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_hundreds_of_ranks_equal_one_process(size, name):
    given, also = CASES[name]
    case = Case(tuple(3 * rank % 5 for rank in range(1, size + 1)), (3, 2), **given)
    compare(case, run_threads(size, lambda communicator: run_rank(case, communicator, communicator.rank)), also)


def errors_of(size, eps_of):
    """Returns the error of each rank if the rank's eps in the third step is ``eps_of(rank)``."""

    def run(communicator):
        model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8)), communicator)
        for _ in range(2):
            model(torch.randn(4, 8))
        model[0].eps = eps_of(communicator.rank)
        return message_of(model, torch.randn(4, 8))

    return run_threads(size, run)


@pytest.mark.parametrize("size", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_errors_name_diverging_ranks_and_stay_short(size):
    call, last = "forward of SyncBatchNorm1d '0' of Sequential (8 channels, float32, eps=", range(size - 8, size)
    (message,) = set(errors_of(size, lambda rank: 1e-3 if rank in last else 1e-5))
    assert f"ranks 0, 1, 2, 3, 4, 5, 6, 7 and {size - 16} more: {call}1e-05" in message
    assert f"; ranks {', '.join(map(str, last))}: {call}0.001" in message
    (of_all,) = set(errors_of(size, lambda rank: 1 / (1 + rank)))
    assert [f"rank {rank}: " in of_all for rank in range(size)] == [rank < 7 for rank in range(size)]
    assert f"; ranks 7, 8, 9, 10, 11, 12, 13, 14 and {size - 15} more: others" in of_all
    assert len(message) < 500 < len(of_all) < 1500
