"""Calls of the ops with an invalid argument, for which every implementation raises an error that names it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

COUNT = torch.tensor(8)
_Make = Callable[[Tensor, Tensor], Any]

# Valid arguments, from an input (2, 3, 4) and per-channel values.
VALID: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "stats": lambda x, c: {"input": x},
    "gather_stats": lambda x, c: {
        "gathered": torch.ones(2, 8), "running_mean": c, "running_var": c, "num_batches_tracked": COUNT,
        "momentum": 0.1, "eps": 1e-5,
    },
    "elemt": lambda x, c: {
        "input": x, "weight": c, "bias": c, "mean": c, "invstd": c, "residual": x, "activation": 1,
    },
    "backward_reduce": lambda x, c: {
        "grad_output": x, "input": x, "mean": c, "invstd": c, "weight": c, "bias": c, "residual": x, "activation": 1,
        "grad": x,
    },
    "backward_elemt": lambda x, c: {
        "grad_output": x, "input": x, "weight": c, "mean": c, "invstd": c, "sums": c.repeat(2), "count": COUNT,
        "bias": c, "activation": 1, "grad_input": x,
    },
}  # fmt: skip

_CHANNELS: list[_Make] = [lambda x, c: c[1:], lambda x, c: c.int()]
_LIKE_INPUT: list[_Make] = [lambda x, c: x[1:], lambda x, c: x[0], lambda x, c: x.half()]
_SCALAR: list[_Make] = [lambda x, c: COUNT.double(), lambda x, c: COUNT.repeat(2)]
INVALID: dict[str, list[_Make]] = {
    "input": [lambda x, c: x[0, 0], lambda x, c: x.int()],
    **dict.fromkeys(("weight", "bias", "mean", "invstd", "running_mean", "running_var"), _CHANNELS),
    **dict.fromkeys(("grad_output", "residual", "grad", "grad_input"), _LIKE_INPUT),
    "sums": [lambda x, c: c],
    "count": _SCALAR,
    "num_batches_tracked": _SCALAR,
    "gathered": [lambda x, c, size=size: torch.ones(size) for size in (3, 13, (2, 3))],
    "activation": [lambda x, c: 11, lambda x, c: -1],
}


def invalid_calls() -> Iterator[tuple[str, str, dict[str, _Make]]]:
    """Yields the ops, the name of the argument in the error, and the changed arguments."""
    for op, make in VALID.items():
        for name in make(torch.ones(2, 3, 4), torch.ones(3)).keys() & INVALID:
            yield from ((op, name, {name: change}) for change in INVALID[name])
    yield "gather_stats", "num_batches_tracked", dict.fromkeys(("num_batches_tracked", "momentum"), lambda x, c: None)
    yield "stats", "mask", {"mask": lambda x, c: x[0] > 0}
    yield "stats", "mask", {"input": lambda x, c: x[..., 0], "mask": lambda x, c: COUNT.repeat(2)}
    yield "backward_elemt", "mask", {"mask": lambda x, c: x[:, 0] > 0}  # with an activation


def check_refused(ops: Any, op: str, name: str, changes: dict[str, _Make]) -> None:
    """Checks that a call raises, and writes to no tensor."""
    input, channels, count = torch.randn(2, 3, 4), torch.rand(3), COUNT.clone()
    before = input.clone(), channels.clone()
    arguments = VALID[op](input, channels) | {key: change(input, channels) for key, change in changes.items()}
    with pytest.raises(RuntimeError, match=f"^{name}: expected"):
        getattr(ops, f"batch_norm_{op}")(**arguments)
    assert torch.equal(input, before[0])
    assert torch.equal(channels, before[1])
    assert torch.equal(COUNT, count)
