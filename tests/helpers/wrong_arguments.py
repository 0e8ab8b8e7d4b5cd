"""Calls of the ops with arguments that every implementation for a device must refuse, and what it then says."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Call = Callable[[Any, Tensor, Tensor], Any]


def _gather(*changed: Any, momentum: float | None = 0.1) -> Call:
    """A call of batch_norm_gather_stats for three channels; ``changed`` makes running_mean, running_var, counter."""
    return lambda ops, x, c: ops.batch_norm_gather_stats(
        torch.ones(2, 8), *(change(c) if callable(change) else change for change in changed), momentum, 1e-5
    )


COUNT = torch.tensor(8)

# Of ops, an input (2, 3, 4) and one value for each channel.
WRONG_ARGUMENTS: list[tuple[Call, str]] = [
    (lambda ops, x, c: ops.batch_norm_stats(x[0, 0]), "input: expected at least 2 dimensions, (N, C, *), got 1"),
    (lambda ops, x, c: ops.batch_norm_stats(x.int()), "input: expected float16, bfloat16, float32 or float64, got Int"),
    (lambda ops, x, c: ops.batch_norm_elemt(x[0, 0], None, None, c, c), "input: expected at least 2 dimensions"),
    (lambda ops, x, c: ops.batch_norm_elemt(x.int(), None, None, c, c), "input: expected float16, bfloat16"),
    (
        lambda ops, x, c: ops.batch_norm_elemt(x, c[1:], None, c, c),
        "weight: expected one element for each channel, got 2 for 3",
    ),
    (lambda ops, x, c: ops.batch_norm_elemt(x, c.int(), None, c, c), "weight: expected float16, bfloat16"),
    (lambda ops, x, c: ops.batch_norm_elemt(x, None, c[1:], c, c), "bias: expected one element"),
    (lambda ops, x, c: ops.batch_norm_elemt(x, None, None, c[1:], c), "mean: expected one element"),
    (lambda ops, x, c: ops.batch_norm_elemt(x, None, None, c, c[1:]), "invstd: expected one element"),
    (lambda ops, x, c: ops.batch_norm_elemt(x[:0], c[1:], None, c, c), "weight: expected one element"),
    (
        lambda ops, x, c: ops.batch_norm_backward_reduce(x[1:], x, c, c, c),
        "grad_output: expected the sizes of input, got (1, 3, 4) for (2, 3, 4)",
    ),
    (
        lambda ops, x, c: ops.batch_norm_backward_reduce(x[0], x, c, c, c),
        "grad_output: expected the sizes of input, got (3, 4) for (2, 3, 4)",
    ),
    (
        lambda ops, x, c: ops.batch_norm_backward_reduce(x.half(), x, c, c, c),
        "grad_output: expected the dtype of input, got Half for Float",
    ),
    (lambda ops, x, c: ops.batch_norm_backward_reduce(x, x, c[1:], c, c), "mean: expected one element"),
    (lambda ops, x, c: ops.batch_norm_backward_reduce(x, x, c, c[1:], c), "invstd: expected one element"),
    (lambda ops, x, c: ops.batch_norm_backward_reduce(x, x, c, c, c.int()), "weight: expected float16, bfloat16"),
    (
        lambda ops, x, c: ops.batch_norm_backward_elemt(x[1:], x, c, c, c, c.repeat(2), COUNT),
        "grad_output: expected the sizes of input",
    ),
    (
        lambda ops, x, c: ops.batch_norm_backward_elemt(x, x, c[1:], c, c, c.repeat(2), COUNT),
        "weight: expected one element",
    ),
    (
        lambda ops, x, c: ops.batch_norm_backward_elemt(x, x, c, c[1:], c, c.repeat(2), COUNT),
        "mean: expected one element",
    ),
    (
        lambda ops, x, c: ops.batch_norm_backward_elemt(x, x, c, c, c[1:], c.repeat(2), COUNT),
        "invstd: expected one element",
    ),
    (
        lambda ops, x, c: ops.batch_norm_backward_elemt(x, x, c, c, c, c, COUNT),
        "sums: expected two elements for each channel, and up to three pairs of words, got 3",
    ),
    (
        lambda ops, x, c: ops.batch_norm_backward_elemt(x, x, c, c, c, c.repeat(2), COUNT.double()),
        "count: expected an int64 scalar, got Double ()",
    ),
    (
        lambda ops, x, c: ops.batch_norm_backward_elemt(x, x, c, c, c, c.repeat(2), COUNT.repeat(2)),
        "count: expected an int64 scalar, got Long (2)",
    ),
    (
        lambda ops, x, c: ops.batch_norm_gather_stats(c, c, c, None, 0.1, 1e-5),
        "gathered: expected (ranks, 2 * channels + 2 + words), got (3)",
    ),
    (
        lambda ops, x, c: ops.batch_norm_gather_stats(torch.ones(2, 7), c, c, None, 0.1, 1e-5),
        "gathered: expected (ranks, 2 * channels + 2 + words), got (2, 7)",
    ),
    (
        lambda ops, x, c: ops.batch_norm_gather_stats(torch.ones(2, 8).half(), c, c, None, 0.1, 1e-5),
        "gathered: expected float32 or float64, got Half",
    ),
    (_gather(lambda c: c[1:], lambda c: c, None), "running_mean: expected one element for each channel, got 2 for 3"),
    (_gather(lambda c: c, lambda c: c[1:], COUNT), "running_var: expected one element for each channel, got 2 for 3"),
    (_gather(lambda c: c, lambda c: c.int(), COUNT), "running_var: expected float16, bfloat16"),
    (_gather(lambda c: c, lambda c: c, lambda c: c), "num_batches_tracked: expected an int64 scalar"),
    (_gather(lambda c: c, lambda c: c, None, momentum=None), "num_batches_tracked: expected a tensor"),
]


def check_refused(ops: Any, call: Call, message: str) -> None:
    """Checks that ``call`` raises, and has written to nothing."""
    input, channels, count = torch.randn(2, 3, 4), torch.rand(3), COUNT.clone()
    before = input.clone(), channels.clone()
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        call(ops, input, channels)
    assert torch.equal(input, before[0])
    assert torch.equal(channels, before[1])
    assert torch.equal(COUNT, count)
