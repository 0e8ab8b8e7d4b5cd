"""y = act(bn(x) + residual) in one step: what one process gives on all batches, of any order, and what is stored."""

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import laid_out
from comparison import check_activation
from formula import EPS, draw, normalize
from replicated import parallel
from tolerances import TOLERANCES
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import SyncBatchNorm, accumulate_statistics, convert_sync_batchnorm, ops, sync_batch_norm
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.ops.activations import ACTIVATIONS, activation_of

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
        shape[0], eps=EPS, process_group=process_group, dtype=dtype, eps_mode=eps_mode, activation=activation
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
    view = (1, -1, *[1] * (input.dim() - 2))
    output = normalize(input, eps_mode) * weight.view(view) + bias.view(view)
    output = output + residual if has_residual else output
    output = activation_of(activation).of(output) if activation else output
    grads = torch.autograd.grad(output, wanted, grad_output, allow_unused=True)
    return output.detach(), *grads


def all_steps(splits, twice):
    with patch.object(ops, "recompute_is_cheaper", lambda input, activation: twice):
        return [step(case, splits, dist.get_rank(), None) for case in CASES]


@pytest.mark.parametrize(("splits", "twice"), [((1, 4), False), ((3, 0, 4), False), ((1, 4), True)])
def test_fused_ranks_equal_the_formula_in_one_process(pool, splits, twice):
    """``twice``: with gradients of activations that are made in both passes, as on CUDA."""
    for case, *ranks in zip(CASES, *pool.run(all_steps, len(splits), splits, twice), strict=True):
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


@pytest.mark.parametrize("residual", [False, True])
def test_fused_half_precision_is_within_roundings_of_the_formula(residual):
    case = ("silu", residual, (3, 4, 5), "channels_last", torch.float16, "plus")
    actual, expected = step(case, (4,), 0, LOCAL), by_formula(case, (4,))
    for one, other in zip(actual[: 3 if residual else 2], expected, strict=False):
        assert ((one.double() - other).abs() <= 4 * TOLERANCES[torch.float16][0] * (1 + other.abs())).all()


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
    "function": (TypeError, "activation: expected one of relu, .*, got <function relu", {"activation": F.relu}),
    "class": (TypeError, "activation: .* nn.ReLU, .*, got <class 'torch.nn", {"activation": nn.ReLU}),
    "number": (TypeError, "activation: expected one of relu, .*, got 1", {"activation": 1}),
    "module": (TypeError, "activation: expected one of relu, .*, got PReLU", {"activation": nn.PReLU()}),
    "text": (TypeError, r"activation: expected one of relu, .*, got \('elu', 'x'\)", {"activation": ("elu", "x")}),
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
def test_wrong_activations_and_residuals_are_refused_by_name(wrong):
    error, message, arguments = WRONG[wrong]
    for training in (True, False):
        with pytest.raises(error, match=message):
            sync_batch_norm(torch.randn(4, 2, 3), torch.zeros(2), torch.ones(2), training=training, **arguments)


def test_the_layer_says_its_activation():
    assert "activation=('elu', 0.5)" in repr(SyncBatchNorm(2, activation=("elu", 0.5)))
    assert "activation='silu'" in repr(SyncBatchNorm(2, activation="silu"))
    with pytest.raises(ValueError, match="activation: expected one of"):
        SyncBatchNorm(2, activation="swish")


def test_an_activation_is_given_as_a_module_of_torch_too():
    layer = SyncBatchNorm(2, activation=nn.LeakyReLU(0.3, inplace=True))
    assert layer.fused_activation == ("leaky_relu", 0.3)
    assert not list(layer.children())
    layer.fused_activation = nn.GELU(approximate="tanh")
    assert layer.fused_activation.name == "gelu_tanh"
    assert not list(layer.children())
    input = torch.randn(4, 2)
    expected = F.elu(F.batch_norm(input, None, None, training=True), 0.5)
    torch.testing.assert_close(sync_batch_norm(input, None, None, activation=nn.ELU(0.5)), expected)


def test_the_attribute_is_not_mistaken():
    layer = SyncBatchNorm(2)
    for value in ("relu", nn.ReLU()):
        with pytest.raises(AttributeError, match=r"expected SyncBatchNorm\.fused_activation to be set, got activation"):
            layer.activation = value
    with pytest.raises(TypeError, match="activation: expected one of"):
        layer.fused_activation = F.relu

    class WithModule(nn.BatchNorm1d):
        def forward(self, input):
            return self.activation(super().forward(input))

    layer = convert_sync_batchnorm(WithModule(2))
    layer.activation = nn.Tanh()
    assert layer(torch.randn(4, 2)).abs().max() < 1


@pytest.mark.parametrize("activation", GIVEN[:-1], ids=str)
def test_values_and_derivatives_are_those_of_torch(activation):
    for dtype in (torch.float64, torch.float32):
        check_activation(ops, activation_of(activation), dtype)


def second_derivatives(normalize, residual, grad_output, vector):
    """Returns gradients of a function of the gradient of the residual, in a block whose input depends on it."""
    leaves = residual.clone().requires_grad_(), grad_output.clone().requires_grad_()
    output = normalize(leaves[0].sin() * 2, leaves[0])
    (grad,) = torch.autograd.grad(output, leaves[0], leaves[1], create_graph=True)
    return torch.autograd.grad((grad * vector).sum(), leaves)


def layer_of(activation, process_group=None, **options):
    layer = SyncBatchNorm(2, eps=0.5, process_group=process_group, activation=activation, **options).double()
    with torch.no_grad():
        layer.weight.copy_(draw(2, seed=1))
        layer.bias.copy_(draw(2, seed=2))
    return layer


def second_derivatives_on_this_rank(splits, activations):
    tensors = [draw(sum(splits), 2, 3, seed=seed).split(splits)[dist.get_rank()] for seed in (3, 4, 5)]
    return [second_derivatives(layer_of(activation), *tensors) for activation in activations]


def test_fused_second_derivatives_equal_one_process(pool):
    splits, activations = (2, 0, 3), ["silu", "gelu_tanh", ("elu", 0.7), "relu", "tanh"]
    results = pool.run(second_derivatives_on_this_rank, 3, splits, activations)
    tensors = [draw(sum(splits), 2, 3, seed=seed) for seed in (3, 4, 5)]
    for activation, *ranks in zip(activations, *results, strict=True):
        plain = layer_of(None, LOCAL)

        def by_torch(input, residual, plain=plain, activation=activation):
            output = F.batch_norm(input, None, None, plain.weight, plain.bias, True, 0.0, 0.5)
            return activation_of(activation).of(output + residual)

        expected = second_derivatives(by_torch, *tensors)
        for index in (0, 1):
            actual = torch.cat([rank[index] for rank in ranks])
            torch.testing.assert_close(actual, expected[index], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [True, False])
def test_fused_derivatives_equal_numerical_ones(training):
    """All activations, forward mode too."""
    tensors = [draw(3, 2, 2, seed=seed).requires_grad_() for seed in (1, 2)]
    for activation in (*ACTIVATIONS, None):
        layer = layer_of(activation, LOCAL, track_running_stats=not training).train(training)
        assert torch.autograd.gradcheck(layer, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(layer, tensors, fast_mode=True)
        primal, tangent = tensors[0].detach(), draw(3, 2, 2, seed=3)
        residual = tensors[1].detach()
        _, derivative_along = torch.func.jvp(lambda x: layer(x, residual), (primal,), (tangent,))  # noqa: B023
        step = 1e-6 * tangent
        difference = (layer(primal + step, residual) - layer(primal - step, residual)) / 2e-6
        torch.testing.assert_close(derivative_along, difference, rtol=1e-6, atol=1e-6)


def recomputed():
    layer = layer_of("silu", momentum=None)
    rank = dist.get_rank()
    input, residual, grad_output = (draw(rank + 2, 2, 3, seed=seed + rank).requires_grad_() for seed in (1, 5, 9))
    results = []
    for run in (*(partial(checkpoint, layer, use_reentrant=reentrant) for reentrant in (True, False)), layer):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (input, residual)]
        run(*leaves).backward(grad_output)
        results.append((*(leaf.grad for leaf in leaves), layer.num_batches_tracked.item()))
    return results


def test_fused_layers_in_a_checkpoint_send_and_count_once(pool):
    """Nothing is sent or counted once more, and the gradients have the same bits."""
    for *checkpointed, plain in pool.run(recomputed, 2):
        for grads in checkpointed:
            assert torch.equal(grads[0], plain[0])
            assert torch.equal(grads[1], plain[1])
        assert [counted[2] for counted in (*checkpointed, plain)] == [1, 2, 3]


def statistics_and_transforms():
    """Buffers and gradients of the fused layer, and of what it stands for."""
    rank, results = dist.get_rank(), []
    input, residual, grad_output = (draw(rank + 2, 2, 3, seed=seed + rank) for seed in (1, 5, 9))
    for activation in ("silu", None):
        layer, untracked = layer_of(activation, skip_nonfinite=True), layer_of(activation, track_running_stats=False)

        def loss(input, residual, layer=layer, is_fused=activation is not None):
            output = layer(input, residual) if is_fused else F.silu(layer(input) + residual)
            return (output * grad_output).sum()

        with accumulate_statistics(layer):
            loss(input, residual)
            loss(2 * input, residual)
        loss(input / 0, residual)
        grads = torch.func.grad(partial(loss, layer=untracked), argnums=(0, 1))(input, residual)
        results.append([*layer.buffers(), *grads])
    return results


def test_fused_layers_equal_separate_ones_in_statistics_and_transforms(pool):
    """Accumulated, not finite, and by torch.func."""
    for fused, apart in pool.run(statistics_and_transforms, 2):
        torch.testing.assert_close(fused, apart)
        assert fused[2] == 1


def compiled_steps():
    rank = dist.get_rank()
    input, residual, grad_output = (draw(2 * rank, 2, 3, seed=seed + rank).requires_grad_() for seed in (1, 5, 9))
    results = []
    for wrap in (lambda layer: layer, lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True)):
        for activation, given in (("gelu", (input,)), ("relu", (input, residual))):
            layer = layer_of(activation, eps_mode="clamp" if activation == "gelu" else "plus")
            output = wrap(layer)(*given)
            leaves = (*given, *layer.parameters())
            results.append((output, *torch.autograd.grad(output, leaves, grad_output)))
    return [[tensor.detach() for tensor in result] for result in results]


def test_compiled_fused_layers_equal_eager(pool):
    """With a rank that has no samples."""
    for results in pool.run(compiled_steps, 2):
        half = len(results) // 2
        for eager, compiled in zip(results[:half], results[half:], strict=True):
            for one, other in zip(eager, compiled, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("activation", ["relu", "silu", None])
def test_fused_replicas_equal_one_process(activation, single_threaded):
    """Two replicas in one process give what one gives on both batches."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer_of(activation)

        def forward(self, input):
            return self.layer(input, input.cos())

    grads = []
    for replicas in (1, 2):
        model = parallel(Block(), "cpu", replicas)
        input, grad_output = draw(6, 2, 3, seed=1).requires_grad_(), draw(6, 2, 3, seed=2)
        model(input).backward(grad_output)
        grads.append((input.grad, *(parameter.grad for parameter in model.parameters())))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_fused_layers_can_be_traced_and_exported():
    """In evaluation, as operations of torch."""
    layer = layer_of("hardswish").eval()
    input, residual = draw(3, 2, 4, seed=1), draw(3, 2, 4, seed=2)
    expected = layer(input, residual)
    traced = torch.jit.trace(layer, (input, residual))
    exported = torch.export.export(layer, (input, residual)).module()
    for module in (traced, exported):
        torch.testing.assert_close(module(input, residual), expected)
    assert "hardswish" in str(traced.inlined_graph)


def test_fused_layers_keep_the_dtype_of_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        model = nn.Sequential(nn.Conv1d(2, 2, 1), SyncBatchNorm(2, activation="silu", process_group=LOCAL))
        output = model(torch.randn(3, 2, 4))
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_infinite_values_in_evaluation_have_the_gradients_of_torch(residual, twice):
    """Constants have no derivative to multiply an infinite deviation with."""
    layer = SyncBatchNorm(1, activation="relu").eval()
    alone = nn.BatchNorm1d(1).eval()
    given = torch.tensor([[-torch.inf], [1.0], [-2.0], [3.0]])
    added, grad_output = (torch.randn(4, 1) for _ in range(2))
    results = []
    for call in (
        lambda x: layer(x, added if residual else None),
        lambda x: (alone(x) + added if residual else alone(x)).relu(),
    ):
        input = given.clone().requires_grad_()
        output = call(input)
        results.append((output, *torch.autograd.grad(output, input, grad_output, create_graph=twice)))
    assert results[1][1].isfinite().all()
    torch.testing.assert_close(*results)
