"""Activation checkpointing: the forward that is repeated in backward sees the statistics of the first."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from observed import collectives
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, sync_batch_norm
from bagua_syncbn.autograd import checkpointing

SPLITS = (2, 5)


class OwnForward(nn.BatchNorm1d):
    """Counts its batches and calls the function, as torch's layer does."""

    def forward(self, input):
        self.num_batches_tracked.add_(1)
        return F.relu(F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True, 0.2))


class Shared(nn.Module):
    """One layer twice in one block, on different inputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, input):
        return self.layer(self.linear(self.layer(input)).sin())


class Beside(nn.Module):
    """Layers on one input: the first is far from the block's end, the last far from its beginning."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(5)])

    def forward(self, input):
        return sum(layer(input) for layer in self.layers).sin()


def make_blocks(kind):
    torch.manual_seed(0)
    if kind == "plain":
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4)) for _ in range(2)]
    elif kind == "average":
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)) for _ in range(2)]
    elif kind == "own forward":
        blocks = [nn.Sequential(nn.Linear(4, 4), OwnForward(4)) for _ in range(2)]
    elif kind == "shared":
        blocks = [Shared(), Shared()]
    elif kind == "beside":
        blocks = [Beside()]
    elif kind == "same block twice":
        blocks = [Shared()] * 2
    elif kind == "frozen":  # the layer is in no graph
        blocks = [nn.Sequential(nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 4)), nn.Linear(4, 4)]
    elif kind == "dropout":
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)) for _ in range(2)]
    else:
        raise ValueError(kind)
    return nn.ModuleList(blocks).double()


def save_what(policy, ctx, op, *args, **kwargs):
    if policy == "everything":
        return CheckpointPolicy.MUST_SAVE
    saves = {torch.ops.aten.addmm.default, torch.ops.aten.tanh.default, torch.ops.aten.sin.default}
    return CheckpointPolicy.MUST_SAVE if op in saves else CheckpointPolicy.PREFER_RECOMPUTE


def nested(function, input, outer_is_reentrant=False, inner_is_reentrant=False):
    """Checkpoints within a checkpoint."""
    inner = partial(checkpoint, function, use_reentrant=inner_is_reentrant)
    return checkpoint(inner, input, use_reentrant=outer_is_reentrant)


CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "nested": nested,
    "nested, reentrant": partial(nested, outer_is_reentrant=True, inner_is_reentrant=True),
    "nested in reentrant": partial(nested, outer_is_reentrant=True),
    "reentrant, nested": partial(nested, inner_is_reentrant=True),
    **{
        f"selective, {policy}": partial(
            checkpoint,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, partial(save_what, policy)),
        )
        for policy in ("some", "everything")
    },
}


def backward_together(batches):
    """Autograd comes to the newest first."""
    torch.autograd.backward([output for _, output, _ in batches], [grad_output for *_, grad_output in batches])


def backward_first_first(batches):
    """As pipelines do."""
    for _, output, grad_output in batches:
        output.backward(grad_output)


def backward_in_a_thread(batches):
    """As on CUDA: autograd has numbered no node in this thread."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(backward_first_first, batches).result()


ORDERS = backward_together, backward_first_first, backward_in_a_thread


def train(kind, how, splits, microbatches=1, converted=True, backward=backward_first_first, is_same=False):
    """Runs some steps; returns everything that they change, and the collectives of forward and backward.

    With ``is_same`` all microbatches of rank 0 are the same, and those of the others are not.
    """
    rank = dist.get_rank() if converted else None
    blocks = make_blocks(kind)
    if converted:
        blocks = convert_sync_batchnorm(blocks)
    apply = CHECKPOINTS.get(how, lambda block, input: block(input))
    generator = torch.Generator().manual_seed(1)
    outputs, input_grads, counts = [], [], []
    for _ in range(2):
        batches = []
        with profile(activities=[ProfilerActivity.CPU]) as forward:
            for _ in range(microbatches):
                input = torch.randn(sum(splits), 4, generator=generator, dtype=torch.float64)
                grad_output = torch.randn(sum(splits), 4, generator=generator, dtype=torch.float64)
                if converted:
                    input, grad_output = input.split(splits)[rank], grad_output.split(splits)[rank]
                if is_same and rank == 0 and batches:
                    input = batches[0][0].detach()
                input = input.clone().requires_grad_()
                output = input
                for block in blocks:
                    output = apply(block, output)
                batches.append((input, output, grad_output))
        with profile(activities=[ProfilerActivity.CPU]) as repeated:
            backward(batches)
        outputs += [output.detach() for _, output, _ in batches]
        input_grads += [input.grad for input, _, _ in batches]
        counts.append((collectives(forward), collectives(repeated)))
    parameter_grads = {name: parameter.grad for name, parameter in blocks.named_parameters()}
    return (
        {"outputs": outputs, "input_grads": input_grads, "parameter_grads": parameter_grads},
        dict(blocks.named_buffers()),
        counts,
    )


def check(pool, kind, how, splits=SPLITS, microbatches=1, **options):
    run = partial(train, splits=splits, microbatches=microbatches, **options)
    plain = pool.run(run, len(splits), kind, "not at all")
    repeated = pool.run(run, len(splits), kind, how)
    for (expected, buffers, counts), (results, repeated_buffers, repeated_counts) in zip(plain, repeated, strict=True):
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(repeated_buffers, buffers)
        assert repeated_counts == counts


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("kind", ["plain", "average", "own forward", "shared", "same block twice", "frozen"])
def test_repeated_once_counted_once(pool, kind, how):
    if (kind, how) == ("own forward", "selective, everything"):
        pytest.skip("torch refuses to save what a forward of its own changes in place")
    check(pool, kind, how)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_the_repeated_forward_equals_one_process(pool, how):
    expected, buffers, _ = train("plain", "not at all", SPLITS, converted=False)
    ranks = pool.run(train, 2, "plain", how, SPLITS)
    for rank, (results, rank_buffers, _) in enumerate(ranks):
        torch.testing.assert_close(rank_buffers, buffers)
        for name in ("outputs", "input_grads"):
            torch.testing.assert_close(results[name], [t.split(SPLITS)[rank] for t in expected[name]])


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "selective, some"])
@pytest.mark.parametrize("kind", ["plain", "shared", "dropout"])
def test_several_batches_at_once(pool, kind, how):
    """Three forwards before their three backwards, as in pipelines: each finds its own."""
    if kind == "dropout" and how == "reentrant":
        pool.run(seed_rank, 2)
    check(pool, kind, how, microbatches=3)


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize(
    ("kind", "backward"),
    [*(("beside", backward) for backward in ORDERS), ("shared", backward_together), ("frozen", backward_first_first)],
)
def test_a_rank_whose_batches_are_the_same(pool, kind, how, backward):
    """Its own statistics do not tell them apart, and the other ranks' differ."""
    check(pool, kind, how, microbatches=3, backward=backward, is_same=True)


def seed_rank():
    torch.manual_seed(dist.get_rank())


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_empty_rank(pool, how):
    check(pool, "plain", how, splits=(3, 0))


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "selective, some", "selective, everything"])
@pytest.mark.parametrize("kind", ["plain", "average", "own forward", "shared"])
def test_one_rank(pool, kind, how):
    """F.batch_norm counts its batches once too."""
    if (kind, how) == ("own forward", "selective, everything"):
        pytest.skip("torch refuses to save what a forward of its own changes in place")
    check(pool, kind, how, splits=(5,))


def keep_graph(how):
    """A second backward through one graph repeats the forward once more."""
    layer = SyncBatchNorm(3, dtype=torch.float64)
    input = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    output = CHECKPOINTS[how](layer, input).sin()
    grad_output = torch.randn_like(output)
    first = torch.autograd.grad(output, [input, *layer.parameters()], grad_output, retain_graph=True)
    second = torch.autograd.grad(output, [input, *layer.parameters()], grad_output)
    torch.testing.assert_close(first, second)
    return layer.num_batches_tracked.item()


def test_backward_twice(pool):
    assert pool.run(keep_graph, 2, "non-reentrant") == [1, 1]


def double_backward(how):
    """Gradients of gradients of what is repeated."""
    torch.manual_seed(dist.get_rank())
    layer = SyncBatchNorm(3, dtype=torch.float64)
    input = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    output = CHECKPOINTS[how](layer, input) if how else layer(input)
    (grad,) = torch.autograd.grad(output.sin().sum(), input, create_graph=True)
    grad.square().sum().backward()
    return input.grad, layer.num_batches_tracked.item()


def test_double_backward(pool):
    plain, repeated = pool.run(double_backward, 2, None), pool.run(double_backward, 2, "non-reentrant")
    torch.testing.assert_close(repeated, plain)


def autocast(how):
    block = convert_sync_batchnorm(make_blocks("plain"))[0].float()
    input = torch.randn(64, 4, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = CHECKPOINTS[how](block, input) if how else block(input)
    output.backward(torch.randn(64, 4, generator=torch.Generator().manual_seed(9)).to(output.dtype))
    return output.detach(), input.grad, block[1].running_mean


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_autocast(pool, how):
    torch.testing.assert_close(pool.run(autocast, 2, how), pool.run(autocast, 2, None))


def overflow(how):
    """As in mixed precision, where the step is then left out."""
    layer = SyncBatchNorm(2)
    input = torch.tensor([[1.0, float("inf")], [2.0, float("nan")]], requires_grad=True)
    output = CHECKPOINTS[how](layer, input)
    output.sum().backward()
    return layer.num_batches_tracked.item()


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_overflow_repeats_too(pool, how):
    assert pool.run(overflow, 2, how) == [1, 1]


class ForwardInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, layer, other):
        ctx.layer, ctx.other = layer, other
        return input * 1

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output + ctx.layer(ctx.other), None, None


def forward_of_other_input(ran_before, devices=("cpu",)):
    """A forward in backward that repeats nothing: where nothing could be meant, it is one like any other."""
    checkpointing.ASSERTING_DEVICES = devices
    layer = SyncBatchNorm(3)
    input = torch.randn(4, 3, requires_grad=True)
    if ran_before:
        with torch.no_grad():
            layer(input)
    output = ForwardInBackward.apply(input, layer, torch.full((4, 3), float(dist.get_rank())))
    if not ran_before:
        output.sum().backward()
        return layer.running_mean.tolist()
    with pytest.raises(RuntimeError, match="got input with other statistics than any that is remembered"):
        output.sum().backward()
    return layer.num_batches_tracked.item()


def test_forward_in_backward_that_repeats_nothing(pool):
    assert pool.run(forward_of_other_input, 2, False) == [pytest.approx([0.05] * 3)] * 2
    assert pool.run(forward_of_other_input, 2, True, ()) == [1, 1]
    assert pool.run(forward_of_other_input, 2, True) == [1, 1]


def remembered():
    layer = SyncBatchNorm(3)
    alive = checkpointing.forwards_of(layer)._alive
    first = layer(torch.randn(4, 3, requires_grad=True))  # outlives the others
    numbers = []
    for _ in range(3):
        output = layer(torch.randn(4, 3, requires_grad=True))
        numbers.append(len(alive))
        output.sum().backward()
    del output
    gc.collect()
    numbers.append(len(alive))
    del first
    gc.collect()
    numbers.append(len(alive))
    with torch.inference_mode():
        layer(torch.randn(4, 3))
    numbers.append(len(alive))
    with torch.no_grad():
        for _ in range(2 * checkpointing.HELD_WITHOUT_GRAPH):
            layer(torch.randn(4, 3))
    numbers.append(len(alive))
    layers = len(checkpointing.forwards_by_layer)
    del layer, alive
    gc.collect()
    return numbers, layers - len(checkpointing.forwards_by_layer)


def test_what_is_remembered_is_let_go(pool):
    for numbers, layers in pool.run(remembered, 2):
        assert numbers == [2, 2, 2, 1, 0, 0, checkpointing.HELD_WITHOUT_GRAPH]
        assert layers == 1


def forward_after_inference():
    """What ran in inference mode could not be saved for backward, and is not what a checkpoint repeats."""
    layer, input = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    with torch.inference_mode():
        layer(input)
    ForwardInBackward.apply(input, layer, input.detach()).sum().backward()
    return layer.num_batches_tracked.item()


def test_forward_in_inference_mode(pool):
    assert pool.run(forward_after_inference, 2) == [2, 2]


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_tensors_without_data(how):
    layer = SyncBatchNorm(3, momentum=None, device="meta")
    input = torch.empty(4, 3, device="meta", requires_grad=True)
    CHECKPOINTS[how](layer, input).sum().backward()
    assert input.grad.shape == (4, 3)


def test_a_captured_pass_reads_only_what_was_captured(monkeypatch):
    """Replayed, it would read what has been given back since. With tensors that are on no device."""
    forwards = checkpointing.Forwards()
    with FakeTensorMode():
        stats = torch.empty(8, device="cuda")

    def forward_pass(is_captured):
        monkeypatch.setattr(checkpointing, "is_capturing", lambda: is_captured)
        return checkpointing.Forward(stats, 1e-5, "plus", True)

    passes = {is_captured: forward_pass(is_captured) for is_captured in (False, True)}
    for forward in passes.values():
        forwards.remember(forward)
    for is_captured, forward in passes.items():
        assert forwards._alike(forward_pass(is_captured)) == [forward]


@pytest.fixture
def eager_threads():
    """Runs functions in threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(4) as threads:
        yield threads
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    "layer", [SyncBatchNorm(3, momentum=None), lambda x: sync_batch_norm(x, None, None, eps_mode="clamp")]
)
def test_threads_that_share_a_layer(eager_threads, layer):
    def train_alone(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            input, grad_output = torch.randn(2, 4, 3, generator=generator)
            input.requires_grad_()
            expected = torch.autograd.grad(layer(input), input, grad_output)
            result = torch.autograd.grad(CHECKPOINTS["non-reentrant"](layer, input), input, grad_output)
            torch.testing.assert_close(result, expected)

    list(eager_threads.map(train_alone, range(4)))


def test_threads_do_not_let_go_what_others_hold(eager_threads):
    layer, input = SyncBatchNorm(3, momentum=None), torch.randn(4, 3, requires_grad=True)
    output = CHECKPOINTS["reentrant"](layer, input)

    def run_often():
        with torch.no_grad():
            for _ in range(checkpointing.HELD_WITHOUT_GRAPH):
                layer(torch.randn(4, 3))

    eager_threads.submit(run_often).result()
    output.sum().backward()
    assert layer.num_batches_tracked == checkpointing.HELD_WITHOUT_GRAPH + 1


def forwards_after(barrier, layer):
    barrier.wait()
    return checkpointing.forwards_of(layer)


def test_threads_that_come_to_a_layer_first(eager_threads):
    for _ in range(200):
        layer, barrier = SyncBatchNorm(3), Barrier(4)
        found = [eager_threads.submit(forwards_after, barrier, layer) for _ in range(4)]
        assert len({forwards.result() for forwards in found}) == 1


def functional_form(how):
    buffers, expected = ((torch.zeros(3), torch.ones(3)) for _ in range(2))
    input = torch.randn(4, 3, requires_grad=True)
    output = CHECKPOINTS[how](lambda x: sync_batch_norm(x, *buffers), input)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        output.backward(torch.randn_like(output))
    with torch.no_grad():
        sync_batch_norm(input, *expected)
    return buffers, expected, collectives(prof)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_function_without_a_layer(pool, how):
    for buffers, expected, counts in pool.run(functional_form, 2, how):
        torch.testing.assert_close(buffers, expected)
        assert counts == {"c10d::allreduce_": 1}
