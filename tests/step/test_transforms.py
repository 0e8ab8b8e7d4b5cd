"""Higher derivatives, torch.func and forward-mode differentiation on ranks equal one process on the whole batch."""

from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

from bagua_syncbn import SyncBatchNorm, sync_batch_norm
from bagua_syncbn._ops.activations import ACTIVATIONS
from tests.helpers.cases import Case, check
from tests.helpers.formula import EPS, normalize
from tests.helpers.observed import MESSAGE, collectives
from tests.helpers.options import OTHER
from tests.helpers.steps import draw, gathered

SPLITS = (2, 5)
SIZE = (7, 3, 2)

# Derivatives by autograd

SMOOTH_AND_NOT = ["silu", "gelu_tanh", ("elu", 0.7), "relu", "tanh"]
CLAMP = {"eps_mode": "clamp", "eps": 2.0}  # above some of the variances
FROZEN = [(), ("weight", "bias"), ("weight",), ("bias",), ("input",)]


@pytest.mark.parametrize("splits", [(5,), SPLITS, (0, 3, 4)], ids=str)
def test_higher_derivatives_equal_one_process(pool, splits):
    double = partial(Case, splits, dtype=torch.float64, order=2)
    shapes = [double(shape) for shape in ((4,), (3, 2, 3), (2, 2, 1, 3))]
    activations = [double((2, 3), options={"activation": name}, residual=True) for name in SMOOTH_AND_NOT]
    frozen = [double((3, 2), frozen=names) for names in FROZEN]
    masked = [double((3, 2), masks="nothing", zero_masked=zero) for zero in (False, True)]
    others = [double((3, 2), options={name: value}) for name, value in OTHER._asdict().items()]
    # With momentum=None, F.batch_norm does not compute the reference.
    options = CLAMP, {"momentum": None}, {"momentum": None} | CLAMP
    third = [double((3, 2), options=given, order=3) for given in options]
    check(pool, *frozen, *shapes, *activations, *masked, *others, *third)


def shared_weight(normalized, weight):
    """Returns first and second derivatives with respect to a weight that the layer's input depends on."""
    (grad,) = torch.autograd.grad(normalized.sin().sum(), weight, create_graph=True)
    return grad.detach(), torch.autograd.grad(grad.square().sum(), weight)[0]


@pytest.mark.ranks(2)
def test_an_input_that_depends_on_the_weight_is_differentiated_once():
    rank, parts = dist.get_rank(), draw(7, 3, seed=1).split(SPLITS)
    weight = torch.ones(2, 3, dtype=torch.float64).requires_grad_()  # a copy for each rank
    normalized = normalize(torch.cat([part * w.exp() for part, w in zip(parts, weight, strict=True)]), "plus")
    output = torch.cat([part * w for part, w in zip(normalized.split(SPLITS), weight, strict=True)])
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
    for _ in range(3):  # until all ranks predict the messages
        output = layer(input)
        with collectives() as first:
            (grad,) = torch.autograd.grad(output, input, draw(4, 3, seed=9), create_graph=create_graph)
        with collectives() as second:
            if create_graph:
                grad.square().sum().backward()
    assert first.total() <= 1
    assert second.total() <= (2 if create_graph else 0)  # the sums, and the moments


# Transforms and forward mode


def all_ranks():
    """Returns input, weight and bias, and their tangents."""
    primals = draw(*SIZE, seed=1), draw(3, seed=2), draw(3, seed=3)
    return primals, (draw(*SIZE, seed=4), draw(3, seed=5), draw(3, seed=6))


def shares():
    """Returns this rank's share."""
    return [(input.split(SPLITS)[dist.get_rank()], *parameters) for input, *parameters in all_ranks()]


def layer(input, weight, bias, activation=None):
    return sync_batch_norm(input, None, None, weight, bias, eps=EPS, activation=activation)


def reference(input, weight, bias, activation=None):
    output = normalize(input, "plus") * weight.view(-1, 1) + bias.view(-1, 1)
    return output if activation is None else nn.functional.silu(output)


def dual_numbers(function, primals, tangents):
    with fwd.dual_level():
        duals = [fwd.make_dual(primal, tangent) for primal, tangent in zip(primals, tangents, strict=True)]
        return tuple(fwd.unpack_dual(function(*duals)))


def gradient(function, primals):
    return grad(lambda x: function(x, *primals[1:]).sin().sum())


# Called with a function of (input, weight, bias), primals and tangents. Return tensors like the input, then like the
# parameters.
TRANSFORMS = {
    "jvp": jvp,
    "dual numbers": dual_numbers,
    "grad": lambda f, primals, tangents: grad(lambda *args: (f(*args) * tangents[0]).sum(), (0, 1, 2))(*primals),
    "vjp": lambda f, primals, tangents: vjp(f, *primals)[1](tangents[0]),
    "forward over reverse": lambda f, primals, tangents: (jvp(gradient(f, primals), primals[:1], tangents[:1])[1],),
    "reverse over reverse": lambda f, primals, tangents: vjp(gradient(f, primals), primals[0])[1](tangents[0]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("how", TRANSFORMS)
def test_transforms_over_ranks_equal_one_process(how, activation):
    # The Hessian is symmetric, so both orders give the same product.
    of_all = TRANSFORMS[how.replace("forward over", "reverse over")]
    expected = of_all(partial(reference, activation=activation), *all_ranks())
    own = TRANSFORMS[how](partial(layer, activation=activation), *shares())
    for one, other, whole in zip(*gathered(own), expected, strict=True):
        torch.testing.assert_close(one + other if whole.dim() == 1 else torch.cat([one, other]), whole)


@pytest.mark.ranks(2)
def test_jvp_without_a_tangent_of_the_input_sends_no_sums():
    (input, weight, bias), (_, tangent, _) = all_ranks()
    expected = jvp(lambda w: reference(input, w, bias), (weight,), (tangent,))[1]
    own = shares()[0][0]
    for _ in range(3):  # loops send no probes from the third iteration on
        with collectives() as counted:
            result = jvp(lambda w: layer(own, w, bias), (weight,), (tangent,))[1]
    torch.testing.assert_close(result, expected.split(SPLITS)[dist.get_rank()])
    assert counted[MESSAGE] == 1


@pytest.mark.ranks(2)
def test_vmap_is_refused_in_training_and_works_in_evaluation():
    (input, weight, bias), _ = shares()
    stacked = torch.stack([input, input + 1])
    with pytest.raises(RuntimeError, match="sync_batch_norm: collectives cannot be batched"):
        vmap(lambda x: layer(x, weight, bias))(stacked)
    model = SyncBatchNorm(3).double().eval()
    torch.testing.assert_close(vmap(model)(stacked), torch.stack([model(input), model(input + 1)]))


OPTIONS = {}, {"momentum": None}, {"eps_mode": "clamp"}, *({"activation": name} for name in (*ACTIVATIONS, None))


@pytest.mark.parametrize("mask", [None, draw(5, 1, 2, seed=3) > -1], ids=["all", "masked"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_derivatives_equal_numerical_ones(options, training, mask):
    """Runs gradcheck as torch's tests do: first and second derivatives, backward, forward and batched."""
    layer = SyncBatchNorm(3, **{"eps": EPS} | options).double().train(training)
    scale = torch.tensor([0.2, 2, 3]).view(-1, 1)  # the first variance is below EPS
    tensors = [draw(5, 3, 2, seed=1) * scale, draw(3, seed=2), draw(3, seed=3), draw(5, 3, 2, seed=4)]
    tensors = [tensor.requires_grad_() for tensor in (tensors if "activation" in options else tensors[:3])]

    def call(input, weight, bias, residual=None):
        parameters = {"weight": weight, "bias": bias}
        return functional_call(layer, parameters, (input, residual), {"mask": mask})

    # In one process, only momentum=None usually runs the kernels of ranks.
    checked = {"check_batched_grad": True, "fast_mode": options != {"momentum": None}}
    assert torch.autograd.gradcheck(call, tensors, check_forward_ad=True, **checked)
    assert torch.autograd.gradgradcheck(call, tensors, check_fwd_over_rev=True, **checked)


def test_masked_values_do_not_reach_tangents():
    layer, mask, tangent = SyncBatchNorm(3).double(), draw(5, 1, 2, seed=3) > 0, draw(5, 3, 2, seed=4)
    inputs = [draw(5, 3, 2, seed=1).where(mask, value) for value in (torch.nan, 0)]
    tangents = [jvp(lambda x: layer(x, mask=mask), (input,), (tangent,))[1] for input in inputs]
    torch.testing.assert_close(*(each[mask.expand(5, 3, 2)] for each in tangents))


@pytest.mark.ranks(2)
def test_batched_gradients_over_ranks_raise():
    layer = SyncBatchNorm(3, dtype=torch.float64)
    input, grad_outputs = shares()[0][0].requires_grad_(), draw(2, *shares()[0][0].shape, seed=2)
    layer(input).sum().backward()
    backward = vjp(layer, input)[1]
    for attempt in (
        lambda: torch.autograd.grad(layer(input), input, grad_outputs, is_grads_batched=True),
        lambda: vmap(backward)(grad_outputs),
    ):
        with pytest.raises(RuntimeError, match=r"cannot be batched by torch\.func\.vmap or is_grads_batched"):
            attempt()
    only_parameters = layer(input.detach())
    grads = torch.autograd.grad(only_parameters, layer.weight, grad_outputs, is_grads_batched=True)
    assert grads[0].shape == (2, 3)
    layer(input)  # all ranks raised, and can continue


@pytest.mark.parametrize("length", [2, 2**16], ids=["small", "large"])
def test_one_process_supports_all_transforms(length):
    """Large inputs usually run on our own kernels, which transforms must bypass."""
    primals = draw(3, 2, length, seed=1), draw(2, seed=2), draw(2, seed=3)
    for transform in (
        lambda f: vmap(lambda x: f(x, *primals[1:]))(torch.stack([primals[0], primals[0].sin()])),
        lambda f: jvp(lambda x: f(x, *primals[1:]), primals[:1], (primals[0].sin(),))[1],
        lambda f: hessian(lambda w: f(primals[0], w, primals[2]).sin().sum())(primals[1]),
    ):
        torch.testing.assert_close(transform(layer), transform(reference))
