"""Groups of many ranks add statistics up, in float64, where smaller ones gather them; here also with a lower limit."""

import math
import threading

import pytest
import torch

from bagua_syncbn import SyncBatchNorm, ops
from tests.contract.test_contract import GRID
from tests.helpers.cases import Case, check, compare, run_rank

# The contract on real ranks.


@pytest.mark.parametrize("case", [case for case in GRID if len(case[0]) > 1 and case[2][0] != torch.float64], ids=str)
def test_ranks_equal_one_process(large, case):
    splits, (shape, layout), dtypes = case
    check(large, Case(splits, shape, *dtypes, layout))


def test_ranks_equal_one_process_with_each_option(large):
    average, untracked = {"momentum": None}, {"track_running_stats": False}
    check(large, *(Case((3, 0, 2), (3, 4, 2), steps=3, **given) for given in (
        {"options": average}, {"options": average, "dtype": torch.float16}, {"options": average, "way": "compiled"},
        {"options": untracked}, {"dtype": torch.float64}, {"order": 2}, {"frozen": ("input", "weight", "bias")},
        {"way": "accumulated"}, {"masks": "random"},
    )))  # fmt: skip


@pytest.mark.slow
def test_eight_ranks_equal_one_process(large):
    check(large, Case((1, 0, 3, 2, 2, 5, 0, 4), (5, 3), steps=3, options={"momentum": None}))


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
}


@pytest.mark.parametrize("name", HARD)
def test_sums_give_what_the_gather_gives(name):
    rows, tolerance = HARD[name]
    every = added_up(rows)
    assert all(torch.equal(one, every[0]) for one in every)
    mean, var, count, batches = merged(every[0])
    expected = merged(torch.stack(rows))
    torch.testing.assert_close(mean, expected[0], rtol=1e-12, atol=0)
    # A variance of nothing but rounding is no more than that of the squared mean.
    torch.testing.assert_close(var, expected[1], rtol=tolerance, atol=1e-14)
    assert (count, batches) == expected[2:]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_channel_that_is_not_finite_on_one_rank_stays_alone(value):
    rows = [*drawn(3, 1.0, 1.0), row([value, 1.0], [math.nan, 1.0], 40)]
    mean, var, count, _ = merged(added_up(rows)[0])
    expected = merged(torch.stack(rows))
    torch.testing.assert_close(mean, expected[0], equal_nan=True)
    torch.testing.assert_close(var, expected[1], equal_nan=True)
    assert var.isnan().tolist() == [True, False]
    assert count == 160


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


def test_a_rank_whose_words_are_the_mean_of_all_finds_out_too():
    rows = [row([1.0, 2.0], [3.0, 4.0], 10) for _ in range(3)]
    rows[0][-1] -= 1
    rows[2][-1] += 1
    for result in added_up(rows):
        assert result[0, -1] < 0
        assert result[0, -5].isnan()


# Many ranks, as threads.


class Meeting:
    """Where the threads meet, each a rank."""

    def __init__(self, size):
        self.size, self.sent, self.barrier = size, [None] * size, threading.Barrier(size, timeout=60)
        self.gathered = self.total = None


class ThreadedCommunicator:
    """One rank of a :class:`Meeting`."""

    def __init__(self, meeting, rank):
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.messages = []

    def _meet(self, packed):
        self._meeting.sent[self.rank] = packed.clone()
        if self._meeting.barrier.wait() == 0:
            self._meeting.gathered = torch.stack(self._meeting.sent)
            self._meeting.total = self._meeting.gathered.sum(0)
        self._meeting.barrier.wait()
        return self._meeting

    def all_gather(self, packed):
        self.messages.append(("gather", packed.nbytes))
        return self._meet(packed).gathered.clone()

    def all_reduce(self, packed):
        self.messages.append(("sum", packed.nbytes))
        return self._meet(packed).total.clone()


@pytest.mark.parametrize("ranks", [64, 256])
def test_many_ranks_equal_one_process(ranks, single_threaded):
    case = Case(tuple(index % 3 for index in range(ranks)), (3, 2), mean=5.0)
    meeting, results = Meeting(ranks), [None] * ranks
    communicators = [ThreadedCommunicator(meeting, rank) for rank in range(ranks)]

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


# The cost of a message.


class Alike:
    """So many ranks that all do the same: sizes of messages without anyone to send them to."""

    rank = 0

    def __init__(self, size):
        self.size, self.messages = size, []

    def all_gather(self, packed):
        self.messages.append(("gather", packed.nbytes))
        return packed.repeat(self.size, 1)

    def all_reduce(self, packed):
        self.messages.append(("sum", packed.nbytes))
        return packed * self.size


def forward_message(ranks, channels=2048, dtype=torch.float32, **attributes):
    communicator = Alike(ranks)
    vars(communicator).update(attributes)
    SyncBatchNorm(channels, process_group=communicator, dtype=dtype)(torch.randn(2, channels, dtype=dtype))
    return communicator.messages[-1]


def test_who_adds_up_is_decided_by_what_all_ranks_know():
    gathered, added = ("gather", 4 * (2 * 3 + 5)), ("sum", 8 * (2 * 3 + 13))
    assert forward_message(31, 3) == gathered
    assert forward_message(32, 3) == forward_message(32, 3, torch.bfloat16) == added
    assert forward_message(32, 3, torch.float64) == ("gather", 8 * (2 * 3 + 5))  # has no wider dtype
    assert forward_message(32, 3, adds_float64=False) == gathered
