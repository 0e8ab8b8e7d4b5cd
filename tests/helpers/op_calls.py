"""Calls of every op: valid ones, and ones with an invalid argument, which raise an error that names it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bagua_syncbn import _ops as ops
from bagua_syncbn._ops.activations import ACTIVATIONS
from tests.helpers.cases import laid_out


def op_calls(
    shape: tuple[int, ...] = (4, 3, 5),
    dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype | None = None,
    weight: bool = True,
    layout: str = "contiguous",
) -> dict[str, dict[str, Any]]:
    """Returns random arguments by name. A key is an op's name, and optionally a space and a set of options."""
    channels, accumulate = shape[1], ops.accumulate_dtype(dtype)
    input, grad_output, residual = (laid_out(torch.randn(shape).to(dtype), layout) for _ in range(3))
    mean, invstd = torch.randn(channels, dtype=accumulate), torch.rand(channels, dtype=accumulate) + 0.5
    scale, bias = (torch.randn(channels, dtype=parameter_dtype or dtype) if weight else None for _ in range(2))
    sums, count = torch.randn(2 * channels, dtype=accumulate), torch.tensor(17)
    rows = torch.stack([ops.batch_norm_stats(torch.randn(size, channels, 2).to(dtype)) for size in (2, 0, 3)])
    merge = rows, *torch.rand(2, channels).to(parameter_dtype or dtype).unbind(), torch.tensor(3)
    mask = torch.rand(input.select(1, 0).shape) < 0.5
    elemt, reduce = (input, scale, bias, mean, invstd), (grad_output, input, mean, invstd, scale)
    gradient = grad_output, input, scale, mean, invstd, sums, count
    calls = {
        "batch_norm_stats": (input,),
        "batch_norm_stats mask": (input, None, 0, mask),
        "batch_norm_gather_stats": (*merge, 0.1, 1e-5),
        "batch_norm_gather_stats average": (*merge, None, 1e-5),
        "batch_norm_elemt": elemt,
        "batch_norm_elemt act": (*elemt, residual, 4, 0.5),
        "batch_norm_backward_reduce": reduce,
        "batch_norm_backward_reduce act": (*reduce, None, bias, residual, 4, 0.5, torch.zeros_like(input)),
        "batch_norm_backward_elemt": gradient,
        "batch_norm_backward_elemt mask": (*gradient, 1, None, 0, mask),
        "batch_norm_backward_elemt act": (*gradient, 1, None, 0, None, bias, 4, 0.5),
    }
    named = {key: dict(zip(_names_of(key), arguments, strict=False)) for key, arguments in calls.items()}
    in_place = named["batch_norm_backward_elemt"] | {"grad_input": torch.zeros_like(input)}
    return named | {"batch_norm_backward_elemt in place": in_place}


def _names_of(key: str) -> list[str]:
    return [each.name for each in getattr(torch.ops.bagua_syncbn, key.split()[0]).default._schema.arguments]


def op_of(ops: Any, key: str) -> Any:
    """Returns the op of a key of :func:`op_calls`."""
    return getattr(ops, key.split()[0])


_Change = Callable[[Any], Any]  # from a valid argument to an invalid one
_CHANNELS: list[_Change] = [lambda c: c[1:], lambda c: c.int()]
_RUNNING: list[_Change] = [*_CHANNELS, lambda c: c[:1].expand(3)]
_LIKE_INPUT: list[_Change] = [lambda x: x[1:], lambda x: x[0], lambda x: x.half()]
_SCALAR: list[_Change] = [lambda count: count.double(), lambda count: count.repeat(2)]
INVALID: dict[str, list[_Change]] = {
    "input": [lambda x: x[0, 0], lambda x: x.int()],
    **dict.fromkeys(("weight", "bias", "mean", "invstd"), _CHANNELS),
    **dict.fromkeys(("running_mean", "running_var"), _RUNNING),
    **dict.fromkeys(("grad_output", "residual", "grad", "grad_input"), _LIKE_INPUT),
    "sums": [lambda sums: sums[:3]],
    "count": _SCALAR,
    "num_batches_tracked": _SCALAR,
    "gathered": [lambda _, size=size: torch.ones(size) for size in (3, 13, (2, 3))],
    "activation": [lambda _: len(ACTIVATIONS) + 1, lambda _: -1],
}


def invalid_calls() -> Iterator[tuple[str, str, dict[str, _Change]]]:
    """Yields a key of :func:`op_calls`, the argument that the error names, and functions that change arguments."""
    for key, arguments in op_calls().items():
        given = [name for name, argument in arguments.items() if argument is not None]
        yield from ((key, name, {name: change}) for name in given for change in INVALID.get(name, ()))
    yield "batch_norm_gather_stats average", "num_batches_tracked", {"num_batches_tracked": lambda _: None}
    yield "batch_norm_stats mask", "mask", {"mask": lambda mask: mask[1:]}
    yield "batch_norm_stats mask", "mask", {"input": lambda x: x[..., 0], "mask": lambda _: torch.tensor([8, 8])}
    yield "batch_norm_backward_elemt act", "mask", {"mask": lambda _: torch.ones(4, 5) > 0}


def check_refused(ops: Any, key: str, name: str, changes: dict[str, _Change]) -> None:
    """Checks that a call raises, and writes to no tensor."""
    arguments = op_calls()[key]
    arguments |= {each: change(arguments.get(each)) for each, change in changes.items()}
    before = copy.deepcopy(arguments)
    with pytest.raises(RuntimeError, match=f"^{name}: expected"):
        op_of(ops, key)(**arguments)
    torch.testing.assert_close(arguments, before, rtol=0, atol=0)
