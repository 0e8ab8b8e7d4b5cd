"""Masks: padding does not change the results."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, masked, sync_batch_norm
from tests.helpers import steps
from tests.helpers.cases import laid_out


def make_layer(channels, **options):
    layer = SyncBatchNorm(channels, **options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(channels, generator=generator))
    return layer


def draw(size, seed=0):
    """Returns an input and a gradient of the output."""
    return steps.draw(2, *size, seed=seed).mul(3).add(1).unbind()


def padding(size, *lengths):
    """Returns the mask of samples that are padded to ``size``."""
    return torch.arange(size) < torch.tensor(lengths).view(-1, 1, 1)


def strided():
    """Returns a model that halves the length of the input, and pools it at the end."""
    convolution, pooling = nn.Conv1d(3, 4, 3, stride=2, padding=1), nn.AdaptiveAvgPool1d(1)
    layers = nn.BatchNorm1d(3), convolution, nn.BatchNorm1d(4), nn.ReLU(), pooling, nn.Flatten(), nn.BatchNorm1d(4)
    return convert_sync_batchnorm(nn.Sequential(*layers)).double()


def halved(mask, shape):
    return None if len(shape) == 2 else mask[..., ::2]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_masked_gives_each_layer_of_a_model_its_mask(reentrant):
    model = strided()
    expected, (input, _), mask = copy.deepcopy(model), draw((4, 3, 10)), padding(10, 10, 3, 1, 6)

    def in_context(input):
        with masked(model, mask, rule=halved, zero_masked=True):
            with masked(model, padding(10, 1)):
                copies.append(copy.deepcopy(model))
            return model(input) if reentrant is None else checkpoint(model, input, use_reentrant=reentrant)

    def by_hand(input):
        hidden = expected[1](expected[0](input, mask=mask, zero_masked=True))
        hidden = expected[2](hidden, mask=padding(5, 5, 2, 1, 3), zero_masked=True)
        return nn.Sequential(*expected.children())[3:](hidden)

    copies = [model]
    results = steps.step(model, input, call=in_context)  # a repetition uses the masks of the first run
    torch.testing.assert_close(results, steps.step(expected, input, call=by_hand))
    for each in copies:  # the masks do not fit other sizes
        each(torch.randn(3, 3, 7, dtype=torch.float64))
    with (
        pytest.raises(RuntimeError, match=r"'2': mask: expected a mask that fits the input \[4, 4, 5\], .*; pass a"),
        masked(model, mask),
    ):
        model(input)


@pytest.mark.parametrize("ways", [("none", "argument", "masked"), ("masked", "rule")])
def test_compiled_models_accept_any_mask(ways):
    """After the first size, torch.compile treats the input's sizes as symbols and the mask's as constants."""
    counters.clear()
    layer, eager = make_layer(3), make_layer(3)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for number, way in enumerate(ways, 2):
        # The rule would remove the mask, and is not called where the mask fits.
        rule = (lambda mask, shape: None) if way == "rule" else None
        for _ in range(2):
            input, _ = draw((2 * number, 3, 4 * number), number)
            mask = torch.rand(2 * number, 1, 4 * number) < 0.5 if way != "none" else None
            with masked(layer, mask, rule=rule) if way in ("masked", "rule") else nullcontext():
                output = compiled(input, mask=mask if way == "argument" else None)
            torch.testing.assert_close(output, eager(input, mask=mask))
    assert counters["stats"]["unique_graphs"] <= len(ways)


def test_compiled_backward_accepts_gradients_in_any_layout():
    """Dynamo reads N from a stride of the gradient, without checking that the gradient has this stride."""

    def normalized(x, mask):  # torch.compile names symbols after x and mask
        return sync_batch_norm(x, None, None, mask=mask)

    compiled = torch.compile(normalized, backend="eager", fullgraph=True)
    for size, layout in (((3, 2, 4, 5), "contiguous"), ((6, 3, 4, 4), "transposed")):
        (batch, grad_output), mask, grads = draw(size), torch.rand(size[0], 1, *size[2:]) < 0.5, []
        for function in (compiled, normalized):
            input = laid_out(batch.clone(), layout).requires_grad_()
            grads += torch.autograd.grad(function(input, mask), input, grad_output)
        torch.testing.assert_close(*grads)


def test_a_mask_may_change_before_backward():
    layer, (input, grad_output), grads = make_layer(3), draw((4, 3, 9)), []
    for is_written in (False, True):
        mask, x = torch.rand(4, 1, 9) < 2, input.clone().requires_grad_()
        output = layer(x, mask=mask)
        if is_written:
            mask[1:] = False
        grads.append(torch.autograd.grad(output, x, grad_output))
    torch.testing.assert_close(*grads)


def test_a_model_mask_may_be_written_to_between_calls():
    layer, (input, _), mask = make_layer(3), draw((4, 3, 9)), padding(9, 5)
    with masked(layer, mask):
        for _ in range(3):
            layer(input)
            mask.fill_(True)
        torch.testing.assert_close(layer(input), make_layer(3)(input))
        # The attachment frees what it derived from earlier values of the mask.
        assert len(layer._sync_state.attachments[0].maskings) == 1


def in_inference_mode(function, *args):
    with torch.inference_mode():
        return function(*args)


def in_forward_mode(function, input):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(input, input))


FIRST_CALLS = {
    "inference mode": in_inference_mode,
    "a transform": lambda function, input: torch.func.jvp(function, (input,), (input,)),
    "forward mode": in_forward_mode,
}


@pytest.mark.parametrize("first", FIRST_CALLS)
@pytest.mark.parametrize("make_mask", [padding, partial(in_inference_mode, padding)])
def test_a_first_call_in_another_mode_keeps_second_derivatives_with_a_model_mask(first, make_mask):
    layer, leaf = make_layer(3), draw((4, 3, 5))[0].requires_grad_()
    with masked(layer, make_mask(5, 3)):
        FIRST_CALLS[first](layer, leaf.detach())
        (grad,) = torch.autograd.grad(layer(leaf).sin().sum(), leaf, create_graph=True)
        grad.square().sum().backward()  # inference tensors have no derivatives
