"""Activation checkpointing: recomputed calls use the statistics of the original call."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from threading import Thread

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bagua_syncbn import Repeatable, SyncBatchNorm, convert_sync_batchnorm, masked, sync_batch_norm
from bagua_syncbn._torch.checkpoints import observe_checkpoints
from tests.helpers.checkpoints import CHECKPOINTS, kept_checkpoint, plainly
from tests.helpers.observed import collectives
from tests.helpers.steps import check_ranks, draw, unchanged
from tests.helpers.user_layers import BatchNormAct1d

SPLITS = (2, 5)


def check_program(program, layer, reference=None):
    """Compares two steps of ``program(layer, input, own)`` on ranks with ``reference``, or ``program``, in one process.

    ``own`` returns this rank's share of a batch. Returns the collectives of this rank.
    """
    splits, rank = (SPLITS, dist.get_rank()) if dist.is_initialized() else ((sum(SPLITS),), 0)
    plain = copy.deepcopy(layer).double()
    model = convert_sync_batchnorm(copy.deepcopy(plain))
    with collectives() as sent:
        for seed in range(2):
            input, grad_output = draw(2, sum(SPLITS), 4, seed=seed)
            check_ranks(
                *(model, plain, input, grad_output, splits),
                call=lambda x: program(model, x, lambda batch: batch.split(splits)[rank]),
                reference=lambda x: (reference or program)(plain, x, lambda batch: batch),
            )
    return sent


def siamese(layer, input, own, around=plainly):
    """Calls a layer with two inputs that are equal only on rank 0."""
    is_equal = own(torch.arange(sum(SPLITS)) < SPLITS[0]).unsqueeze(1)
    return around(lambda x: layer(x).sin() * layer(torch.where(is_equal, x, x.cos())), input)


def of_no_layer(layer, input, own, around=plainly, function=sync_batch_norm):
    return around(lambda x: function(layer(x), None, None) + function(x, None, None).sin(), input)


def around_its_own_checkpoint(layer, input, own, around=plainly):
    return around(lambda x: layer(around(layer, x).sin()).cos(), input)


def three_times(program):
    """Returns a program with three calls of ``program``, whose backward passes begin with the last call."""
    return lambda layer, input, own: sum(program(layer, scale * input, own) for scale in (1, 2, 3))


def in_a_thread(program):
    """Returns ``program`` with forward and backward in different threads, as on CUDA."""

    def run(*args):
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(program, *args).result()

    return run


def check_checkpoints(cls, program, threaded):
    by_torch = {"function": partial(F.batch_norm, training=True)} if program is of_no_layer else {}
    layer, reference = cls(4, momentum=None), three_times(partial(program, **by_torch))
    wrap = in_a_thread if threaded else lambda program: program
    sent = [check_program(wrap(three_times(program)), layer, reference) for _ in range(2)][-1]  # the first sends probes
    for how, around in CHECKPOINTS.items():
        if (cls, how) != (BatchNormAct1d, "selective, all"):  # torch cannot save a tensor that changes in place
            checkpointed = wrap(three_times(partial(program, around=around)))
            assert check_program(checkpointed, layer, reference) == sent, how


@pytest.mark.parametrize(("cls", "program", "threaded"), [
    (nn.BatchNorm1d, siamese, True),
    (nn.BatchNorm1d, of_no_layer, False),
    (BatchNormAct1d, siamese, False),
    (BatchNormAct1d, around_its_own_checkpoint, True),
])  # fmt: skip
def test_recomputed_calls_send_nothing(pool, cls, program, threaded):
    pool.run(check_checkpoints, 2, cls, program, threaded)
    check_checkpoints(cls, program, threaded)


def with_a_call_in_a_hook(layer, input, own):
    output = layer(input).sin()
    output.register_hook(lambda grad: layer(grad))
    return output


# On ranks, and in a single process with F.batch_norm or the kernels of ranks.
@pytest.mark.parametrize(("is_job", "momentum"), [(True, 0.1), (False, 0.1), (False, None)])
def test_a_forward_inside_backward_is_a_new_call(pool, is_job, momentum):
    """Unless it is checkpointed."""
    layer = nn.BatchNorm1d(4, momentum=momentum)
    if is_job:
        pool.run(check_program, 2, with_a_call_in_a_hook, layer)
    else:
        check_program(with_a_call_in_a_hook, layer)


def test_saved_tensors_may_be_read_outside_backward():
    layer, input = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    output = CHECKPOINTS["non-reentrant"](lambda x: layer(x).sin(), input)
    torch.testing.assert_close(output.grad_fn._saved_self.sin(), output)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_backward_inside_a_checkpoint_recomputes_its_calls(how):
    layer, input = SyncBatchNorm(3, momentum=None), torch.randn(6, 3, requires_grad=True)

    def block(input):
        leaf = input.detach().requires_grad_()
        with torch.enable_grad():
            output = CHECKPOINTS["non-reentrant"](layer, leaf.exp()).square().sum()
        return layer(input + torch.autograd.grad(output, leaf)[0]).sin()

    for around, factor in ((CHECKPOINTS[how], 1), (plainly, -1)):
        (factor * around(block, input).sum()).backward()
    torch.testing.assert_close(input.grad, torch.zeros_like(input))


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "nested"])
def test_an_error_in_recomputation_leaves_no_state(how):
    layer, runs = SyncBatchNorm(3, momentum=None), []
    input = torch.randn(4, 3, requires_grad=True)

    def block(input):
        runs.append(torch.is_grad_enabled())
        output = layer(input)
        if len(runs) == 2:
            raise KeyError("interrupted")
        return layer(output).sin()

    output = CHECKPOINTS[how](block, input)
    with pytest.raises(KeyError, match="interrupted"):
        output.sum().backward(retain_graph=True)
    layer(input)
    output.sum().backward()
    assert len(runs) == 3
    assert layer.num_batches_tracked == 3


# Two runs of a block, and the error if they differ.
OTHER_INPUT = (lambda layer, x, run: layer(x[:, : 4 - run])), "one element for each channel, got 3 for 2"
MORE_CALLS = (
    (lambda layer, x, run: [layer(x).sin() for _ in range(run)][-1]),
    "SyncBatchNorm1d '0': .* more often than the first run, .* 1 call",
)


@pytest.mark.parametrize("how", ["reentrant", "without early stop"])
@pytest.mark.parametrize(("block", "message"), [OTHER_INPUT, MORE_CALLS])
def test_recomputation_that_differs_raises(how, block, message):
    """Calls after the checkpoint are not a part of its first run."""
    layer, runs = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3, momentum=None))), iter([1, 2])
    input = torch.randn(4, 3, requires_grad=True)
    output = CHECKPOINTS[how](lambda x: block(layer, x, next(runs)), input)
    layer(input)
    with pytest.raises(RuntimeError, match=message):
        output.sum().backward()


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_call_that_failed_fails_again_in_recomputation(how):
    layer, is_first = SyncBatchNorm(3), iter([True, False])

    def block(input):
        with suppress(RuntimeError) if next(is_first) else nullcontext():
            layer(input)
        return input.sin()

    with masked(layer, torch.ones(2, 1, dtype=torch.bool)):  # fits no input
        output = CHECKPOINTS[how](block, torch.randn(4, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match="mask: "):
        output.sum().backward()


def by_hand(run, input):
    """Runs without gradients, then with gradients outside backward."""
    with torch.no_grad():
        run(input)
    return run(input)


def in_a_hook(run, input):
    """Runs twice with gradients."""
    output = run(input)
    output.register_hook(lambda grad: grad * run(input))
    return output


# One region for all passes.
REPEATS = {"own": kept_checkpoint, "by hand": by_hand, "in a hook": in_a_hook, "never": plainly}
ONE_PASS = "Repeatable: already used by another forward pass"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", REPEATS)
def test_a_region_belongs_to_one_forward_pass(how):
    layer, input = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    run, forward = Repeatable()(layer), REPEATS[how]
    forward(run, input).sum().backward()
    assert layer.num_batches_tracked == 1
    with unchanged(layer), pytest.raises(RuntimeError, match=ONE_PASS):
        forward(run, input.cos())
    forward(Repeatable()(layer), input.cos()).sum().backward()
    assert layer.num_batches_tracked == 2


def test_an_inner_region_is_created_inside_the_outer_one():
    layer, x = convert_sync_batchnorm(BatchNormAct1d(3)), torch.randn(6, 3)  # counts batches itself

    def program(inner):
        with torch.no_grad(), inner:
            y = layer(x)
        with torch.enable_grad(), inner:  # a repetition, in both runs of the outer region
            assert torch.equal(layer(x), y)
        return layer(5 * y.exp())

    outer = Repeatable()
    with torch.no_grad(), outer:
        first = program(Repeatable())
    for _ in range(2):
        with outer:
            assert torch.equal(program(Repeatable()), first)
    assert layer.num_batches_tracked == 2
    outer, shared = Repeatable(), Repeatable()
    with torch.no_grad(), outer, shared:
        layer(x)
    with outer, pytest.raises(RuntimeError, match=ONE_PASS):
        shared.__enter__()


def test_a_repeated_call_under_a_transform_reuses_statistics():
    layer, region, x = SyncBatchNorm(3, momentum=None), Repeatable(), torch.randn(6, 3)
    with torch.no_grad(), region:
        first = torch.func.jvp(layer, (x,), (x,))
    with unchanged(layer), region:
        torch.testing.assert_close(torch.func.jvp(layer, (x,), (x,)), first, rtol=0, atol=0)


def test_a_region_that_stays_open_in_backward_ends_with_it():
    """As after Ctrl-C in the end of the region."""
    layer, region, input = SyncBatchNorm(3), Repeatable(), torch.randn(4, 3, requires_grad=True)
    with torch.no_grad(), region:
        layer(input)
    input.register_hook(lambda grad: region.__enter__() and None)
    input.sum().backward()
    layer(input)
    assert layer.num_batches_tracked == 2


def test_a_torch_with_incompatible_checkpoints_raises(monkeypatch):
    monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_hook")
    with pytest.raises(ImportError, match=r"torch .* has no attribute '_checkpoint_hook'; update bagua_syncbn"):
        observe_checkpoints(Repeatable)


def regions_alive():
    gc.collect()
    return sum(isinstance(thing, Repeatable) for thing in gc.get_objects())


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "nested", "own"])
def test_regions_are_freed_with_the_graph(how):
    layer, before = SyncBatchNorm(3, momentum=None), regions_alive()
    outputs = []

    def forward():
        outputs.append([CHECKPOINTS[how](layer, torch.randn(4, 3, requires_grad=True)) for _ in range(50)])

    for thread in [Thread(target=forward) for _ in range(2)]:
        thread.start()
        thread.join()
    first, second = outputs
    assert regions_alive() - before == (200 if how == "nested" else 100)
    torch.autograd.backward(first, [torch.ones_like(output) for output in first])
    del first, second
    outputs.clear()
    assert regions_alive() == before
