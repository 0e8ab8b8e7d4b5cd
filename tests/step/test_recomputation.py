"""Activation checkpointing: each call that is repeated in backward takes what that very call gathered."""

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bagua_syncbn import (
    Repeatable,
    SyncBatchNorm,
    convert_sync_batchnorm,
    freeze_statistics,
    masked,
    sync_batch_norm,
)
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.extras import checkpointing
from bagua_syncbn.torch_internals import checkpoints
from tests.helpers.fake_packages import fairscale_checkpoint_wrapper
from tests.helpers.observed import collectives
from tests.helpers.user_layers import BatchNormAct1d

SPLITS = (2, 5)


class Siamese(nn.Module):
    """One layer for two inputs; on rank 0 the second is padding that equals the first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.BatchNorm1d(4)

    def forward(self, input):
        other = input if dist.is_initialized() and dist.get_rank() == 0 else input.cos()
        return self.layer(input).sin() * self.layer(other)


class TwoGroups(nn.Module):
    """Two calls of no layer on one input: with the statistics of all ranks, and with this rank's."""

    def forward(self, input):
        return sync_batch_norm(input, None, None) + sync_batch_norm(input, None, None, process_group=LOCAL).sin()


def make_blocks(kind):
    torch.manual_seed(0)
    blocks = {
        "plain": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4)),
        "average": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
        "own forward": lambda: nn.Sequential(nn.Linear(4, 4), BatchNormAct1d(4, momentum=0.2)),
        "siamese": Siamese,
        "two groups": TwoGroups,
        "fused": lambda: nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4, activation="silu", momentum=None)),
        "frozen": lambda: nn.Sequential(nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 4)),
    }
    block = blocks[kind]()
    return nn.ModuleList([nn.Linear(4, 4), block, block]).double()


def save_what(policy, ctx, op, *args, **kwargs):
    saves = {torch.ops.aten.addmm.default, torch.ops.aten.tanh.default, torch.ops.aten.sin.default}
    return CheckpointPolicy.MUST_SAVE if policy == "all" or op in saves else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy):
    contexts = partial(create_selective_checkpoint_contexts, partial(save_what, policy))
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def nested(function, input, outer_is_reentrant, inner_is_reentrant):
    inner = partial(checkpoint, function, use_reentrant=inner_is_reentrant)
    return checkpoint(inner, input, use_reentrant=outer_is_reentrant)


def without_early_stop(function, input):
    with torch_checkpoint.set_checkpoint_early_stop(False), torch.autograd.graph.save_on_cpu():
        return checkpoint(function, input, use_reentrant=False, determinism_check="none", preserve_rng_state=False)


class OwnCheckpoint(torch.autograd.Function):
    """As packages write it that do not use torch's."""

    @staticmethod
    def forward(ctx, function, input):
        ctx.function = Repeatable()(function)
        ctx.save_for_backward(input)
        with torch.no_grad():
            return ctx.function(input)

    @staticmethod
    def backward(ctx, grad_output):
        input = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(input)
        torch.autograd.backward(output, grad_output)
        return None, input.grad


CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "without early stop": without_early_stop,
    "nested": partial(nested, outer_is_reentrant=False, inner_is_reentrant=False),
    "nested in reentrant": partial(nested, outer_is_reentrant=True, inner_is_reentrant=False),
    "reentrant, nested": partial(nested, outer_is_reentrant=False, inner_is_reentrant=True),
    "selective, some": selective("some"),
    "selective, all": selective("all"),
    "own": OwnCheckpoint.apply,
}


def backward_together(batches):
    """Autograd comes to the newest first."""
    torch.autograd.backward([output for _, output, _ in batches], [grad_output for *_, grad_output in batches])


def backward_first_first(batches):
    """As pipelines do."""
    for _, output, grad_output in batches:
        output.backward(grad_output)


def backward_in_a_thread(batches):
    """As on CUDA."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(backward_first_first, batches).result()


def train(kind, how, splits=SPLITS, microbatches=2, backward=backward_first_first, dtype=torch.float64):
    """Runs two steps; returns everything that they change, and the collectives of backward."""
    blocks = convert_sync_batchnorm(make_blocks(kind)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    results, counts = [], []
    for _ in range(2):
        batches = []
        for _ in range(microbatches):
            drawn = torch.randn(2, sum(splits), 4, generator=generator, dtype=torch.float64).to(dtype)
            input, grad_output = drawn.split(splits, dim=1)[dist.get_rank()]
            input = output = input.clone().requires_grad_()
            for block in blocks:
                output = CHECKPOINTS[how](block, output) if how else block(output)
            batches.append((input, output, grad_output))
        with collectives() as repeated:
            backward(batches)
        results += [(output.detach(), input.grad) for input, output, _ in batches]
        results += [parameter.grad for parameter in blocks.parameters()]
        blocks.zero_grad()
        counts.append(repeated)
    return results, list(blocks.buffers()), counts


def train_with(hows, kind, options):
    train(kind, None, **options)  # until all ranks expect what comes
    return {how: train(kind, how, **options) for how in (None, *hows)}


def check(pool, hows, kind, **options):
    """Compares with plain training, which `test_contract.py` compares with one process."""
    for rank in pool.run(train_with, len(options.get("splits", SPLITS)), hows, kind, options):
        expected = rank.pop(None)
        for how, results in rank.items():
            torch.testing.assert_close(results, expected, msg=lambda message, how=how: f"{how}: {message}")


@pytest.mark.parametrize("splits", [SPLITS, (5,)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "average", "own forward", "siamese", "two groups", "frozen", "fused"])
def test_a_repetition_changes_nothing(pool, kind, splits):
    # torch refuses to save what a forward of its own changes in place
    hows = [how for how in CHECKPOINTS if (kind, how) != ("own forward", "selective, all")]
    check(pool, hows, kind, splits=splits)


@pytest.mark.parametrize("options", [
    {"splits": (3, 0)},
    {"backward": backward_together, "microbatches": 5},
    {"backward": backward_in_a_thread},
    {"dtype": torch.bfloat16, "microbatches": 1},
])  # fmt: skip
def test_checkpoints_equal_plain_steps_with_each_option(pool, options):
    check(pool, ["reentrant", "non-reentrant", "selective, some"], "plain", **options)


def backward_several_times(how):
    """Through all of one graph, and through a derivative of a derivative."""
    torch.manual_seed(dist.get_rank())
    layer = SyncBatchNorm(3, dtype=torch.float64)
    input = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    output = checkpoint(layer, input, use_reentrant=False) if how else layer(input)
    grads = [torch.autograd.grad(output.sin().sum(), input, retain_graph=True)[0] for _ in range(2)]
    (grad,) = torch.autograd.grad(output.sin().sum(), input, create_graph=True)
    return *grads, *torch.autograd.grad(grad.square().sum(), input), layer.num_batches_tracked


def test_a_checkpoint_repeats_in_each_backward_pass(pool):
    torch.testing.assert_close(pool.run(backward_several_times, 2, True), pool.run(backward_several_times, 2, False))


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "nested"])
def test_a_repetition_that_raises_leaves_nothing_behind(how):
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
    assert not checkpointing.is_repetition()


def test_a_repetition_that_calls_more_often_is_refused_by_name():
    layer = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3, momentum=None)))
    calls = iter([1, 2])
    output = checkpoint(
        lambda x: [layer(x).sin() for _ in range(next(calls))][-1],
        torch.randn(4, 3, requires_grad=True),
        use_reentrant=True,
    )
    with pytest.raises(RuntimeError, match=r"SyncBatchNorm1d '0': expected a repetition to call .* 1 time"):
        output.sum().backward()


def train_by_fairscale(kind):
    """Runs steps without and with its wrapper; returns outputs, gradients and buffers."""
    results = []
    for wrap in (nn.Identity(), fairscale_checkpoint_wrapper):
        torch.manual_seed(0)
        block = convert_sync_batchnorm(make_blocks(kind)[1].append(nn.Identity()))
        wrap(block)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            drawn = torch.randn(2, sum(SPLITS), 4, generator=generator, dtype=torch.float64)
            input, grad_output = drawn.split(SPLITS, dim=1)[dist.get_rank()] if dist.is_initialized() else drawn
            output = block(input.requires_grad_())
            output.backward(grad_output)
        results.append((output.detach(), input.grad, [p.grad for p in block.parameters()], list(block.buffers())))
    return results


@pytest.mark.parametrize("kind", ["plain", "average", "own forward", "frozen"])
def test_fairscale_needs_nothing(pool, kind):
    for plain, wrapped in (train_by_fairscale(kind), *pool.run(train_by_fairscale, 2, kind)):
        torch.testing.assert_close(wrapped, plain)


def test_fairscale_with_a_region_is_refused():
    region = Repeatable()

    class Block(nn.Sequential):
        def forward(self, input):
            return region(super().forward)(input)

    output = fairscale_checkpoint_wrapper(Block(SyncBatchNorm(3)))(torch.randn(4, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"Repeatable: expected none within fairscale's checkpoint_wrapper"):
        output.sum().backward()


class Kept(OwnCheckpoint):
    """One region for all passes."""

    @staticmethod
    def forward(ctx, function, input):
        ctx.function = function
        ctx.save_for_backward(input)
        with torch.no_grad():
            return function(input)


def by_hand(run, input):
    """First without gradients, and with gradients later, but not in backward."""
    with torch.no_grad():
        run(input)
    return run(input)


REPEATS = {
    "own": Kept.apply,
    "by hand": by_hand,
    "with gradients": lambda run, input: run(input),
}


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.ranks(ranks)) for ranks in (1, 2)])
@pytest.mark.parametrize("how", REPEATS)
def test_a_region_is_of_one_pass(how, ranks):
    layer, forward = SyncBatchNorm(3), REPEATS[how]
    run, input = Repeatable()(layer), torch.randn(4, 3, requires_grad=True)
    layer.eval()
    for _ in range(2):  # in which nothing is gathered
        with torch.no_grad():
            run(input)
    layer, run = layer.train(), Repeatable()(layer)
    forward(run, input).sum().backward()
    before = [buffer.clone() for buffer in layer.buffers()]
    with pytest.raises(RuntimeError, match=r"Repeatable: expected a repetition.*one object for each forward pass"):
        forward(run, input.cos())
    assert layer.num_batches_tracked == 1
    torch.testing.assert_close(list(layer.buffers()), before)
    forward(Repeatable()(layer), input.cos()).sum().backward()
    assert layer.num_batches_tracked == 2


def regions_alive():
    gc.collect()
    return sum(isinstance(thing, Repeatable) for thing in gc.get_objects())


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "nested", "own"])
def test_nothing_is_held_beyond_the_graph(how):
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
    assert checkpointing._local.runs == []


# A process that makes no layer.
FIRST_CALL = """
import torch, bagua_syncbn
from torch.utils.checkpoint import checkpoint
for use_reentrant in (False, True):
    x, mean, var = torch.randn(6, 3, requires_grad=True), torch.zeros(3), torch.ones(3)
    call = lambda x: bagua_syncbn.sync_batch_norm(x, mean, var, training=True)
    checkpoint(call, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(mean, 0.1 * x.detach().mean(0))
"""


def test_the_first_call_of_a_process_may_be_in_a_checkpoint():
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, timeout=120)


def by_function(layer):
    def call(input):
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        lengths, zero = layer.lengths, layer.lengths is not None
        return sync_batch_norm(input, *tensors, layer.training, 0.1, layer.eps, lengths=lengths, zero_masked=zero)

    return call


def change(layer, mode):
    """Makes every later call of ``layer`` another one."""
    layer.train(mode != "training")
    layer.lengths, layer.momentum, layer.eps, layer.eps_mode = None, None, 2.0, "clamp"
    layer.fused_activation = "sigmoid"
    with torch.no_grad():
        layer.running_mean.add_(3)
        layer.running_var.mul_(7)
    layer.process_group = LOCAL


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.ranks(ranks)) for ranks in (1, 2)])
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "selective, all", "nested in reentrant", "own"])
@pytest.mark.parametrize("mode", ["training", "evaluation", "frozen"])
@pytest.mark.parametrize("way", ["forward", "own forward", "function"])
def test_a_repetition_is_the_call_that_it_repeats_whatever_changed_since(way, mode, how, ranks):
    if (way, how) == ("own forward", "selective, all"):
        how = "without early stop"  # torch refuses a repetition of other operations, and this forward looks at its mode
    torch.manual_seed(dist.get_rank())
    drawn, lengths, results = torch.randn(2, 4, 3, 5, dtype=torch.float64), torch.tensor([5, 2, 0, 3]), []
    mask = torch.arange(5) < lengths.view(-1, 1, 1)
    for checkpointed in (False, True):
        layer = convert_sync_batchnorm(BatchNormAct1d(3)) if way == "own forward" else SyncBatchNorm(3)
        layer.double().train(mode == "training").lengths = lengths
        if mode == "frozen":
            freeze_statistics(layer.train())
        call = by_function(layer) if way == "function" else layer
        input, grad_output = drawn.masked_fill(~mask, torch.nan).requires_grad_(), drawn[1]
        with masked(layer, mask, zero_masked=True):
            output = CHECKPOINTS[how](call, input[0]) if checkpointed else call(input[0])
        if checkpointed:
            change(layer, mode)
        with masked(layer, torch.ones(1, 1, 9, dtype=torch.bool)) if checkpointed else nullcontext():
            output.backward(grad_output)
        results.append((output.detach(), input.grad, layer.weight.grad, layer.bias.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_repetition_in_evaluation_has_the_statistics_of_the_first_run(how):
    layer, input, grads = SyncBatchNorm(3).eval(), torch.randn(4, 3, requires_grad=True), []
    for around in (lambda layer, input: layer(input), CHECKPOINTS[how]):
        output = around(layer, input)
        if grads:
            change(layer, "evaluation")
        input.grad = layer.weight.grad = None
        output.cos().sum().backward()
        grads.append((input.grad, layer.weight.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.ranks(ranks)) for ranks in (1, 2)])
def test_selective_checkpoints_keep_apart_what_a_layer_and_its_neighbours_compute(ranks):
    layer, input = SyncBatchNorm(3, momentum=None).double(), torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    grads = []
    for call in (CHECKPOINTS["selective, all"], lambda block, input: block(input)):
        output = call(lambda x: layer(x[1:], mask=torch.arange(5).view(5, 1) < 4).clone()[-3:].sin(), input)
        grads.append(torch.autograd.grad(output, input, output.detach().cos()))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_calls_that_the_first_run_refused_are_refused_again(how):
    layer, input = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)

    def block(input):
        for refused in (input[:1], input[:, :2]):  # one value per channel, too few channels
            with suppress(ValueError, RuntimeError):
                layer(refused)
        return layer(input).sin()

    for call in (CHECKPOINTS[how], lambda block, input: -block(input)):
        call(block, input).sum().backward()
    torch.testing.assert_close(input.grad, torch.zeros_like(input))

    def taken_later(input):
        with suppress(RuntimeError) if torch._C._current_graph_task_id() == -1 else nullcontext():
            layer(input)
        return input.sin()

    with masked(layer, torch.ones(2, 1, dtype=torch.bool)):  # fits no input
        output = CHECKPOINTS[how](taken_later, input)
    with pytest.raises(RuntimeError, match="expected a repetition to be refused as the first run was"):
        output.sum().backward()


class UnknownFrame(torch_checkpoint._CheckpointFrame):
    def __init__(self, *args):
        super().__init__(*args)


def test_a_torch_with_other_checkpoints_is_refused_by_name(monkeypatch):
    assert checkpoints._knows_checkpoints()
    monkeypatch.setattr(torch_checkpoint, "_CheckpointFrame", UnknownFrame)
    monkeypatch.setattr(checkpoints, "has_known_checkpoints", checkpoints._knows_checkpoints())
    hook = torch_checkpoint._checkpoint_hook
    checkpoints.observe_checkpoints(Repeatable)
    assert torch_checkpoint._checkpoint_hook is hook
    layer, input = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    layer(input).sum().backward()
    for use_reentrant in (True, False):
        with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint: expected the one of torch"):
            checkpoint(layer, input, use_reentrant=use_reentrant)
