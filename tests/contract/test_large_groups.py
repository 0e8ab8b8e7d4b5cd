"""Large groups sum statistics in float64 instead of gathering them; tests also lower the limit."""

import math

import pytest
import torch

from bagua_syncbn import SyncBatchNorm, ops
from tests.contract.test_contract import GRID, OPTIONS, SPLITS
from tests.helpers.cases import Case, check

MORE = [*OPTIONS, {"order": 2}, {"way": "accumulated"}, {"masks": "random"}]


@pytest.mark.parametrize("splits", SPLITS[1:], ids=str)
def test_ranks_equal_one_process(large, splits):
    check(large, *(Case(own, shape, *dtypes, layout) for own, (shape, layout), dtypes in GRID
                   if own == splits and dtypes[0] != torch.float64))  # fmt: skip


@pytest.mark.parametrize("splits", [(3, 0, 2), pytest.param((1, 0, 3, 2, 2, 5, 0, 4), marks=pytest.mark.slow)], ids=str)
def test_ranks_equal_one_process_with_each_option(large, splits):
    check(large, *(Case(splits, **{"shape": (3, 4, 2), "steps": 3} | given) for given in MORE))


# Sums held against the gather.


def row(mean, var, count):
    return torch.tensor([*mean, *var, count % 2**24, count // 2**24], dtype=torch.float32)


def sums_of(row):
    """Returns the sums that a rank sends instead of ``row``, by definition."""
    mean, var, (low, high) = row.double().split(2)
    count = low + high * 2**24
    return torch.cat([count * mean, count * (var + mean.square()), count.view(1), torch.tensor(ops.header_sums_of(7))])


def merged(gathered, ranks):
    """Returns the updated running statistics, the count and the number of batches."""
    mean, var, batches = torch.zeros(2).double(), torch.ones(2).double(), torch.tensor(0)
    *_, count = ops.batch_norm_gather_stats(gathered, mean, var, batches, 1.0, 0.0, None, False, ranks)
    return mean, var, count, batches


def drawn(ranks, mean, std):
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(ranks, 40, 2, generator=generator, dtype=torch.float64) * std + mean
    return [ops.batch_norm_stats(batch.float()) for batch in batches]


HARD = {
    "a large mean": (drawn(64, 1e3, 1e-2), 2e-5),
    "a mean of a million deviations": ([row([1e3, -1e3], [1e-6, 1e-6], 100)] * 4, 1e-4),
    "counts above 2**24": ([row([1.0, 2.0], [3.0, 4.0], 2**24 + 1), row([1.5, -2.0], [1.0, 5.0], 2**40 + 3)], 1e-12),
    "empty ranks": ([row([0.0, 0.0], [0.0, 0.0], 0), *drawn(2, 3.0, 2.0), row([0.0, 0.0], [0.0, 0.0], 0)], 1e-12),
    "all ranks empty": ([row([0.0, 0.0], [0.0, 0.0], 0)] * 3, 0.0),
    "no deviation": ([row([0.1, 7.7], [0.0, 0.0], 3)] * 3, 0.0),
} | {
    f"{value} in one channel": ([*drawn(3, 1.0, 1.0), row([value, 1.0], [math.nan, 1.0], 40)], 1e-6)
    for value in (math.nan, math.inf, -math.inf)
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_summed_statistics_equal_gathered_ones(name):
    rows, tolerance = HARD[name]
    mean, var, count, batches = merged(torch.stack([sums_of(row) for row in rows]).sum(0), len(rows))
    expected = merged(torch.stack(rows), 1)
    torch.testing.assert_close(mean, expected[0], rtol=1e-12, atol=0, equal_nan=True)
    # A variance of nothing but rounding is no more than that of the squared mean.
    torch.testing.assert_close(var, expected[1], rtol=tolerance, atol=1e-14, equal_nan=True)
    assert (count, batches) == expected[2:]


@pytest.mark.parametrize("mean", [1e2, 1e4, 1e5])
def test_summed_statistics_have_float64_accuracy(mean):
    """The relative error of the variance is 1e-16 * mean**2 / var; float32 input loses it from 1e7 deviations on."""
    generator = torch.Generator().manual_seed(0)
    batches = (torch.randn(64, 50, 3, generator=generator, dtype=torch.float64) + mean).float()
    sums = torch.stack([ops.batch_norm_stats(batch, 7, 0, None, True) for batch in batches]).sum(0)
    buffers = torch.zeros(3).double(), torch.ones(3).double(), torch.tensor(0)
    ops.batch_norm_gather_stats(sums, *buffers, 1.0, 0.0, None, False, 64)
    values = batches.double().flatten(0, 1)
    torch.testing.assert_close(buffers[0], values.mean(0), rtol=1e-9 / mean + 1e-14, atol=0)
    torch.testing.assert_close(buffers[1], values.var(0), rtol=1e-6 + 5e-16 * mean**2, atol=0)


class Alike:
    """A communicator in which all ranks send the same."""

    rank = 0

    def __init__(self, size, **attributes):
        self.size, self.messages = size, []
        vars(self).update(attributes)

    def all_gather(self, packed):
        self.messages.append(("gather", packed.nbytes))
        return packed.repeat(self.size, 1)

    def all_reduce(self, packed):
        self.messages.append(("sum", packed.nbytes))
        return packed * self.size


def forward_message(ranks, dtype=torch.float32, **attributes):
    communicator = Alike(ranks, **attributes)
    SyncBatchNorm(3, process_group=communicator, dtype=dtype)(torch.randn(2, 3, dtype=dtype))
    return communicator.messages[-1]


def test_only_shared_facts_decide_whether_ranks_sum():
    gathered, added = ("gather", 4 * (2 * 3 + 5)), ("sum", 8 * (2 * 3 + 7))
    assert forward_message(31) == gathered
    assert forward_message(32) == forward_message(32, torch.bfloat16) == added
    assert forward_message(32, torch.float64) == ("gather", 8 * (2 * 3 + 5))  # has no wider dtype
    assert forward_message(32, adds_float64=False) == gathered
