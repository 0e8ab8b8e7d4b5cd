"""y = act(bn(x) + residual) in one step: what one process gives on all batches, of any order, and what is stored."""

import itertools

import pytest
import torch
import torch.distributed as dist
from cases import laid_out
from formula import draw
from tolerances import TOLERANCES

from bagua_syncbn import SyncBatchNorm, ops, sync_batch_norm
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.ops.activations import ACTIVATIONS, activation_of, derivative

pytestmark = pytest.mark.reference_too

GIVEN = [*ACTIVATIONS, ("leaky_relu", 0.3), ("elu", 0.7), None]
LAYOUTS = [((3, 4, 5), "contiguous"), ((3, 4, 5), "channels_last"), ((4, 6), "sliced"), ((5,), "contiguous")]
# Each activation with and without a residual; layouts, dtypes and modes of eps take turns.
CASES = [
    (activation, residual, *LAYOUTS[number % 4], dtype, "clamp" if number % 5 == 0 else "plus")
    for number, (activation, residual, dtype) in enumerate(
        itertools.product(GIVEN, (False, True), (torch.float64, torch.float32, torch.bfloat16))
    )
    if activation or residual
]


def tensors_of(case, splits):
    """Input, residual and grad_output of all ranks together, and weight and bias."""
    _, _, shape, _, dtype, _ = case
    drawn = [draw(sum(splits), *shape, seed=seed).to(dtype) for seed in (1, 2, 3)]
    return *drawn, *(draw(shape[0], seed=seed).to(dtype) for seed in (4, 5))


def step(case, splits, rank, process_group, dtype=None):
    """Returns output, gradients of input, residual, weight and bias, and running variance, on one rank."""
    activation, has_residual, shape, layout, own_dtype, eps_mode = case
    *batches, weight, bias = tensors_of(case, splits)
    dtype = dtype or own_dtype
    layer = SyncBatchNorm(
        shape[0], eps=0.5, process_group=process_group, dtype=dtype, eps_mode=eps_mode, activation=activation
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    parts = (batch.split(splits)[rank] if rank is not None else batch for batch in batches)
    input, residual, grad_output = (laid_out(part.to(dtype), layout) for part in parts)
    input.requires_grad_()
    residual = residual.requires_grad_() if has_residual else None
    output = layer(input, residual)
    assert output.stride() == torch.empty_like(input).stride()
    output.backward(grad_output)
    return (
        output.detach(),
        input.grad,
        residual.grad if has_residual else None,
        layer.weight.grad,
        layer.bias.grad,
        layer.running_var,
    )


def by_formula(case, splits):
    activation, has_residual, *_, eps_mode = case
    input, residual, grad_output, weight, bias = (tensor.double() for tensor in tensors_of(case, splits))
    wanted = [tensor.requires_grad_() for tensor in (input, residual, weight, bias)]
    dims, view = [0, *range(2, input.dim())], (1, -1, *[1] * (input.dim() - 2))
    var, mean = torch.var_mean(input, dims, correction=0)
    divisor = (var.clamp(min=0.5) if eps_mode == "clamp" else var + 0.5).sqrt()
    output = (input - mean.view(view)) / divisor.view(view) * weight.view(view) + bias.view(view)
    output = output + residual if has_residual else output
    output = activation_of(activation)(output) if activation else output
    grads = torch.autograd.grad(output, wanted, grad_output, allow_unused=True)
    return output.detach(), *grads


def all_steps(splits):
    return [step(case, splits, dist.get_rank(), None) for case in CASES]


@pytest.mark.parametrize("splits", [(1, 4), (3, 0, 4)])
def test_contract(pool, splits):
    for case, *ranks in zip(CASES, *pool.run(all_steps, len(splits), splits), strict=True):
        # A gradient of a residual is rounded before that of the input is made of it.
        tolerance = 4 * TOLERANCES[case[4]][0]
        expected = by_formula(case, splits)
        for name, index in (("output", 0), ("input", 1), ("residual", 2)):
            if expected[index] is not None:
                actual = torch.cat([rank[index] for rank in ranks]).double()
                error = ((actual - expected[index]).abs() / (1 + expected[index].abs())).max()
                assert error <= tolerance, f"{name} of {case} is off by {error:.1e}"
        for index in (3, 4):
            shares = torch.stack([rank[index].double() for rank in ranks])
            error = ((shares.sum(0) - expected[index]).abs() / (1 + shares.abs().sum(0))).max()
            assert error <= tolerance, f"parameter of {case} is off by {error:.1e}"


@pytest.mark.parametrize("activation", GIVEN[:-1], ids=str)
def test_derivatives_are_those_of_torch(activation):
    activation = activation_of(activation)
    z = torch.cat([torch.linspace(-8, 8, 1601, dtype=torch.float64), torch.tensor([-3.0, 0.0, 3.0, 6.0]).double()])
    z.requires_grad_()
    (expected,) = torch.autograd.grad(activation(z).sum(), z)
    actual = derivative(z.detach(), activation.code, activation.parameter)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def saved_bytes(call):
    """Bytes of distinct tensors that autograd stores of a call."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call()
    return sum(storages.values()), output


@pytest.mark.parametrize("training", [True, False])
def test_only_input_and_residual_are_stored(training):
    """The output too, if it is not the layer that stores it."""
    input, residual = (torch.randn(16, 4, 8, 8, requires_grad=True) for _ in range(2))
    size, few = input.nbytes, 2000
    for activation in (*ACTIVATIONS, None):
        layer = SyncBatchNorm(4, activation=activation, process_group=LOCAL).train(training)
        stored, output = saved_bytes(lambda: layer(input))  # noqa: B023
        assert size <= stored <= size + few
        stored, output = saved_bytes(lambda: layer(input, residual))  # noqa: B023
        assert stored <= size * (2 if activation else 1) + few
        output.add_(1)
        output.sum().backward()


WRONG = {
    "swish": (ValueError, "activation: expected one of relu, .*, got 'swish'", {"activation": "swish"}),
    "parameter": (ValueError, "activation: expected a name alone for relu, got", {"activation": ("relu", 0.1)}),
    "two": (ValueError, "activation: expected a name and one parameter for elu", {"activation": ("elu", 1.0, 2.0)}),
    "size": (RuntimeError, r"residual: expected \[4, 2, 3\], the size of input", {"residual": torch.zeros(4, 2, 1)}),
    "dtype": (
        TypeError,
        "residual: expected torch.float32, .*torch.float16",
        {"residual": torch.zeros(4, 2, 3).half()},
    ),
    "device": (
        RuntimeError,
        "residual: expected it on cpu, .*got meta",
        {"residual": torch.zeros(4, 2, 3, device="meta")},
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    error, message, arguments = WRONG[wrong]
    for training in (True, False):
        with pytest.raises(error, match=message):
            sync_batch_norm(torch.randn(4, 2, 3), torch.zeros(2), torch.ones(2), training=training, **arguments)


def test_the_layer_says_its_activation():
    assert "activation=('elu', 0.5)" in repr(SyncBatchNorm(2, activation=("elu", 0.5)))
    assert "activation='silu'" in repr(SyncBatchNorm(2, activation="silu"))
    with pytest.raises(ValueError, match="activation: expected one of"):
        SyncBatchNorm(2, activation="swish")


@pytest.mark.parametrize("activation", GIVEN[:-1], ids=str)
def test_kernels_have_the_same_table(activation):
    """As in Python: exactly in float64, nearly in float32; in both layouts, with ends of chunks."""
    activation = activation_of(activation)
    z = torch.cat(
        [torch.linspace(-9, 9, 1600, dtype=torch.float64), torch.tensor([-3, 0, 3, 6, 89, -89, 1e-6]).double()]
    )
    act = activation.code, activation.parameter
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        for given in (z.view(1, 1, -1).expand(1, 2, -1).contiguous(), z.view(1, -1).expand(3, -1).contiguous()):
            input = given.to(dtype)
            channels = input.size(1)
            mean, invstd = torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)
            output = ops.batch_norm_act_elemt(input, None, None, mean, invstd, None, *act)
            reduced = ops.batch_norm_act_backward_reduce(
                torch.ones_like(input), input, mean, invstd, None, None, None, *act, True
            )
            for actual, expected in ((output, activation(given)), (reduced[3], derivative(given, *act))):
                torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
