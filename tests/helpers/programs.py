"""Programs that call a layer in any order, on ranks and in one process on the concatenated batch."""

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bagua_syncbn import convert_sync_batchnorm
from tests.helpers.observed import collectives

SPLITS = (2, 5)


def draw(seed):
    return torch.randn(sum(SPLITS), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_order(outputs, grad_outputs):
    """Backward passes as pipelines make them."""
    for output, grad_output in zip(outputs, grad_outputs, strict=True):
        output.backward(grad_output)


def together(outputs, grad_outputs):
    """One backward pass, which comes to the newest output first."""
    torch.autograd.backward(outputs, grad_outputs)


def in_a_thread(outputs, grad_outputs):
    """Backward passes in another thread than the forward passes, as on CUDA."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(in_order, outputs, grad_outputs).result()


class Trained(NamedTuple):
    rows: Tensor  # outputs and gradients of the inputs of all microbatches, side by side
    buffers: list[Tensor]
    gradients: list[Tensor]  # gradients of the parameters
    collectives: Counter  # collectives in all backward passes


def train(program, layer, own, dtype=torch.float64, microbatches=1, backward=in_order):
    """Makes two steps of ``program(layer, input, own)``, where ``own`` takes the samples of this rank from a batch."""
    layer, rows, total = layer.to(dtype), [], Counter()
    for step in range(2):
        seeds = [2 * (microbatches * step + index) for index in range(microbatches)]
        inputs = [own(draw(seed)).to(dtype).requires_grad_() for seed in seeds]
        outputs = [program(layer, input, own) for input in inputs]
        with collectives() as counted:
            backward(outputs, [own(draw(seed + 1)).to(dtype) for seed in seeds])
        rows += [*(output.detach() for output in outputs), *(input.grad for input in inputs)]
        total += counted
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in layer.parameters()]
    return Trained(torch.cat(rows, 1), list(layer.buffers()), gradients, total)


def on_a_rank(program, layer, options):
    def own(batch):
        return batch.split(SPLITS)[dist.get_rank()] if dist.is_initialized() else batch

    return train(program, convert_sync_batchnorm(copy.deepcopy(layer)), own, **options)


def run(pool, program, layer, **options):
    """Returns what each of two ranks has, with ``layer`` converted; without a pool, what one rank has without a job."""
    return pool.run(on_a_rank, 2, program, layer, options) if pool else [on_a_rank(program, layer, options)]


def in_one_process(program, layer, **options):
    """Returns what torch's ``layer`` has on the batches of all ranks."""
    return train(program, copy.deepcopy(layer), lambda batch: batch, **options)


def check(ranks, expected, what="ranks"):
    close = partial(torch.testing.assert_close, msg=lambda message: f"{what}: {message}")
    close(torch.cat([rank.rows for rank in ranks]), expected.rows)
    for rank in ranks:
        close(rank.buffers, expected.buffers)
    close([sum(each) for each in zip(*(rank.gradients for rank in ranks), strict=True)], expected.gradients)
