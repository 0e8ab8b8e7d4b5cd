"""Derivatives of derivatives over ranks are those of one process on the concatenated batch, in float64."""

import copy

import pytest
import torch
import torch.distributed as dist
from formula import EPS, draw, normalize
from observed import MESSAGE, collectives
from torch import nn

from bagua_syncbn import SyncBatchNorm, sync_batch_norm


def arguments(splits, shape, differentiable):
    """Returns input, weight, bias and grad_output of each rank. The parameters are equal, but each rank has its own."""
    scale = torch.linspace(0.1, 2, shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    inputs = (draw(sum(splits), *shape, seed=1) * scale + 1).split(splits)
    grad_outputs = draw(sum(splits), *shape, seed=2).split(splits)
    ranks = []
    for input, grad_output in zip(inputs, grad_outputs, strict=True):
        values = {"input": input, "weight": draw(shape[0], seed=3), "bias": draw(shape[0], seed=4)}
        tensors = {name: value.clone().requires_grad_(name in differentiable) for name, value in values.items()}
        ranks.append({**tensors, "grad_output": grad_output.clone().requires_grad_()})
    return ranks


def derivatives(outputs, ranks, first_rank, differentiable, order):
    """Returns, for each order, the gradients of all that is differentiable, each order with random seeds."""
    wanted = [tensors[name] for tensors in ranks for name in (*differentiable, "grad_output")]
    values, seeds, results = outputs, [tensors["grad_output"] for tensors in ranks], []
    for derivative in range(1, order + 1):
        grads = torch.autograd.grad(
            values, wanted, seeds, create_graph=derivative < order, allow_unused=True, materialize_grads=True
        )
        results.append([grad.detach() for grad in grads])
        # A tensor's seed does not depend on whether its rank is alone in this process.
        first = 100 * derivative + first_rank * (len(differentiable) + 1)
        pairs = [(grad, draw(*grad.shape, seed=first + i)) for i, grad in enumerate(grads) if grad.requires_grad]
        values, seeds = [grad for grad, _ in pairs], [seed for _, seed in pairs]
    return results


def per_channel(values, input):
    return values.view(1, -1, *[1] * (input.dim() - 2))


def on_one_process(splits, shape, differentiable, order, eps_mode):
    ranks = arguments(splits, shape, differentiable)
    normalized = normalize(torch.cat([tensors["input"] for tensors in ranks]), eps_mode)
    outputs = [
        part * per_channel(tensors["weight"], part) + per_channel(tensors["bias"], part)
        for part, tensors in zip(normalized.split(splits), ranks, strict=True)
    ]
    return derivatives(outputs, ranks, 0, differentiable, order)


def on_this_rank(splits, shape, differentiable, order, eps_mode):
    rank = dist.get_rank()
    tensors = arguments(splits, shape, differentiable)[rank]
    buffers = [torch.zeros(shape[0]), torch.ones(shape[0]), torch.tensor(0)]
    output = sync_batch_norm(
        tensors["input"],
        *buffers[:2],
        tensors["weight"],
        tensors["bias"],
        momentum=None,
        num_batches_tracked=buffers[2],
        eps=EPS,
        eps_mode=eps_mode,
    )
    before = copy.deepcopy(buffers)
    results = derivatives([output], [tensors], rank, differentiable, order)
    assert all(torch.equal(*pair) for pair in zip(buffers, before, strict=True))
    return results


def check(pool, splits, shape=(3, 2), differentiable=("input", "weight", "bias"), order=2, eps_mode="plus"):
    case = (splits, shape, differentiable, order, eps_mode)
    expected = on_one_process(*case)
    actual = pool.run(on_this_rank, len(splits), *case)
    for derivative in range(order):
        together = [grad for results in actual for grad in results[derivative]]
        for grad, reference in zip(together, expected[derivative], strict=True):
            torch.testing.assert_close(grad, reference, rtol=1e-10, atol=1e-10)


SPLITS = [(5,), (4, 4), (2, 5), (3, 0), (2, 4, 1), (0, 3, 4)]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize(
    "differentiable",
    [("input", "weight", "bias"), ("input",), ("input", "bias"), ("input", "weight"), ("weight", "bias")],
    ids=" ".join,
)
def test_second_derivatives_equal_one_process(pool, splits, differentiable):
    check(pool, splits, differentiable=differentiable)


@pytest.mark.parametrize("shape", [(4,), (3, 2, 3), (2, 2, 1, 3)], ids=str)
def test_second_derivatives_of_other_shapes(pool, shape):
    check(pool, (2, 5), shape)


@pytest.mark.parametrize("splits", [(5,), (2, 5), (0, 3, 4)], ids=str)
def test_second_derivatives_where_eps_replaces_the_variance(pool, splits):
    check(pool, splits, eps_mode="clamp")


@pytest.mark.parametrize("splits", [(5,), (2, 5), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_third_derivatives_equal_one_process(pool, splits, eps_mode):
    check(pool, splits, order=3, eps_mode=eps_mode)


def local(input, weight, bias):
    buffers = torch.zeros(3), torch.ones(3)
    # Without momentum one process takes the path of the ranks too.
    return sync_batch_norm(
        input, *buffers, weight, bias, momentum=None, num_batches_tracked=torch.tensor(0), eps=EPS, eps_mode="clamp"
    )


def test_derivatives_equal_numerical_ones():
    # Variances of the channels, the first below EPS.
    scale = torch.tensor([0.2, 2, 3], dtype=torch.float64).view(-1, 1)
    tensors = [draw(5, 3, 2, seed=1) * scale, draw(3, seed=2), draw(3, seed=3)]
    for tensor in tensors:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(local, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(local, tensors, check_fwd_over_rev=True)


def shared_weight():
    """The input of the layer depends on its weight, which must not be counted twice."""
    layer = SyncBatchNorm(3, eps=EPS, dtype=torch.float64)
    input = draw(7, 3, seed=1).split((2, 5))[dist.get_rank()]
    output = layer(input * layer.weight.exp())
    (grad,) = torch.autograd.grad(output.sin().sum(), layer.weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), layer.weight)
    dist.all_reduce(second)
    return grad.detach(), second


def test_derivatives_hold_where_the_input_depends_on_the_weight(pool):
    weight = torch.ones(2, 3, dtype=torch.float64).requires_grad_()  # a copy for each rank
    parts = draw(7, 3, seed=1).split((2, 5))
    normalized = normalize(torch.cat([part * w.exp() for part, w in zip(parts, weight, strict=True)]), "plus")
    output = torch.cat([part * w for part, w in zip(normalized.split((2, 5)), weight, strict=True)])
    (grad,) = torch.autograd.grad(output.sin().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), weight)
    for rank, (rank_grad, rank_second) in enumerate(pool.run(shared_weight, 2)):
        torch.testing.assert_close(rank_grad, grad[rank])
        torch.testing.assert_close(rank_second, second.sum(0))


def counted_backward(create_graph):
    layer = SyncBatchNorm(3, dtype=torch.float64)
    input = draw(4, 3, seed=dist.get_rank()).requires_grad_()
    for _ in range(2):  # until all ranks expect what comes
        (grad,) = torch.autograd.grad(layer(input), input, draw(4, 3, seed=9), create_graph=create_graph)
        if create_graph:
            grad.square().sum().backward()
    output = layer(input)
    with collectives() as first:
        (grad,) = torch.autograd.grad(output, input, draw(4, 3, seed=9), create_graph=create_graph)
    with collectives() as second:
        if create_graph:
            grad.square().sum().backward()
    return first, second


def test_a_second_derivative_takes_two_collectives(pool):
    for first, second in pool.run(counted_backward, 2, True):
        assert first == {MESSAGE: 1}
        assert second == {MESSAGE: 2}  # the sums, and the moments
    for first, second in pool.run(counted_backward, 2, False):
        assert (first, second) == ({MESSAGE: 1}, {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_second_derivatives_in_half_precision_are_rounded_once(dtype):
    """Computed in float32 and rounded at the end, like the first derivatives."""
    generator = torch.Generator().manual_seed(0)
    input, grad_output = (torch.randn(64, 3, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    layer = SyncBatchNorm(3, momentum=None).train()
    (grad,) = torch.autograd.grad(layer(input), input, grad_output, create_graph=True)
    (second,) = torch.autograd.grad(grad.sin().sum(), input)
    wide, wide_grad = (t.detach().double().requires_grad_() for t in (input, grad_output))
    expected = nn.functional.batch_norm(wide, None, None, training=True)
    (expected,) = torch.autograd.grad(expected, wide, wide_grad, create_graph=True)
    assert grad.dtype == second.dtype == dtype
    torch.testing.assert_close(grad.double(), expected, rtol=1e-2, atol=1e-2)
    (expected,) = torch.autograd.grad(expected.sin().sum(), wide)
    torch.testing.assert_close(second.double(), expected, rtol=5e-2, atol=5e-2)
