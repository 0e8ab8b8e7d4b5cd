"""Comparison of any implementation of the ops with the float64 reference."""

from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bagua_syncbn._ops import IDENTITY, Activation, accumulate_dtype, per_channel, reduced_dims, reference
from bagua_syncbn._ops.headers import header_sums_of
from tests.helpers.cases import laid_out, with_other_bytes
from tests.helpers.tolerances import TOLERANCES, assert_close

MESSAGE_IDENTITY, MESSAGE_NUMBER, FINGERPRINT = 7 * 2**24 + 5, 9, 2**36 - 2**14 + 7


class OpCase(NamedTuple):
    """Input and options of the ops."""

    shape: tuple[int, ...]  # (N, C, *)
    layout: str = "contiguous"  # layout of the input, see cases.laid_out
    more_layout: str | None = None  # layout of gradient, residual and gradient buffer; None: the input's layout
    offsets: tuple[int, int, int] = (0, 0, 0)  # input, gradient and residual: elements after a 64-byte address
    parameters: torch.dtype | None = torch.float32  # dtype of weight and bias; None for none
    mask: str | None = None  # a key of make_mask; not with an activation or a residual
    activation: Activation | None = None  # None omits the activation arguments and the gradient buffer
    residual: bool = False


def place(values: Tensor, layout: str, offset: int) -> Tensor:
    laid = laid_out(values, layout)
    if offset == 0:
        return laid
    memory = laid.new_empty(offset + laid.numel())
    return memory.as_strided(laid.shape, laid.stride(), offset).copy_(laid)


def make_mask(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Returns a mask with scattered, all or no positions, or a padded mask."""
    size = (shape[0], *shape[2:])
    if kind == "padded":
        lengths = torch.randint(-1, shape[-1] + 2, shape[:1])
        if len(lengths) > 1:
            lengths[0] = 0
        return (torch.arange(shape[-1]) < lengths.view(-1, *[1] * (len(shape) - 2))).expand(size).contiguous()
    return torch.rand(size) < {"scattered": 0.5, "all": 1.0, "none": 0.0}[kind]


def check_sums(sums: Tensor, row: Tensor, near: Tensor) -> None:
    """Compares statistics that add up over ranks with a ``row`` for the same values."""
    channels, count = len(near) // 2, row[len(near)] + row[len(near) + 1] * 2**24
    assert sums.dtype == torch.float64
    assert sums[2 * channels :].tolist() == [count, *header_sums_of(FINGERPRINT)]
    mean, square = (sums[: 2 * channels] / max(count, 1)).chunk(2)
    var = square - mean.square()
    allowed = TOLERANCES[torch.float32][0] * near + 1e-14 * torch.cat([mean, mean]).square()
    error = (torch.cat([mean, var]) - row[: 2 * channels]).abs() / allowed
    assert (error <= 1).all(), f"error of sums: {error.max():.2g} times the tolerance"


def check(ops: Any, case: OpCase, dtype: torch.dtype) -> None:
    """Compares all ``ops`` that read the input."""
    accumulate, channels = accumulate_dtype(dtype), case.shape[1]
    layouts = case.layout, *[case.more_layout or case.layout] * 2
    values = torch.randn(3, *case.shape)
    values[0] = 2 * values[0] + 1
    input, grad_output, residual = (
        place(tensor.to(dtype), layout, offset)
        for tensor, layout, offset in zip(values, layouts, case.offsets, strict=True)
    )
    mask = None if case.mask is None else with_other_bytes(make_mask(case.mask, case.shape))
    inside = torch.ones_like(input, dtype=torch.bool) if mask is None else mask.unsqueeze(1)
    mean, invstd = laid_out(torch.randn(2, channels), "transposed").to(accumulate).unbind()
    invstd.abs_().add_(0.5)
    sums = torch.randn(2 * channels).to(accumulate)
    weight = bias = None
    if case.parameters is not None:
        weight, bias = laid_out(torch.randn(2, channels), "transposed").to(case.parameters).unbind()
    act = (case.activation or IDENTITY).code, (case.activation or IDENTITY).parameter

    is_plain = mask is None and case.activation is None and not case.residual  # omits optional arguments

    def wide(*tensors: Any) -> list[Any]:
        return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]

    def close(actual: Tensor, expected: Tensor, what: str) -> None:
        assert actual.dtype == dtype
        assert actual.stride() == torch.empty_like(input).stride()
        assert_close(actual, expected, what)

    input.masked_fill_(~inside, torch.nan)
    if not case.residual:
        merged = weight, mean, invstd, sums, torch.tensor(3), 1, None, 0
        arguments = grad_output, input, *merged, *(() if is_plain else (mask, bias, *act))
        expected = reference.batch_norm_backward_elemt(*wide(*arguments))
        close(ops.batch_norm_backward_elemt(*arguments), expected, "grad_input")
        if mask is None and case.activation is None:
            grad = place(grad_output.clone(), layouts[1], case.offsets[1])
            assert ops.batch_norm_backward_elemt(grad, input, *merged, grad_input=grad).numel() == 0
            assert_close(grad, expected, "grad_input in place")
    residual = residual if case.residual else None

    packed = ops.batch_norm_stats(input, MESSAGE_IDENTITY, MESSAGE_NUMBER, mask)
    expected = reference.batch_norm_stats(input.double(), MESSAGE_IDENTITY, MESSAGE_NUMBER, mask)
    std = expected[channels : 2 * channels].sqrt()
    near = expected[: 2 * channels].abs() + torch.cat([std, std * std]) + 1e-30
    assert packed.dtype == accumulate
    assert torch.equal(packed[2 * channels :].double(), expected[2 * channels :])
    error = (packed[: 2 * channels] - expected[: 2 * channels]).abs() / (TOLERANCES[accumulate][0] * near)
    assert (error <= 1).all(), f"error of statistics: {error.max():.2g} times the tolerance"
    if accumulate == torch.float32:
        check_sums(ops.batch_norm_stats(input, FINGERPRINT, 0, mask, True), expected, near)

    if mask is not None:
        return
    arguments = input, weight, bias, mean, invstd, *(() if is_plain else (residual, *act))
    close(ops.batch_norm_elemt(*arguments), reference.batch_norm_elemt(*wide(*arguments)), "output")

    # Tolerances are relative to the terms, which may cancel.
    size = grad_output.double().abs()
    terms = torch.stack([size, size * (input.double() - per_channel(mean, input)).abs()])
    first, second = (term.sum(reduced_dims(input)) for term in terms)
    scales = torch.cat([first, second]), second * invstd, first
    through = () if is_plain else (bias, residual, *act)
    wide_grad = torch.empty_like(input, dtype=torch.float64)
    arguments = grad_output, input, mean, invstd, weight, FINGERPRINT, *through
    expected_sums = reference.batch_norm_backward_reduce(*wide(*arguments), grad=wide_grad)
    filled = () if case.activation is None else (place(torch.empty_like(input), layouts[1], case.offsets[0]),)
    for grads in [(), filled] if filled else [()]:
        sums, *parameter_grads = ops.batch_norm_backward_reduce(*arguments, *grads)
        assert torch.equal(sums[2 * channels :].double(), expected_sums[0][2 * channels :])
        results = sums[: 2 * channels], *parameter_grads
        assert [result.dtype for result in results] == [accumulate, *[case.parameters or accumulate] * 2]
        wanted_sums = expected_sums[0][: 2 * channels], *expected_sums[1:]
        for name, actual, wanted, scale in zip(("sums", "weight", "bias"), results, wanted_sums, scales, strict=True):
            rtol = max(TOLERANCES[each][0] for each in (actual.dtype, accumulate))
            error = (actual.double() - wanted).abs()
            assert (error <= rtol * (wanted.abs() + 0.1 * scale + 1e-3)).all(), f"gradient of {name}"
        for grad in grads:
            assert_close(grad, wide_grad, "grad")


def check_merge(
    ops: Any,
    sizes: Iterable[int],
    channels: int,
    dtype: torch.dtype,
    buffer_dtype: torch.dtype | None = None,
    momentum: float | None = 0.1,
) -> None:
    """Compares the merge of ranks with batch ``sizes``; tracks statistics if ``buffer_dtype`` is given."""
    batches = [torch.randn(n, channels).to(dtype) for n in sizes]
    gathered = [torch.stack([reference.batch_norm_stats(batch) for batch in batches])]
    if dtype != torch.float64:
        sums = [reference.batch_norm_stats(batch, FINGERPRINT, 0, None, True) for batch in batches]
        gathered.append(torch.stack(sums).sum(0))
    for rows, dim in product(gathered, (0, 1)):  # contiguous and strided buffers
        buffers: list[Any] = [None, None, torch.tensor(4)]
        if buffer_dtype is not None:
            buffers[:2] = torch.rand((2, channels) if dim == 0 else (channels, 2)).to(buffer_dtype).unbind(dim)
        wide = [buffer if buffer is None else buffer.clone() for buffer in buffers]
        wide[:2] = [buffer if buffer is None else buffer.double() for buffer in wide[:2]]
        options = momentum, 1e-5, None, False, len(batches)
        merged = ops.batch_norm_gather_stats(rows, *buffers, *options)
        expected = reference.batch_norm_gather_stats(rows.double(), *wide, *options)
        for actual, wanted in zip((*merged, *buffers), (*expected, *wide), strict=True):
            if actual is not None and actual.is_floating_point():
                assert_close(actual, wanted, "merged")
            elif actual is not None:
                assert torch.equal(actual, wanted)


def check_activation(ops: Any, activation: Activation, dtype: torch.dtype) -> None:
    """Compares an activation and its derivative with torch, in both layouts, also at kinks and for NaN."""
    act, tolerance = (activation.code, activation.parameter), 1e-14 if dtype == torch.float64 else 1e-6
    z = torch.cat([torch.linspace(-9, 9, 1600), torch.tensor([-3, 0, 3, 6, 89, -89, 1e3, -1e3, 1e-6])]).double()
    for given in (z.view(1, 1, -1).expand(1, 2, -1).contiguous(), z.view(1, -1).expand(3, -1).contiguous()):
        given.requires_grad_()
        (slope,) = torch.autograd.grad(activation.of(given).sum(), given)
        input = given.detach().to(dtype)
        zeros, ones = torch.zeros(input.size(1), dtype=dtype), torch.ones(input.size(1), dtype=dtype)
        output = ops.batch_norm_elemt(input, None, None, zeros, ones, None, *act)
        assert ops.batch_norm_elemt(input * torch.nan, None, None, zeros, ones, None, *act).isnan().all()
        dy, grad, count = torch.ones_like(input), torch.empty_like(input), torch.tensor(1)
        ops.batch_norm_backward_reduce(dy, input, zeros, ones, None, None, None, None, *act, grad)
        rest = count, 1, None, 0, None, None
        unreduced = ops.batch_norm_backward_elemt(dy, input, None, zeros, ones, zeros.repeat(2), *rest, *act)
        for actual, expected in ((output, activation.of(given).detach()), (grad, slope), (unreduced, slope)):
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def check_not_finite(ops: Any, input: Tensor, value: float, place: int) -> None:
    """Checks that a non-finite value in the second channel affects neither the output at different positions nor
    statistics of different channels.
    """
    input.select(1, 1)[place] = value
    channels, accumulate = input.size(1), accumulate_dtype(input.dtype)
    finite = torch.arange(channels) != 1
    stats = ops.batch_norm_stats(input)
    assert torch.equal(stats[:channels].isfinite(), finite)
    assert torch.equal(stats[channels : 2 * channels].isnan(), ~finite)
    zeros, ones = torch.zeros(channels, dtype=accumulate), torch.ones(channels, dtype=accumulate)
    output = ops.batch_norm_elemt(input, None, None, zeros, ones)
    torch.testing.assert_close(output, input, rtol=0, atol=0, equal_nan=True)
    sums, _, _ = ops.batch_norm_backward_reduce(torch.randn_like(input), input, zeros, ones, None)
    assert sums[:channels].isfinite().all()
    assert torch.equal(sums[channels:].isfinite(), finite)


def check_last_of_many(ops: Any, shape: tuple[int, ...], device: str) -> None:
    """Checks an input too large for the reference: all values are equal, except the last."""
    input = torch.ones(shape, dtype=torch.bfloat16, device=device)
    input.view(-1)[-1] = 2
    channels, count = shape[1], input.numel() // shape[1]
    packed = ops.batch_norm_stats(input)
    assert int(packed[-2]) + 2**24 * int(packed[-1]) == count
    torch.testing.assert_close(packed[channels - 1].item(), 1 + 1 / count, rtol=1e-6, atol=0)
    torch.testing.assert_close(packed[2 * channels - 1].item(), 1 / count, rtol=1e-3, atol=0)
    mean = torch.ones(channels, device=device)
    output = ops.batch_norm_elemt(input, None, None, mean, mean)
    assert output.view(-1)[-1] == 1
    assert output.count_nonzero() == 1
    sums, _, grad_bias = ops.batch_norm_backward_reduce(input, input, mean, mean, None)
    torch.testing.assert_close(sums[-1].item(), 2.0)
    torch.testing.assert_close(grad_bias[-1].item(), count + 1.0)
    grad = ops.batch_norm_backward_elemt(output, output, None, 0 * mean, mean, 0 * sums, torch.tensor(1, device=device))
    assert grad.view(-1)[-1] == 1
    assert grad.count_nonzero() == 1
