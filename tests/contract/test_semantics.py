"""Edge cases of layers on ranks."""

from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm, SyncBatchNorm2d
from tests.helpers.cases import Case, compare, run_rank
from tests.helpers.steps import draw
from tests.helpers.tolerances import assert_close

pytestmark = pytest.mark.reference_too


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_a_half_layer_evaluates(dtype, eps_mode):
    layer, input = SyncBatchNorm(3, eps=0.25, eps_mode=eps_mode, dtype=dtype).eval(), torch.randn(4, 3).to(dtype)
    var = max(1.0, 0.25) if eps_mode == "clamp" else 1.25
    assert_close(layer(input), input.double() / var**0.5, "output")


@pytest.mark.parametrize("training", [True, False])
def test_eps_and_momentum_may_be_any_number(training):
    quarter, half = Fraction(1, 4), Fraction(1, 2)
    layers = [SyncBatchNorm(3, *numbers).train(training) for numbers in ((quarter, half), (0.25, 0.5))]
    input = torch.randn(4, 3)
    torch.testing.assert_close(*(layer(input) for layer in layers), rtol=0, atol=0)
    torch.testing.assert_close(*(layer.running_var for layer in layers), rtol=0, atol=0)


def few_values(counts, momentum):
    count = counts[dist.get_rank()]
    plain, masked = torch.randn(count, 2), torch.randn(3, 2, 4)
    for input, mask in ((plain, None), (masked, torch.arange(12).view(3, 1, 4) < count)):
        layer = SyncBatchNorm(2, momentum=momentum)
        output = layer(input.requires_grad_(), mask=mask)
        output.backward(torch.randn_like(output))
        assert output.isfinite().all()
        assert all(tensor.grad.isfinite().all() for tensor in (input, *layer.parameters()))
        torch.testing.assert_close(layer.state_dict(), SyncBatchNorm(2).state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("counts", [(0,), (0, 0), (1, 0), (0, 1)])
def test_fewer_than_two_values_in_the_group_leave_the_buffers_unchanged(groups, counts, momentum):
    groups.run(few_values, len(counts), counts, momentum)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counts_may_exceed_the_range_of_half_precision(dtype):
    layer = SyncBatchNorm2d(2, dtype=dtype)
    output = layer(draw(1, 2, 256, 256, seed=dist.get_rank(), dtype=dtype))
    # 131072 values per channel overflow to inf in float16.
    assert abs(output.std() - 1) < 1e-2
    assert layer.running_var.tolist() == pytest.approx([1, 1], abs=1e-2)


@pytest.mark.ranks(2)
def test_an_empty_rank_participates_under_autocast():
    torch.manual_seed(0)
    net, input = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), SyncBatchNorm2d(4)), torch.randn(4, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        output = net(input[: 4 * dist.get_rank()])
        hidden = net[0](input)
    output.sum().backward()
    expected = torch.nn.functional.batch_norm(hidden.double(), None, None, training=True)
    assert output.dtype == torch.bfloat16
    assert_close(output, expected[: 4 * dist.get_rank()], "output")


def test_a_large_mean_loses_no_accuracy(pool):
    case = Case((8, 8), (3, 10, 10), mean=1e4, std=1.0)
    compare(case, pool.run(run_rank, 2, case), also=0.1)  # the mean is rounded to float32, by up to 1e-3 deviations


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("scale", "order"), [(1e-19, 1), (1e-12, 2)])
def test_without_eps_float32_represents_the_documented_deviations(scale, order):
    values, grad_output = draw(2, 16, 4, seed=dist.get_rank(), dtype=torch.float32)
    results = []
    for dtype in (torch.float32, torch.float64):
        input = (values * scale).to(dtype).requires_grad_()
        output = bagua_syncbn.sync_batch_norm(input, None, None, eps=0.0, eps_mode="clamp")
        (grad,) = torch.autograd.grad(output, input, grad_output.to(dtype), create_graph=order == 2)
        if order == 2:
            (grad,) = torch.autograd.grad((grad * scale).square().sum(), input)
        results.append((output.detach(), grad * scale))
    for value, wanted in zip(*results, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def count_in(dtype):
    """Trains a layer with a counter of ``dtype``, and a layer with a plain counter."""
    layers = SyncBatchNorm(3, momentum=None), SyncBatchNorm(3, momentum=None)
    layers[0].num_batches_tracked = layers[0].num_batches_tracked.to(dtype)
    for _ in range(2):
        input = torch.randn(4, 3)
        for layer in layers:
            layer(input)
    assert layers[0].num_batches_tracked.dtype == dtype
    assert layers[0].num_batches_tracked == 2
    assert torch.equal(layers[0].running_var, layers[1].running_var)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_batches_are_counted_in_any_dtype(pool, dtype):
    count_in(dtype)
    pool.run(count_in, 2, dtype)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize("way", ["eager", "compiled", "forward mode"])
def test_batches_are_counted_only_with_running_statistics(eps_mode, way):
    count, x = torch.tensor(0), torch.randn(4, 3)

    def call(x, *buffers):
        return bagua_syncbn.sync_batch_norm(x, *buffers, num_batches_tracked=count, eps_mode=eps_mode)

    if way == "compiled":
        call = torch.compile(call, backend="eager")
    for counted, buffers in enumerate([(None, None), (torch.zeros(3), torch.ones(3))]):
        with forward_ad.dual_level() if way == "forward mode" else nullcontext():
            call(forward_ad.make_dual(x, x) if way == "forward mode" else x, *buffers)
        assert count == counted
