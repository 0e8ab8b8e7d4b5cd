"""Higher derivatives on ranks equal those of one process on the whole batch."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from bagua_syncbn import SyncBatchNorm
from tests.helpers.cases import Case, check
from tests.helpers.formula import EPS, normalize
from tests.helpers.observed import collectives
from tests.helpers.steps import draw

ACTIVATIONS = ["silu", "gelu_tanh", ("elu", 0.7), "relu", "tanh"]
SPLITS = [(5,), (2, 5), (0, 3, 4)]
CLAMP = {"eps_mode": "clamp", "eps": 2.0}  # above some of the variances
FROZEN = [(), ("weight", "bias"), ("weight",), ("bias",), ("input",)]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_second_derivatives_equal_one_process(pool, splits):
    double = partial(Case, splits, dtype=torch.float64, order=2)
    shapes = [double(shape) for shape in ((4,), (3, 2, 3), (2, 2, 1, 3))]
    activations = [double((2, 3), options={"activation": name}, residual=True) for name in ACTIVATIONS]
    frozen = [double((3, 2), frozen=names) for names in FROZEN]
    masked = [double((3, 2), masks="nothing", zero_masked=zero) for zero in (False, True)]
    check(pool, *frozen, *shapes, *activations, *masked, double((3, 2), options=CLAMP))


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_third_derivatives_equal_one_process(pool, splits):
    # With momentum=None, F.batch_norm does not compute the reference.
    for options in ({"momentum": None}, {"momentum": None} | CLAMP):
        check(pool, Case(splits, (3, 2), torch.float64, options=options, order=3))


def shared_weight(normalized, weight):
    """Returns first and second derivatives with respect to a weight that the layer's input depends on."""
    (grad,) = torch.autograd.grad(normalized.sin().sum(), weight, create_graph=True)
    return grad.detach(), torch.autograd.grad(grad.square().sum(), weight)[0]


@pytest.mark.ranks(2)
def test_an_input_that_depends_on_the_weight_is_differentiated_once():
    rank, parts = dist.get_rank(), draw(7, 3, seed=1).split((2, 5))
    weight = torch.ones(2, 3, dtype=torch.float64).requires_grad_()  # a copy for each rank
    normalized = normalize(torch.cat([part * w.exp() for part, w in zip(parts, weight, strict=True)]), "plus")
    output = torch.cat([part * w for part, w in zip(normalized.split((2, 5)), weight, strict=True)])
    expected, expected_second = shared_weight(output, weight)
    layer = SyncBatchNorm(3, eps=EPS, dtype=torch.float64)
    grad, second = shared_weight(layer(parts[rank] * layer.weight.exp()), layer.weight)
    dist.all_reduce(second)
    torch.testing.assert_close((grad, second), (expected[rank], expected_second.sum(0)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_second_derivative_takes_two_collectives(create_graph):
    layer = SyncBatchNorm(3, dtype=torch.float64)
    input = draw(4, 3, seed=dist.get_rank()).requires_grad_()
    for _ in range(3):  # until all ranks predict the calls
        output = layer(input)
        with collectives() as first:
            (grad,) = torch.autograd.grad(output, input, draw(4, 3, seed=9), create_graph=create_graph)
        with collectives() as second:
            if create_graph:
                grad.square().sum().backward()
    assert first.total() <= 1
    assert second.total() <= (2 if create_graph else 0)  # the sums, and the moments
