"""Compares any implementation of the ops with the reference in float64."""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import torch
from tolerances import TOLERANCES, assert_close
from torch import Tensor

from bagua_syncbn.ops import Activation, accumulate_dtype, reference

FINGERPRINT = 2**36 - 2**14 + 7


def _check_stats(packed: Tensor, expected: Tensor, channels: int) -> Tensor:
    """Returns the deviations."""
    assert packed.dtype == accumulate_dtype(packed.dtype)
    assert torch.equal(packed[2 * channels :].double(), expected[2 * channels :])
    std = expected[channels : 2 * channels].sqrt()
    error = (packed[: 2 * channels].double() - expected[: 2 * channels]).abs()
    allowed = TOLERANCES[packed.dtype][0] * (expected[: 2 * channels].abs() + torch.cat([std, std * std]) + 1e-30)
    assert (error <= allowed).all(), f"statistics are off by {(error / allowed).max():.2g} of what is allowed"
    return std


def _check_sums(results: Any, expected: Any, scales: Any) -> None:
    """Relative to what is added up, which may cancel."""
    accumulate = results[0].dtype
    for name, actual, wanted, scale in zip(
        ("sums", "grad_weight", "grad_bias"), results, expected, scales, strict=True
    ):
        rtol = max(TOLERANCES[dtype][0] for dtype in (actual.dtype, accumulate))
        assert ((actual.double() - wanted).abs() <= rtol * (scale + 1e-3)).all(), name


def check_masked_ops(ops: Any, input: Tensor, grad_output: Tensor, mask: Tensor) -> None:
    """Compares those of ``ops`` that take a ``mask``. Last of all, the other positions hold what must go nowhere."""
    channels, dtype, device = input.size(1), input.dtype, input.device
    weight, mean, invstd = (torch.rand(3, channels) + 0.1).to(device, accumulate_dtype(dtype)).unbind()
    sums, count = torch.randn(2 * channels).to(mean), torch.tensor(3, device=device)
    wide_factors = [value.double() for value in (weight, mean, invstd)]
    arguments = weight, mean, invstd, sums, count
    wide_arguments = *wide_factors, sums.double(), count

    def check_gradient(zeroes: bool) -> None:
        actual = ops.batch_norm_backward_elemt(grad_output, input, *arguments, mask=mask, zeroes=zeroes)
        wide = grad_output.double(), input.double()
        expected = reference.batch_norm_backward_elemt(*wide, *wide_arguments, mask=mask, zeroes=zeroes)
        assert actual.stride() == torch.empty_like(input).stride()
        assert_close(actual, expected, f"grad_input, {zeroes=}")

    check_gradient(False)
    outside = ~reference.of_positions(mask, input)
    input.masked_fill_(outside, torch.nan)
    grad_output.masked_fill_(outside, torch.nan)
    check_gradient(True)
    wide, wide_grad = input.double(), grad_output.double()
    expected = reference.batch_norm_stats(wide, 7 * 2**24 + 5, 9, mask)
    _check_stats(ops.batch_norm_stats(input, 7 * 2**24 + 5, 9, mask), expected, channels)
    output = ops.batch_norm_elemt(input, weight, mean, mean, invstd, mask)
    weight_, mean_, invstd_ = wide_factors
    assert output.stride() == torch.empty_like(input).stride()
    assert_close(output, reference.batch_norm_elemt(wide, weight_, mean_, mean_, invstd_, mask), "output")
    results = ops.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight, FINGERPRINT, mask)
    expected = reference.batch_norm_backward_reduce(wide_grad, wide, mean_, invstd_, weight_, FINGERPRINT, mask)
    deviation = (wide - reference.per_channel(mean_, wide)).abs()
    scales = reference.batch_norm_backward_reduce(
        wide_grad.abs(), deviation, 0 * mean_, invstd_, weight_, FINGERPRINT, mask
    )
    _check_sums(results, expected, scales)


def check_ops(ops: Any, input: Tensor, grad_output: Tensor, parameter_dtype: torch.dtype | None = None) -> None:
    """Compares the four of ``ops`` that read the input, on the device of ``input``."""
    channels, dtype, device = input.size(1), input.dtype, input.device
    accumulate = accumulate_dtype(dtype)
    wide, wide_grad = input.double(), grad_output.double()
    expected = reference.batch_norm_stats(wide)
    std = _check_stats(ops.batch_norm_stats(input), expected, channels)

    parameter_dtype = parameter_dtype or dtype
    mean, invstd = (expected[:channels] + 0.1).to(accumulate), (std.square() + 0.1).rsqrt().to(accumulate)
    weight, bias = torch.randn(2, channels).to(device, parameter_dtype).unbind()
    output = ops.batch_norm_elemt(input, weight, bias, mean, invstd)
    assert output.dtype == dtype
    assert output.stride() == torch.empty_like(input).stride()
    arguments = [t.double() for t in (weight, bias, mean, invstd)]
    assert_close(output, reference.batch_norm_elemt(wide, *arguments), "output")

    sums, *parameter_grads = ops.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight)
    results = reference.batch_norm_backward_reduce(wide_grad, wide, mean.double(), invstd.double(), weight.double())
    deviation = (wide - mean.double().view(-1, *[1] * (input.dim() - 2))).abs()
    scales = reference.batch_norm_backward_reduce(wide_grad.abs(), deviation, 0 * mean.double(), invstd.double(), None)
    assert [result.dtype for result in (sums, *parameter_grads)] == [accumulate, parameter_dtype, parameter_dtype]
    _check_sums((sums, *parameter_grads), results, scales)

    count = torch.tensor(input.numel() // channels, device=device)
    grad_input = ops.batch_norm_backward_elemt(grad_output, input, weight, mean, invstd, sums, count)
    assert grad_input.dtype == dtype
    assert grad_input.stride() == torch.empty_like(input).stride()
    weight, mean, invstd, sums = (t.double() for t in (weight, mean, invstd, sums))
    expected = reference.batch_norm_backward_elemt(wide_grad, wide, weight, mean, invstd, sums, count)
    assert_close(grad_input, expected, "grad_input")


def check_not_finite(ops: Any, input: Tensor, grad_output: Tensor, value: float, place: int) -> None:
    """Checks that one value that is not finite, of the second channel, spoils no other channel and no other value."""
    input.select(1, 1)[place] = value
    channels, accumulate = input.size(1), accumulate_dtype(input.dtype)
    finite = torch.ones(channels, dtype=torch.bool)
    finite[1] = False
    stats = ops.batch_norm_stats(input)
    assert torch.equal(stats[:channels].isfinite(), finite)
    assert torch.equal(stats[channels : 2 * channels].isnan(), ~finite)
    zeros, ones = torch.zeros(channels, dtype=accumulate), torch.ones(channels, dtype=accumulate)
    output = ops.batch_norm_elemt(input, None, None, zeros, ones)
    torch.testing.assert_close(output, input, rtol=0, atol=0, equal_nan=True)
    sums, _, _ = ops.batch_norm_backward_reduce(grad_output, input, zeros, ones, None)
    assert sums[:channels].isfinite().all()
    assert torch.equal(sums[channels:].isfinite(), finite)


def check_last_of_many(ops: Any, shape: tuple[int, ...], device: str) -> None:
    """Checks a constant input with another value at the very end, which is too large to be compared."""
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


def check_act_ops(
    ops: Any,
    activation: Activation,
    input: Tensor,
    grad_output: Tensor,
    residual: Tensor | None,
    affine: bool = True,
    mask: Tensor | None = None,
) -> None:
    """Compares the three of ``ops`` that take an activation, on the device of ``input``."""
    channels, dtype, device = input.size(1), input.dtype, input.device
    accumulate = accumulate_dtype(dtype)
    mean, weight, bias = torch.randn(3, channels).to(device, accumulate).unbind()
    invstd, count = weight.abs() + 0.5, torch.tensor(input.numel() // channels, device=device)
    weight, bias = (weight, bias) if affine else (None, None)
    act = activation.code, activation.parameter

    def wide(*tensors: Tensor | None) -> list[Tensor | None]:
        return [None if tensor is None else tensor.double() for tensor in tensors]

    output = ops.batch_norm_elemt(input, weight, bias, mean, invstd, mask, residual, *act)
    wide_residual, wide_grad = *wide(residual), torch.empty_like(input, dtype=torch.float64)
    expected = reference.batch_norm_elemt(*wide(input, weight, bias, mean, invstd), mask, wide_residual, *act)  # type: ignore[arg-type]
    assert output.stride() == torch.empty_like(input).stride()
    assert_close(output, expected, f"output of {activation}")
    arguments, wide_rest = (grad_output, input, mean, invstd, weight), (*wide(bias), wide_residual, *act, wide_grad)
    expected = reference.batch_norm_backward_reduce(*wide(*arguments), FINGERPRINT, mask, *wide_rest)  # type: ignore[arg-type]
    # Sums relative to what is added up, which may cancel, and to 1, of which the derivative of tanh is the rest.
    deviation = (input.double() - mean.double().view(-1, *[1] * (input.dim() - 2))).abs()
    size = 0.1 * grad_output.double().abs()
    scale = torch.cat([values.sum([0, *range(2, input.dim())]) for values in (size, size * deviation)])
    for grad in (torch.empty_like(input), None):
        rest = bias, residual, *act, grad
        sums, *grads = ops.batch_norm_backward_reduce(*arguments, FINGERPRINT, mask, *rest)
        assert sums[2 * channels :].tolist() == reference.parts_of(FINGERPRINT)
        rtol = TOLERANCES[accumulate][0]
        for actual, wanted, near in zip(
            (sums[: 2 * channels], *grads),
            (expected[0][: 2 * channels], *expected[1:3]),
            (scale, scale[channels:] * invstd, scale[:channels]),
            strict=True,
        ):
            assert ((actual.double() - wanted).abs() <= rtol * (near + 1e-3)).all(), f"sums of {activation}"
        if grad is not None:
            assert_close(grad, wide_grad, f"gradient of {activation}")
    if residual is not None:
        return
    for zeroes in (False,) if mask is None else (False, True):
        factors = (weight, mean, invstd, expected[0][: 2 * channels].to(accumulate))
        last = count, 1, None, 0, mask, zeroes
        grad_input = ops.batch_norm_backward_elemt(grad_output, input, *factors, *last, bias, *act)
        wide_factors = *wide(*factors), *last, *wide(bias), *act
        wanted = reference.batch_norm_backward_elemt(*wide(grad_output, input), *wide_factors)  # type: ignore[arg-type]
        assert_close(grad_input, wanted, f"grad_input of {activation}")


def check_activations(
    ops: Any, activations: Iterable[Activation], shapes: Iterable[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Checks an activation on each shape, with and without a residual; every other time with weight and bias."""
    for number, (shape, activation) in enumerate(zip(shapes, cycle(activations), strict=False)):
        input, grad_output = (torch.randn(shape).to(dtype) for _ in range(2))
        for residual in (None, torch.randn(shape).to(dtype)):
            check_act_ops(ops, activation, input, grad_output, residual, affine=number % 2 == 0)


def check_activation(ops: Any, activation: Activation, dtype: torch.dtype) -> None:
    """Compares values and derivatives with those of torch, nearly in float32; in both layouts, and at the kinks."""
    act, tolerance = (activation.code, activation.parameter), 1e-14 if dtype == torch.float64 else 1e-6
    z = torch.cat([torch.linspace(-9, 9, 1600), torch.tensor([-3, 0, 3, 6, 89, -89, 1e3, -1e3, 1e-6])]).double()
    for given in (z.view(1, 1, -1).expand(1, 2, -1).contiguous(), z.view(1, -1).expand(3, -1).contiguous()):
        given.requires_grad_()
        (slope,) = torch.autograd.grad(activation.of(given).sum(), given)
        input = given.detach().to(dtype)
        zeros, ones = torch.zeros(input.size(1), dtype=dtype), torch.ones(input.size(1), dtype=dtype)
        output = ops.batch_norm_elemt(input, None, None, zeros, ones, None, None, *act)
        dy, grad, count = torch.ones_like(input), torch.empty_like(input), torch.tensor(1)
        ops.batch_norm_backward_reduce(dy, input, zeros, ones, None, None, None, None, None, *act, grad)
        rest = count, 1, None, 0, None, False, None
        unreduced = ops.batch_norm_backward_elemt(dy, input, None, zeros, ones, zeros.repeat(2), *rest, *act)
        for actual, expected in ((output, activation.of(given).detach()), (grad, slope), (unreduced, slope)):
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
