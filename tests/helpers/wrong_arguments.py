"""Calls of the ops with arguments that every implementation for a device must refuse, and what it then says."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Call = Callable[[Any, Tensor, Tensor], Any]


COUNT = torch.tensor(8)

# Arguments that are right, of an input (2, 3, 4) and one value for each channel.
RIGHT: dict[str, Callable[[Tensor, Tensor], list[Any]]] = {
    "stats": lambda x, c: [x],
    "gather_stats": lambda x, c: [torch.ones(2, 8), c, c, COUNT, 0.1, 1e-5],
    "elemt": lambda x, c: [x, None, None, c, c],
    "backward_reduce": lambda x, c: [x, x, c, c, c],
    "backward_elemt": lambda x, c: [x, x, c, c, c, c.repeat(2), COUNT],
    "elemt with act": lambda x, c: [x, c, c, c, c, x, 1, 0.0],
    "backward_reduce with act": lambda x, c: [x, x, c, c, c, 0, c, x, 1, 0.0, x],
    "backward_elemt with act": lambda x, c: [x, x, c, c, c, c.repeat(2), COUNT, 1, None, 0, None, c, 1, 0.0],
}


def _with(op: str, *wrong: tuple[int, Callable[[Tensor, Tensor], Any]]) -> Call:
    """A call with other arguments in some places."""

    def call(ops: Any, x: Tensor, c: Tensor) -> Any:
        arguments = RIGHT[op](x, c)
        for place, make in wrong:
            arguments[place] = make(x, c)
        return getattr(ops, f"batch_norm_{op.split()[0]}")(*arguments)

    return call


ELEMENTS = "expected one element for each channel, got 2 for 3"
SIZES = "grad_output: expected the sizes of input"
WRONG_ARGUMENTS: list[tuple[Call, str]] = [
    (_with("stats", (0, lambda x, c: x[0, 0])), "input: expected at least 2 dimensions, (N, C, *), got 1"),
    (_with("stats", (0, lambda x, c: x.int())), "input: expected float16, bfloat16, float32 or float64, got Int"),
    (_with("elemt", (0, lambda x, c: x[0, 0])), "input: expected at least 2 dimensions"),
    (_with("elemt", (0, lambda x, c: x.int())), "input: expected float16, bfloat16"),
    (_with("elemt", (1, lambda x, c: c[1:])), f"weight: {ELEMENTS}"),
    (_with("elemt", (1, lambda x, c: c.int())), "weight: expected float16, bfloat16"),
    (_with("elemt", (2, lambda x, c: c[1:])), f"bias: {ELEMENTS}"),
    (_with("elemt", (3, lambda x, c: c[1:])), f"mean: {ELEMENTS}"),
    (_with("elemt", (4, lambda x, c: c[1:])), f"invstd: {ELEMENTS}"),
    (_with("elemt", (0, lambda x, c: x[:0]), (1, lambda x, c: c[1:])), f"weight: {ELEMENTS}"),
    (_with("backward_reduce", (0, lambda x, c: x[1:])), f"{SIZES}, got (1, 3, 4) for (2, 3, 4)"),
    (_with("backward_reduce", (0, lambda x, c: x[0])), f"{SIZES}, got (3, 4) for (2, 3, 4)"),
    (_with("backward_reduce", (0, lambda x, c: x.half())), "grad_output: expected the dtype of input"),
    (_with("backward_reduce", (2, lambda x, c: c[1:])), f"mean: {ELEMENTS}"),
    (_with("backward_reduce", (3, lambda x, c: c[1:])), f"invstd: {ELEMENTS}"),
    (_with("backward_reduce", (4, lambda x, c: c.int())), "weight: expected float16, bfloat16"),
    (_with("backward_elemt", (0, lambda x, c: x[1:])), SIZES),
    (
        lambda ops, x, c: ops.batch_norm_backward_elemt(x, x, c, c, c, c.repeat(2), COUNT, grad_input=x.half()),
        "grad_input: expected the dtype of input",
    ),
    (_with("backward_elemt", (2, lambda x, c: c[1:])), f"weight: {ELEMENTS}"),
    (_with("backward_elemt", (3, lambda x, c: c[1:])), f"mean: {ELEMENTS}"),
    (_with("backward_elemt", (4, lambda x, c: c[1:])), f"invstd: {ELEMENTS}"),
    (_with("backward_elemt", (5, lambda x, c: c)), "sums: expected 2 * channels values and a header"),
    (_with("backward_elemt", (6, lambda x, c: COUNT.double())), "count: expected an int64 scalar, got Double ()"),
    (_with("backward_elemt", (6, lambda x, c: COUNT.repeat(2))), "count: expected an int64 scalar, got Long (2)"),
    (
        _with("elemt with act", (5, lambda x, c: x[1:])),
        "residual: expected the sizes of input, got (1, 3, 4) for (2, 3, 4)",
    ),
    (_with("elemt with act", (5, lambda x, c: x.half())), "residual: expected the dtype of input"),
    (_with("elemt with act", (6, lambda x, c: 11)), "activation: expected a code from 0 to 10, got 11"),
    (_with("backward_reduce with act", (6, lambda x, c: c[1:])), f"bias: {ELEMENTS}"),
    (_with("backward_reduce with act", (7, lambda x, c: x[1:])), "residual: expected the sizes of input"),
    (_with("backward_reduce with act", (10, lambda x, c: x[1:])), "grad: expected the sizes of input"),
    (_with("backward_reduce with act", (10, lambda x, c: x.half())), "grad: expected the dtype of input"),
    (_with("backward_elemt with act", (10, lambda x, c: x[:, 0] > 0)), "mask: expected None with an activation, got"),
    (
        _with("backward_elemt with act", (10, lambda x, c: x[0] > 0), (12, lambda x, c: 0)),
        "mask: expected a contiguous bool (N, *)",
    ),
    (
        lambda ops, x, c: ops.batch_norm_stats(x[..., 0], mask=COUNT.repeat(2)),
        "mask: expected a contiguous bool (N, *), or int64 lengths (N)",
    ),
    (_with("backward_elemt with act", (11, lambda x, c: c[1:])), f"bias: {ELEMENTS}"),
    (_with("backward_elemt with act", (12, lambda x, c: -1)), "activation: expected a code from 0 to 10, got -1"),
    (
        _with("gather_stats", (0, lambda x, c: c)),
        "gathered: expected (ranks, 2 * channels + 2 or 5), or 2 * channels + 7 values, got (3)",
    ),
    (_with("gather_stats", (0, lambda x, c: torch.ones(13))), "gathered: expected float64 for a sum, got Float"),
    (
        _with("gather_stats", (0, lambda x, c: torch.ones(2, 3))),
        "gathered: expected (ranks, 2 * channels + 2 or 5)",
    ),
    (_with("gather_stats", (0, lambda x, c: torch.ones(2, 8).half())), "gathered: expected float32 or float64"),
    (_with("gather_stats", (1, lambda x, c: c[1:])), f"running_mean: {ELEMENTS}"),
    (_with("gather_stats", (2, lambda x, c: c[1:])), f"running_var: {ELEMENTS}"),
    (_with("gather_stats", (2, lambda x, c: c.int())), "running_var: expected float16, bfloat16"),
    (_with("gather_stats", (3, lambda x, c: c)), "num_batches_tracked: expected an int64 scalar"),
    (_with("gather_stats", (3, lambda x, c: None), (4, lambda x, c: None)), "num_batches_tracked: expected a tensor"),
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
