"""A forward inside backward that isn't checkpointed is a new call, as for torch's layer."""

import pytest
import torch
from torch import nn

from tests.helpers.programs import SPLITS, check_program
from tests.helpers.steps import draw


class InBackward(torch.autograd.Function):
    """Returns its input; backward applies ``function`` to the gradient."""

    @staticmethod
    def forward(ctx, input, function):
        ctx.function = function
        return input.clone()

    @staticmethod
    def backward(ctx, grad_output):
        with torch.enable_grad():
            return ctx.function(grad_output.detach().requires_grad_()).detach(), None


def in_a_hook(layer, input, own):
    output = layer(input).sin()
    output.register_hook(lambda grad: layer(grad))
    return output


def on_almost_the_same_batch(layer, input, own):
    """With many values per channel, different batches have nearly equal statistics."""
    return InBackward.apply(
        layer(input).sin(), lambda grad: grad * layer(input.detach() + 1e-9 * own(draw(sum(SPLITS), 4, seed=5)))
    )


class Reversible(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1); backward recomputes x from y (Gomez et al., 2017)."""

    @staticmethod
    def forward(ctx, x1, x2, f, g):
        ctx.f, ctx.g = f, g
        y1 = x1 + f(x2)
        y2 = x2 + g(y1)
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    def backward(ctx, grad1, grad2):
        y1, y2 = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            of_y1 = ctx.g(y1)
        grad1 = grad1 + torch.autograd.grad(of_y1, y1, grad2)[0]
        x2 = (y2 - of_y1).detach().requires_grad_()
        with torch.enable_grad():
            of_x2 = ctx.f(x2)
        return grad1, grad2 + torch.autograd.grad(of_x2, x2, grad1)[0], None, None


def reversible(layer, input, own):
    halves = input, own(draw(sum(SPLITS), 4, seed=5)).to(input.dtype)
    for _ in range(2):
        halves = Reversible.apply(*halves, lambda x: layer(x).sin(), lambda x: layer(x).cos())
    return sum(halves)


# On ranks, and in a single process with F.batch_norm or the kernels of ranks.
@pytest.mark.parametrize(("is_job", "momentum"), [(True, 0.1), (False, 0.1), (False, None)])
@pytest.mark.parametrize("program", [in_a_hook, on_almost_the_same_batch, reversible])
def test_a_forward_inside_backward_is_a_new_call(pool, program, is_job, momentum):
    layer = nn.BatchNorm1d(4, momentum=momentum)
    if is_job:
        pool.run(check_program, 2, program, layer)
    else:
        check_program(program, layer)
