"""Programs that call a layer in any order, on ranks and in one process on the concatenated batch."""

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from bagua_syncbn import convert_sync_batchnorm
from tests.helpers import steps
from tests.helpers.observed import collectives

SPLITS = (2, 5)


def draw(seed):
    return steps.draw(sum(SPLITS), 4, seed=seed)


def share(batch):
    """Returns the samples of this rank."""
    return batch.split(SPLITS)[dist.get_rank()] if dist.is_initialized() else batch


def in_order(outputs, grad_outputs):
    """Makes a backward pass for each output, as pipelines do."""
    for output, grad_output in zip(outputs, grad_outputs, strict=True):
        output.backward(grad_output)


def together(outputs, grad_outputs):
    """Makes one backward pass, which comes to the newest output first."""
    torch.autograd.backward(outputs, grad_outputs)


def in_a_thread(outputs, grad_outputs):
    """Makes backward passes in another thread than the forward passes, as on CUDA."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(in_order, outputs, grad_outputs).result()


def train(program, layer, own=share, dtype=torch.float64, microbatches=1, backward=in_order):
    """Takes two steps of ``program(layer, input, own)``, where ``own`` takes the samples of this rank from a batch.

    Returns outputs and input gradients side by side, gradients of the parameters, buffers, and the collectives of all
    backward passes.
    """
    layer, rows, sent = layer.to(dtype), [], Counter()
    for step in range(2):
        seeds = [2 * (microbatches * step + index) for index in range(microbatches)]
        inputs = [own(draw(seed)).to(dtype).requires_grad_() for seed in seeds]
        outputs = [program(layer, input, own) for input in inputs]
        with collectives() as counted:
            backward(outputs, [own(draw(seed + 1)).to(dtype) for seed in seeds])
        rows += [*(output.detach() for output in outputs), *(input.grad for input in inputs)]
        sent += counted
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in layer.parameters()]
    return torch.cat(rows, 1), gradients, list(layer.buffers()), sent


def check_program(program, layer, reference=None, what="program", **options):
    """Compares ``program`` on this rank with ``reference``, or the same program, of torch's layer in one process.

    Returns the collectives of this rank's backward passes.
    """
    expected = train(reference or program, copy.deepcopy(layer), lambda batch: batch, **options)
    rows, gradients, buffers, sent = train(program, convert_sync_batchnorm(copy.deepcopy(layer)), **options)
    if dist.is_initialized():
        for gradient in gradients:
            dist.all_reduce(gradient)
    results, wanted = (rows, gradients, buffers), (share(expected[0]), *expected[1:3])
    torch.testing.assert_close(results, wanted, msg=lambda text: f"{what}: {text}")
    return sent
