"""Groups of many ranks add statistics up, in float64, where smaller ones gather them; here also with a lower limit."""

import math
import threading

import pytest
import torch

from bagua_syncbn import SyncBatchNorm, ops
from bagua_syncbn.sync.faults import found_text
from tests.contract.test_contract import GRID, OPTIONS, SPLITS
from tests.helpers.cases import Case, check, compare, run_rank

MORE = [*OPTIONS, {"options": {"momentum": None}, "way": "compiled"}, {"order": 2}, {"way": "accumulated"}]
MORE.append({"masks": "random"})


@pytest.mark.parametrize("splits", SPLITS[1:], ids=str)
def test_ranks_equal_one_process(large, splits):
    check(large, *(Case(own, shape, *dtypes, layout) for own, (shape, layout), dtypes in GRID
                   if own == splits and dtypes[0] != torch.float64))  # fmt: skip


@pytest.mark.parametrize("splits", [(3, 0, 2), pytest.param((1, 0, 3, 2, 2, 5, 0, 4), marks=pytest.mark.slow)], ids=str)
def test_ranks_equal_one_process_with_each_option(large, splits):
    check(large, *(Case(splits, **{"shape": (3, 4, 2), "steps": 3} | given) for given in MORE))


# Sums held against the gather.


def row(mean, var, count):
    words = torch.tensor([5.0, 2**24 - 1, 7])
    return torch.cat([torch.tensor(mean), torch.tensor(var), torch.tensor([count % 2**24, count // 2**24]), words])


def added_up(rows):
    """Returns what each rank makes of the sum of all messages."""
    sent = []
    for stats in rows:
        ops.add_up_stats(stats, len(rows), lambda message: sent.append(message) or message)
    return [ops.add_up_stats(stats, len(rows), lambda _: torch.stack(sent).sum(0)) for stats in rows]


def merged(rows):
    """Returns mean, variance, count and tracked batches as they reach the buffers."""
    mean, var, batches = torch.zeros(2).double(), torch.ones(2).double(), torch.tensor(0)
    *_, count = ops.batch_norm_gather_stats(rows, mean, var, batches, 1.0, 0.0)
    return mean, var, count, batches


def drawn(ranks, mean, std):
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(ranks, 40, 2, generator=generator, dtype=torch.float64) * std + mean
    return [ops.batch_norm_stats(batch.float(), 6 * 2**24 - 1, 7) for batch in batches]


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
def test_sums_give_what_the_gather_gives(name):
    rows, tolerance = HARD[name]
    every = added_up(rows)
    torch.testing.assert_close(every, [every[0]] * len(rows), rtol=0, atol=0, equal_nan=True)
    mean, var, count, batches = merged(every[0])
    expected = merged(torch.stack(rows))
    torch.testing.assert_close(mean, expected[0], rtol=1e-12, atol=0, equal_nan=True)
    # A variance of nothing but rounding is no more than that of the squared mean.
    torch.testing.assert_close(var, expected[1], rtol=tolerance, atol=1e-14, equal_nan=True)
    assert (count, batches) == expected[2:]


@pytest.mark.parametrize("word", [-1, -2, -3])
@pytest.mark.parametrize("ranks", [2, 3, 4096])
def test_one_word_of_one_rank_that_differs_is_found(word, ranks):
    rows = [row([1.0, 2.0], [3.0, 4.0], 10)] * ranks
    other = rows[0].clone()
    other[word] -= 1
    said = []
    for stats in (rows[0], other):
        ops.add_up_stats(stats, ranks, lambda message: said.append(message) or message)
    for stats, words in ((rows[0], rows[0]), (other, other)):
        result = ops.add_up_stats(stats, ranks, lambda _: said[0] * (ranks - 1) + said[1])
        buffers, fault = [torch.zeros(2), torch.ones(2), torch.tensor(0)], torch.zeros(8, dtype=torch.int64)
        mean, *_ = ops.batch_norm_gather_stats(result, *buffers, 0.1, 1e-5, fault)
        assert mean.isnan().all()
        assert [buffer.tolist() for buffer in buffers] == [[0, 0], [1, 1], 0]
        assert fault.tolist()[5:] == [*words[-3:-1].tolist(), -1 - words[-1]]
        assert f", call {words[-1]:.0f};" in found_text(fault.tolist())


def test_a_rank_whose_words_are_the_mean_of_all_finds_out_too():
    rows = [row([1.0, 2.0], [3.0, 4.0], 10) for _ in range(3)]
    rows[0][-1] -= 1
    rows[2][-1] += 1
    for result in added_up(rows):
        assert result[0, -1] < 0
        assert result[0, -5].isnan()


class Alike:
    """A communicator of ranks that all send the same."""

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


class Threaded(Alike):
    """One of many ranks, each a thread."""

    def _meet(self, packed):
        self.sent[self.rank] = packed.clone()
        self.barrier.wait()
        gathered = torch.stack(self.sent)
        self.barrier.wait()
        return gathered

    def all_gather(self, packed):
        super().all_gather(packed)
        return self._meet(packed)

    def all_reduce(self, packed):
        super().all_reduce(packed)
        return self._meet(packed).sum(0)


@pytest.mark.parametrize("ranks", [64, 256])
def test_many_ranks_equal_one_process(ranks, single_threaded):
    case = Case(tuple(index % 3 for index in range(ranks)), (3, 2), mean=5.0)
    shared = {"sent": [None] * ranks, "barrier": threading.Barrier(ranks, timeout=60)}
    communicators, results = [Threaded(ranks, rank=rank, **shared) for rank in range(ranks)], [None] * ranks

    def run(rank):
        results[rank] = run_rank(case, communicators[rank], rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    compare(case, results)
    for communicator in communicators:
        assert communicator.messages[-2:] == [("sum", 8 * (2 * 3 + 13)), ("sum", 4 * (2 * 3 + 6))]


def forward_message(ranks, dtype=torch.float32, **attributes):
    communicator = Alike(ranks, **attributes)
    SyncBatchNorm(3, process_group=communicator, dtype=dtype)(torch.randn(2, 3, dtype=dtype))
    return communicator.messages[-1]


def test_who_adds_up_is_decided_by_what_all_ranks_know():
    gathered, added = ("gather", 4 * (2 * 3 + 5)), ("sum", 8 * (2 * 3 + 13))
    assert forward_message(31) == gathered
    assert forward_message(32) == forward_message(32, torch.bfloat16) == added
    assert forward_message(32, torch.float64) == ("gather", 8 * (2 * 3 + 5))  # has no wider dtype
    assert forward_message(32, adds_float64=False) == gathered
