"""Headers of messages: the ops detect ranks that made different calls, and invalid counts."""

import pytest
import torch

from bagua_syncbn._ops import header_sums_of
from tests.helpers.steps import assert_same_bits

CHANNELS = 260  # more channels than a CUDA block has threads
HEADER = [5, 2**24 - 1, 0]  # kind of layer, options, number
FULL = 2**36 - 1  # fingerprint with all bits set
INVALID_COUNTS = [(torch.nan, 0), (-1, 0), (0.5, 0), (2.0**24, 0), (0, 2.0**30)]


def gathered(ops, *headers, dtype=torch.float32):
    """Returns the rows of ranks with these headers; empty headers are not sent."""
    given = [(header[0] * 2**24 + header[1], header[2]) if header else () for header in headers]
    return torch.stack([ops.batch_norm_stats(torch.randn(4, CHANNELS, 3, dtype=dtype), *args) for args in given])


def summed(ops, *fingerprints):
    """Returns the messages of ranks with these fingerprints, to be added."""
    return [ops.batch_norm_stats(torch.randn(4, CHANNELS, 3), own, 0, None, True) for own in fingerprints]


def buffers():
    return [torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.tensor(7)]


def check_fault(ops, received, expected, *arguments):
    """Checks that merging ``received`` gives NaN, keeps the buffers and records ``expected``, once."""
    fault, tracked = torch.zeros(8, dtype=torch.int64), buffers()
    for momentum in (0.1, None):
        mean, invstd, _ = ops.batch_norm_gather_stats(received, *tracked, momentum, 1e-5, fault, *arguments)
        assert mean.isnan().all()
        assert invstd.isnan().all()
        assert_same_bits(tracked, buffers())
        assert fault.tolist() == expected
        if received.dim() == 2:
            received[2, -1] += 1  # a later fault, which is not recorded
    ops.batch_norm_gather_stats(received, *tracked, 0.1, 1e-5, None, *arguments)  # without a record


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_headers_change_nothing(ops, dtype):
    rows, fault, tracked = gathered(ops, HEADER, HEADER, dtype=dtype), torch.zeros(8, dtype=torch.int64), buffers()
    assert rows[:, -3:].tolist() == [HEADER, HEADER]
    merged = ops.batch_norm_gather_stats(rows, *tracked, 0.1, 1e-5, fault, True)
    without, plain = buffers(), rows[:, :-3].contiguous()
    assert_same_bits(merged, ops.batch_norm_gather_stats(plain, *without, 0.1, 1e-5))
    assert_same_bits(tracked, without)
    assert not fault.any()


@pytest.mark.parametrize(("rank", "word"), [(1, 0), (2, 1), (1, 2)])
def test_a_rank_with_a_different_header_is_found(ops, rank, word):
    headers = [list(HEADER) for _ in range(3)]
    headers[rank][word] ^= 1
    check_fault(ops, gathered(ops, *headers), [1, rank, *HEADER, *headers[rank]])


@pytest.mark.parametrize(("low", "high"), INVALID_COUNTS)
def test_the_first_invalid_count_is_found(ops, low, high):
    rows = gathered(ops, HEADER, HEADER, HEADER)
    rows[1:, -5], rows[1:, -4] = low, high
    check_fault(ops, rows, [2, 1, *HEADER, *HEADER])


SUM_FAULT = [3, -41, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("part", [1, 2**12, 2**24])
@pytest.mark.parametrize("ranks", [2, 3, 64, 4096, 2**18])
def test_a_rank_with_a_different_summed_header_is_found(ops, part, ranks):
    for fingerprint in (7 * part, FULL):
        own, other = summed(ops, fingerprint, fingerprint - part)
        check_fault(ops, own * (ranks - 1) + other, SUM_FAULT, False, ranks, -41)
    own, less, more = summed(ops, 7 * part, 6 * part, 8 * part)  # the mean of all three equals the first
    check_fault(ops, own + less + more, SUM_FAULT, False, 3, -41)


@pytest.mark.parametrize("count", [torch.nan, -1, 0.5, 2.0**54, torch.inf])
def test_an_invalid_count_in_a_sum_is_found(ops, count):
    sums = sum(summed(ops, 7, 7, 7))
    sums[2 * CHANNELS] = count
    check_fault(ops, sums, SUM_FAULT, False, 3, -41)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("which", [0, 1], ids=["mean", "var"])
@pytest.mark.parametrize("is_sum", [False, True])
def test_buffers_keep_their_values_if_statistics_are_not_finite(ops, is_sum, which, value, momentum):
    received = sum(summed(ops, 7, 7)) if is_sum else gathered(ops, HEADER, HEADER)
    received.view(-1, received.size(-1))[-1, which * CHANNELS + CHANNELS - 1] = value  # the last channel's
    tracked, fault = buffers(), torch.zeros(8, dtype=torch.int64)
    mean, invstd, count = ops.batch_norm_gather_stats(received, *tracked, momentum, 1e-5, fault, True, 2)
    assert_same_bits(tracked, buffers())
    assert not (mean[-1].isfinite() and 0 < invstd[-1] < torch.inf)
    assert count == 24
    ops.batch_norm_gather_stats(received, *tracked, momentum, 1e-5, fault, False, 2)
    assert not torch.cat(tracked[:2]).isfinite().all()
    assert tracked[2] == 8
    assert not fault.any()


def gradient(ops, headers, input):
    """Returns the gradient and the fault for ranks that sent equal sums and ``headers``."""
    ranks, (mean, invstd, weight) = len(headers), (torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.ones(CHANNELS))
    sums, *_ = ops.batch_norm_backward_reduce(input, input, mean, invstd, weight)
    sent = [torch.cat([sums, torch.tensor(header, dtype=sums.dtype)]) for header in headers]
    fault, count = torch.zeros(8, dtype=torch.int64), torch.tensor(12 * ranks)
    arguments = input, input, weight, mean, invstd, sum(sent), count, ranks, fault, 41
    return ops.batch_norm_backward_elemt(*arguments), fault.tolist()


@pytest.mark.parametrize("shape", [(4, CHANNELS, 3), (40, CHANNELS)])
def test_different_headers_in_backward_sums_are_found(ops, shape):
    input, same = torch.randn(shape), [3, 9, 2, 4]
    for headers, differ in (
        ([[3, 9], [3, 9]], False),
        ([[]], False),
        ([same, [3, 9, 1, 1]], True),
        ([[*same, 5, 25], [*same, 1, 1]], True),
        ([[3, 9], [2, 4], [4, 16]], True),  # the mean of all three equals the first
    ):
        grad, fault = gradient(ops, headers, input)
        assert grad.isnan().all() == grad.isnan().any() == differ
        assert fault == [3 * differ, 41 * differ, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("low", "high"), [(0, 2**29), (2**24 - 1, 2**29 - 1), (1, 0)])
def test_float64_rows_hold_exact_counts_up_to_the_largest_valid_count(ops, low, high):
    rows = gathered(ops, [], [], dtype=torch.float64)
    rows[0, -2], rows[0, -1] = low, high
    assert ops.batch_norm_gather_stats(rows, None, None, None, None, 1e-5)[2] == low + high * 2**24 + 12


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1000, 1024])
def test_float32_sums_of_headers_are_exact(ranks):
    from bagua_syncbn._reliability.signatures import exact_bits

    hashes = [hash((layer * 2**24 + 1, message, 5)) for layer, message in ((0, 1), (1, 0), (2**24 - 1, 77))]
    headers = {tuple(header_sums_of(number & exact_bits(ranks))) for number in (*hashes, -1)}  # -1: all bits are set
    assert len(headers) == 4
    for header in map(torch.tensor, headers):
        total = torch.zeros(6)
        for _ in range(ranks):
            total += header
        assert torch.equal(total, (ranks * header).float())
