"""A forward within a backward pass that no checkpoint repeats: a new one, as it is for torch's layer in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_syncbn import Repeatable, convert_sync_batchnorm

SPLITS = (2, 5)


def draw(seed):
    return torch.randn(sum(SPLITS), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class InBackward(torch.autograd.Function):
    """y = x, and ``function`` of the gradient in backward."""

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
    """With as many values per channel as a scan has, all batches of one distribution have such statistics."""
    return InBackward.apply(layer(input).sin(), lambda grad: grad * layer(input.detach() + 1e-9 * own(draw(5))))


class Reversible(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1); in backward x is computed from y (Gomez et al., 2017)."""

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


def reversible(layer, input, own, mark=lambda function: function):
    halves = input, own(draw(5)).to(input.dtype)
    for _ in range(2):
        halves = Reversible.apply(*halves, mark(lambda x: layer(x).sin()), mark(lambda x: layer(x).cos()))
    return sum(halves)


def marked_reversible(layer, input, own):
    return reversible(layer, input, own, lambda function: Repeatable()(function))


PROGRAMS = [in_a_hook, on_almost_the_same_batch, reversible]


def train(program, layer, own, dtype=torch.float64):
    """Returns outputs and gradients of two steps, one after the other along the channels, and the buffers."""
    layer, results = layer.to(dtype), []
    for step in range(2):
        input = own(draw(2 * step)).to(dtype).requires_grad_()
        output = program(layer, input, own)
        output.backward(own(draw(2 * step + 1)).to(dtype))
        results += [output.detach(), input.grad]
    return torch.cat(results, 1), list(layer.buffers())


def on_a_rank(programs, dtype):
    def own(batch):
        return batch.split(SPLITS)[dist.get_rank()]

    return [train(program, convert_sync_batchnorm(nn.BatchNorm1d(4)), own, dtype) for program in programs]


def check(first, second, expected, **tolerance):
    torch.testing.assert_close(torch.cat([first[0], second[0]]), expected[0], **tolerance)
    for rank in (first, second):
        torch.testing.assert_close(rank[1], expected[1], **tolerance)


def test_forwards_in_a_backward_pass_equal_one_process(pool):
    for program, first, second in zip(PROGRAMS, *pool.run(on_a_rank, 2, PROGRAMS, torch.float64), strict=True):
        expected = train(program, nn.BatchNorm1d(4), lambda batch: batch)
        check(first, second, expected, msg=lambda message, program=program: f"{program.__name__}: {message}")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("momentum", [0.1, None])  # by F.batch_norm, and by the path of the ranks
def test_forwards_in_a_backward_pass_equal_torchs(program, momentum):
    layers = nn.BatchNorm1d(4, momentum=momentum), convert_sync_batchnorm(nn.BatchNorm1d(4, momentum=momentum))
    torch.testing.assert_close(*(train(program, layer, lambda batch: batch) for layer in layers))


def test_reversible_blocks_in_half_precision(pool):
    """Rounded, what they compute again is another batch. Marked, it takes the statistics of the first."""
    ranks = pool.run(on_a_rank, 2, [reversible, marked_reversible], torch.bfloat16)
    expected, buffers = train(reversible, nn.BatchNorm1d(4), lambda batch: batch)
    for (unmarked, marked), rows in zip(ranks, expected.split(SPLITS), strict=True):
        for result, _ in (unmarked, marked):
            torch.testing.assert_close(result.double(), rows, rtol=0.1, atol=0.1)
        assert (unmarked[1][2], marked[1][2]) == (16, 8)
        torch.testing.assert_close(unmarked[1][0].double(), buffers[0], rtol=0.1, atol=0.02)
