"""Words that travel with the statistics, and counts that are none: what the ops do where the ranks do not agree."""

import itertools
import math

import pytest
import torch

from bagua_syncbn.ops import parts_of, reference

CHANNELS = 260  # more than one block has threads


def caller_of(said):
    """Returns the arguments of an op that make the words for layer, options and call."""
    if not said:
        return ()
    layer, options, call = said
    return layer * 2**24 + options, call


def gathered(ops, *words, dtype=torch.float32):
    return torch.stack(
        [ops.batch_norm_stats(torch.randn(4, CHANNELS, 3, dtype=dtype), *caller_of(said)) for said in words]
    )


def buffers():
    return [torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.tensor(7)]


SAID = [5, 2**24 - 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_headers_change_nothing(ops, dtype):
    rows, fault, tracked = gathered(ops, SAID, SAID, dtype=dtype), torch.zeros(8, dtype=torch.int64), buffers()
    assert rows[:, -3:].tolist() == [SAID, SAID]
    merged = ops.batch_norm_gather_stats(rows, *tracked, 0.1, 1e-5, fault, True)
    without, plain = buffers(), rows[:, :-3].contiguous()
    for got, expected in zip(merged, ops.batch_norm_gather_stats(plain, *without, 0.1, 1e-5), strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(tracked, without, strict=True):
        assert torch.equal(got, expected)
    assert not fault.any()


@pytest.mark.parametrize(("rank", "word"), [(1, 0), (2, 1), (1, 2)])
def test_a_rank_with_another_header_is_found(ops, rank, word):
    words = [list(SAID) for _ in range(3)]
    words[rank][word] ^= 1
    found(ops, gathered(ops, *words), [1, rank, *SAID, *words[rank]])


NO_COUNTS = [(torch.nan, 0), (-1, 0), (0.5, 0), (2.0**24, 0), (0, 2.0**30)]


@pytest.mark.parametrize(("low", "high"), NO_COUNTS)
def test_an_invalid_count_is_found(ops, low, high):
    rows = gathered(ops, SAID, SAID, SAID)
    rows[1:, -5], rows[1:, -4] = low, high  # the first one is named
    found(ops, rows, [2, 1, *SAID, *SAID])


def found(ops, rows, expected):
    fault, tracked = torch.zeros(8, dtype=torch.int64), buffers()
    for momentum in (0.1, None):
        mean, invstd, _ = ops.batch_norm_gather_stats(rows, *tracked, momentum, 1e-5, fault)
        assert mean.isnan().all()
        assert invstd.isnan().all()
        for got, before in zip(tracked, buffers(), strict=True):
            assert torch.equal(got, before)
    assert fault.tolist() == expected
    rows[2, -1] += 1
    ops.batch_norm_gather_stats(rows, *tracked, 0.1, 1e-5, fault)
    assert fault.tolist() == expected  # the first one stays
    ops.batch_norm_gather_stats(rows, *tracked, 0.1, 1e-5)


def added_up(ops, *fingerprints):
    return [ops.batch_norm_stats(torch.randn(4, CHANNELS, 3), own, 0, None, True) for own in fingerprints]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_summed_statistics_merge_like_rows(ops, momentum):
    inputs, fault = [torch.randn(n, CHANNELS, 3) + 5 for n in (4, 0, 7)], torch.zeros(8, dtype=torch.int64)
    sums = sum(ops.batch_norm_stats(input, 2**36 - 1, 0, None, True) for input in inputs)
    rows = torch.stack([ops.batch_norm_stats(input) for input in inputs])
    results = []
    for gathered, more in ((sums, (fault, False, 3, 41)), (rows, ())):
        tracked = buffers()
        merged = ops.batch_norm_gather_stats(gathered, *tracked, momentum, 1e-5, *more)
        assert [tensor.dtype for tensor in merged] == [torch.float32, torch.float32, torch.int64]
        results.append([*merged, *tracked])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    assert not fault.any()


@pytest.mark.parametrize("part", [1, 2**12, 2**24])
@pytest.mark.parametrize("ranks", [2, 3, 64, 4096, 2**18])
def test_a_rank_with_another_summed_header_is_found(ops, part, ranks):
    for said in (7 * part, 2**36 - 1):
        own, other = added_up(ops, said, said - part)
        refused(ops, own * (ranks - 1) + other, ranks)
    own, less, more = added_up(ops, 7 * part, 6 * part, 8 * part)
    refused(ops, own + less + more, 3)  # the mean of all is the word of one


@pytest.mark.parametrize("count", [torch.nan, -1, 0.5, 2.0**54, torch.inf])
def test_an_invalid_count_is_found_in_a_sum(ops, count):
    sums = sum(added_up(ops, 7, 7, 7))
    sums[2 * CHANNELS] = count
    refused(ops, sums, 3)


def refused(ops, sums, ranks):
    fault, tracked = torch.zeros(8, dtype=torch.int64), buffers()
    for momentum, call in ((0.1, -41), (None, 3)):  # the first one stays
        mean, invstd, _ = ops.batch_norm_gather_stats(sums, *tracked, momentum, 1e-5, fault, False, ranks, call)
        assert mean.isnan().all()
        assert invstd.isnan().all()
        assert all(torch.equal(got, before) for got, before in zip(tracked, buffers(), strict=True))
    assert fault.tolist() == [3, -41, 0, 0, 0, 0, 0, 0]
    ops.batch_norm_gather_stats(sums, *tracked, 0.1, 1e-5, None, False, ranks)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("which", ["mean", "square"])
def test_nonfinite_sums_leave_the_buffers_unchanged(ops, which, value):
    sums = sum(added_up(ops, 7, 7))
    sums[(CHANNELS if which == "square" else 0) + CHANNELS - 1] = value  # the last channel's
    tracked = buffers()
    mean, invstd, count = ops.batch_norm_gather_stats(sums, *tracked, 0.1, 1e-5, None, True, 2)
    assert all(torch.equal(got, before) for got, before in zip(tracked, buffers(), strict=True))
    assert not (mean[-1].isfinite() and 0 < invstd[-1] < torch.inf)
    assert count == 24
    ops.batch_norm_gather_stats(sums, *tracked, 0.1, 1e-5, None, False, 2)
    assert not torch.cat(tracked[:2]).isfinite().all()
    assert tracked[2] == 8


def gradient(ops, words, ranks, input=None):
    """The gradient where each of the ranks has sent the same sums, and its words."""
    input = torch.randn(4, CHANNELS, 3) if input is None else input
    mean, invstd, weight = torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.ones(CHANNELS)
    sums, *_ = ops.batch_norm_backward_reduce(input, input, mean, invstd, weight)
    sent = [torch.cat([sums, torch.tensor(said, dtype=sums.dtype)]) for said in words]
    fault, count = torch.zeros(8, dtype=torch.int64), torch.tensor(12 * ranks)
    arguments = input, input, weight, mean, invstd, sum(sent), count, ranks, fault, 41
    return ops.batch_norm_backward_elemt(*arguments), fault.tolist()


@pytest.mark.parametrize("shape", [(4, CHANNELS, 3), (40, CHANNELS)])
def test_different_headers_in_a_gradient_sum_are_found(ops, shape):
    input = torch.randn(shape)
    for words in ([[3, 9], [3, 9]], [[3, 9, 0, 0], [3, 9, 0, 0]], [[]]):
        grad, fault = gradient(ops, words, len(words), input)
        assert not grad.isnan().any()
        assert not any(fault)
    # Words of the same sum, and of the same sum but for one rank of three.
    same = [3, 9, 2, 4]
    for words in ([[2, 4], [4, 16]], [same, [3, 9, 1, 1]], [[*same, 5, 25], [*same, 1, 1]], [[3, 9], [2, 4], [4, 16]]):
        grad, fault = gradient(ops, words, len(words), input)
        assert grad.isnan().all()
        assert fault == [3, 41, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("which", ["mean", "var"])
def test_nonfinite_statistics_leave_the_buffers_unchanged(ops, which, value, momentum):
    rows = gathered(ops, SAID, SAID)
    rows[1, (CHANNELS if which == "var" else 0) + CHANNELS - 1] = value  # the last channel's
    tracked, fault = buffers(), torch.zeros(8, dtype=torch.int64)
    ops.batch_norm_gather_stats(rows, *tracked, momentum, 1e-5, fault, True)
    assert all(torch.equal(got, before) for got, before in zip(tracked, buffers(), strict=True))
    ops.batch_norm_gather_stats(rows, *tracked, momentum, 1e-5, fault)
    assert not torch.cat(tracked[:2]).isfinite().all()
    assert tracked[2] == 8
    assert not fault.any()


def test_implementations_agree_on_counts_up_to_the_last(ops):
    rows = gathered(ops, [], [], dtype=torch.float64)
    for low, high in [(0, 2**29), (2**24 - 1, 2**29 - 1), (1, 0)]:
        rows[0, -2], rows[0, -1] = low, high
        results = [f.batch_norm_gather_stats(rows, None, None, None, None, 1e-5) for f in (ops, reference)]
        assert results[0][2] == results[1][2] == low + high * 2**24 + 12
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("fingerprint", [0, 2**36 - 1, 5 + 6 * 2**12 + 4095 * 2**24])
def test_a_sum_ends_in_the_parts_of_a_fingerprint_and_their_squares(ops, fingerprint):
    input, ones = torch.randn(4, CHANNELS, 3), torch.ones(CHANNELS)
    sums, *_ = ops.batch_norm_backward_reduce(input, input, ones, ones, None, fingerprint)
    words = sums[2 * CHANNELS :].to(torch.int64)
    assert torch.equal(words[1::2], words[::2] ** 2)
    assert words[0] + words[2] * 2**12 + words[4] * 2**24 == fingerprint


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1000, 1024])
def test_a_fingerprint_is_exact_in_a_sum(ranks):
    from bagua_syncbn.agreement.signatures import checksum, exact_bits

    sums = [checksum(layer * 2**24 + 1, call, 5) for layer, call in ((0, 1), (1, 0), (2**24 - 1, 77))]
    said = {
        tuple(parts_of(number & exact_bits(ranks)))
        for number in (*sums, -1)  # -1 has all bits
    }
    assert len(said) == 4
    for parts in map(torch.tensor, said):
        total = torch.zeros(6)
        for _ in range(ranks):
            total += parts
        assert torch.equal(total, (ranks * parts).float())


def test_headers_of_options_are_equal_only_for_equal_options():
    from bagua_syncbn.agreement.signatures import word_of_options

    numbers = (None, 0, 0.0, -0.0, False, -1, -1.0, -2, True, 1.0, 1e-5, 1e-5 + 1e-17, 2**-1074, math.nextafter(1, 2))
    for first, second in itertools.product(numbers, numbers):
        words = [word_of_options((8, False, "moves", 1e-5, value, "plus", False), 0) for value in (first, second)]
        assert (words[0] == words[1]) is (first == second), (first, second)
