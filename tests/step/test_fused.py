"""y = act(bn(x) + residual) in one step: values, derivatives, and stored tensors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, sync_batch_norm
from bagua_syncbn._ops.activations import ACTIVATIONS
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.verification.steps import Twin
from tests.helpers.cases import Case, check, compare, run_ranks
from tests.helpers.observed import kept
from tests.helpers.workers import Patched

GIVEN = [*ACTIVATIONS, ("leaky_relu", 0.3), ("elu", 0.7), None]
LAYOUTS = [((3, 4, 5), "contiguous"), ((3, 4, 5), "channels_last"), ((4, 6), "sliced"), ((5,), "contiguous")]


def fused_cases(splits, dtypes=(torch.float64, torch.float32, torch.bfloat16)):
    """Yields each activation with and without a residual, in alternating layouts, dtypes and eps modes."""
    given = itertools.product(GIVEN, (False, True), dtypes)
    for number, (activation, residual, dtype) in enumerate(given):
        if activation or residual:
            shape, layout = LAYOUTS[number % 4]
            options = {"activation": activation, "eps": 2.0, "eps_mode": "clamp" if number % 5 == 0 else "plus"}
            yield Case(splits, shape, dtype, layout=layout, options=options, residual=residual, steps=1)


def always(*_):
    return True


@pytest.mark.parametrize(("splits", "twice"), [((1, 4), False), ((3, 0, 4), False), ((1, 4), True)])
def test_fused_ranks_equal_the_formula_in_one_process(pool, splits, twice):
    """``twice``: both kernels of backward recompute the gradient of the activation, as on CUDA."""
    as_on_cuda = Patched(pool, "_step.normalize._recompute_is_cheaper", always)
    check(as_on_cuda if twice else pool, *fused_cases(splits))


def test_fused_half_precision_is_within_roundings_of_the_formula():
    check(None, *fused_cases((4,), [torch.float16]))


@pytest.mark.parametrize("training", [True, False])
def test_only_input_and_residual_are_stored(training):
    """Copies of them are alive only if they are stored."""
    batch = torch.randn(16, 4, 8, 8, requires_grad=True)
    for activation in (*ACTIVATIONS, None):
        layer = SyncBatchNorm(4, activation=activation, process_group=LOCAL).train(training)
        assert kept(lambda x, layer=layer: layer(x.clone()), batch) == 1
        stored = kept(lambda x, layer=layer: layer(x.clone(), x.clone()), batch)
        assert stored == (2 if activation else 1)


def run_ranks_with_mutable_saved_tensors(cases):
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return run_ranks(cases)


def test_saved_tensors_may_be_mutated(pool):
    """torch clones the tensors that an op writes to, if they are saved for backward."""
    given = itertools.product((None, "silu", "relu"), (False, True), ("", "random"))
    cases = [
        Case((1, 4), (3, 5), torch.float64, options={"activation": activation}, residual=residual, masks=masks)
        for activation, residual, masks in given
    ]
    for case, *results in zip(cases, *pool.run(run_ranks_with_mutable_saved_tensors, 2, cases), strict=True):
        compare(case, results)
    layer, batch = SyncBatchNorm(3, process_group=Twin()).eval(), torch.randn(4, 3, requires_grad=True)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        before = layer(batch)
        layer.train()(batch)  # writes to the running statistics that the evaluation saved
        before.sum().backward()
    torch.testing.assert_close(layer.weight.grad, batch.detach().sum(0) / (1 + layer.eps) ** 0.5)


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.1), ["leaky_relu", 0.1]])
def test_a_call_uses_the_current_slope_of_an_activation(activation):
    input = torch.randn(4, 2)
    for slope in (0.1, 0.1, 0.5):  # the second call is cached
        if isinstance(activation, nn.Module):
            activation.negative_slope = slope
        else:
            activation[1] = slope
        expected = F.leaky_relu(F.batch_norm(input, None, None, training=True), slope)
        torch.testing.assert_close(sync_batch_norm(input, None, None, activation=activation), expected)


def test_setting_activation_instead_of_fused_activation_raises():
    with pytest.raises(AttributeError, match="activation: SyncBatchNorm has no such attribute; set fused_activation"):
        SyncBatchNorm(2).activation = "relu"

    class WithModule(nn.BatchNorm1d):
        def forward(self, input):
            return self.activation(super().forward(input))

    layer = convert_sync_batchnorm(WithModule(2))
    layer.activation = nn.Tanh()
    assert layer(torch.randn(4, 2)).abs().max() < 1


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_infinite_values_in_evaluation_have_the_gradients_of_torch(residual, twice):
    """Constant statistics have no derivative, so an infinite deviation does not produce NaN."""
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
