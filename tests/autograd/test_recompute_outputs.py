"""Outputs that are made anew in backward: the same gradients bit for bit, and nothing stored that need not be."""

import copy
import gc
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from replicated import PAIRS, inputs_of, parallel
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, ops, recompute_outputs


class Readers(nn.Module):
    """Outputs that are read whole, by two, as views and in parts; that are written to; and one that another reads."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, affine=index != 2) for index in range(5))
        self.last = nn.Linear(5, 2)

    def forward(self, input):
        output = F.silu(self.norms[0](self.convs[0](input)))
        output = self.norms[1](self.convs[1](output))
        with torch.no_grad():
            output.clamp_(max=1)
        output = output.sigmoid() + output.square() * output.mean((2, 3), keepdim=True)
        left, right = self.norms[2](self.convs[2](output)).chunk(2, 1)
        output = torch.cat([F.gelu(left), right.sin()], 1)
        output = self.convs[3](self.norms[3](output).relu_())
        return self.last(self.norms[4](self.norms[3](output)))


def make_model(kind):
    torch.manual_seed(0)
    if kind == "fused":
        layer = partial(SyncBatchNorm, 4, activation="silu")
        return nn.Sequential(nn.Conv2d(4, 4, 3), layer(), nn.Conv2d(4, 4, 3), layer()).double()
    if kind == "readers":
        return convert_sync_batchnorm(Readers().double())
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU()]
    return convert_sync_batchnorm(nn.Sequential(*layers, *copy.deepcopy(layers)).double())


def step(model, batch, forward=None, penalize=False):
    """Runs one step; returns all that it changes."""
    input = batch.clone().requires_grad_()
    output = (forward or model)(input)
    grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype)
    if penalize:
        (derivative,) = torch.autograd.grad(output, input, grad_output, create_graph=True)
        derivative.square().sum().backward()
    else:
        output.backward(grad_output)
    return [output.detach(), input.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def nested(model, input):
    with recompute_outputs(), recompute_outputs():
        return recompute_outputs(model)(input)


def around(*contexts):
    def forward(model, input):
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return model(input)

    return forward


def in_checkpoint(use_reentrant, outside, inside, model, input):
    model = recompute_outputs(model) if inside else model
    with recompute_outputs() if outside else nullcontext():
        return checkpoint(model, input, use_reentrant=use_reentrant)


HOWS = {
    "context": around(recompute_outputs),
    "nested": nested,
    "outside of save_on_cpu": around(recompute_outputs, save_on_cpu),
    "inside of save_on_cpu": around(save_on_cpu, recompute_outputs),
} | {
    f"{'reentrant' if reentrant else 'checkpoint'}, {outside=}, {inside=}": partial(
        in_checkpoint, reentrant, outside, inside
    )
    for reentrant in (False, True)
    for outside, inside in ((True, False), (False, True))
}


def results_of(hows, kind, sizes, penalize=False):
    """Returns the results of plain training on this rank, and in each of the ways."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    batch = torch.randn(sum(sizes), 4, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = {}
    for how in (None, *hows):
        model = make_model(kind)
        forward = partial(HOWS[how], model) if how else None
        results[how] = step(model, batch.split(sizes)[rank], forward, penalize)
    return results


def check(ranks, exactly):
    for rank in ranks:
        expected = rank.pop(None)
        for how, results in rank.items():
            tolerances = {"rtol": 0, "atol": 0} if exactly else {}
            torch.testing.assert_close(
                results, expected, **tolerances, msg=lambda message, how=how: f"{how}: {message}"
            )


@pytest.mark.parametrize(("sizes", "hows"), [((2, 3), list(HOWS)), ((3, 0, 1), ["context"])], ids=["two", "three"])
def test_bit_for_bit_over_ranks(pool, sizes, hows):
    check(pool.run(results_of, len(sizes), hows, "readers", sizes), exactly=True)


@pytest.mark.parametrize("kind", ["chain", "fused"])
def test_derivatives_of_derivatives(pool, kind):
    check(pool.run(results_of, 2, ["context"], kind, (2, 3), True), exactly=True)


def test_without_a_job():
    """Where F.batch_norm would compute, if there is no activation."""
    check([results_of(list(HOWS), "readers", (4,))], exactly=False)
    check([results_of(list(HOWS), "fused", (4,))], exactly=True)


class Watch:
    """Which outputs of layers still are in memory."""

    def __init__(self, model):
        self.outputs, self.inputs = [], []
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):
                layer.register_forward_hook(self.note)

    def note(self, layer, args, output):
        self.inputs.append(StorageWeakRef(args[0].untyped_storage()))
        self.outputs.append(StorageWeakRef(output.untyped_storage()))

    def alive(self):
        return [not output.expired() for output in self.outputs]


@pytest.mark.parametrize("kind", ["chain", "fused"])
def test_what_is_in_memory(kind):
    model, batch = make_model(kind), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    watch = Watch(model)
    gc.collect()
    gc.disable()  # nothing is to wait for it
    try:
        loss = model(batch).sin().sum()
        assert watch.alive() == [True, True]
        loss.backward()
        watch.outputs.clear()
        with recompute_outputs():
            loss = model(batch).sin().sum()
            assert watch.alive() == [False, False]
            last = model[: 5 if kind == "chain" else 4](batch)
            del loss
            assert all(input.expired() for input in watch.inputs[:4])
            last.sin().sum().backward()
        assert watch.inputs[-1].expired()  # though its output is still here
        del last
        assert not any(watch.alive())
    finally:
        gc.enable()


def test_two_who_wait_for_an_output_share_it(monkeypatch):
    layer, input = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    with recompute_outputs():
        output = layer(input)
        loss = (output.sin() + output.cos()).sum()
    made, make = [], ops.batch_norm_elemt
    monkeypatch.setattr(ops, "batch_norm_elemt", lambda *args: made.append(args) or make(*args))
    loss.backward(retain_graph=True)
    assert len(made) == 1
    loss.backward()
    assert len(made) == 2


def test_what_was_written_to():
    model = make_model("chain")
    with recompute_outputs():
        middle = model[0](torch.randn(2, 4, 6, 5, dtype=torch.float64))
        loss = model[1:](middle).sum()
        with torch.no_grad():
            middle.mul_(2)
        with pytest.raises(RuntimeError, match=r"SyncBatchNorm2d '1': .*written to in place"):
            loss.backward()
        other = torch.ones(3, requires_grad=True) * 1
        product = other * torch.ones(3, requires_grad=True)
        other.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is at version 1; expected version 0"):
        product.sum().backward()


def test_parameters_may_change_before_backward():
    layer, input = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    with recompute_outputs():
        output = layer(input)
        loss = F.silu(output).sum()
    expected = torch.autograd.grad(loss, output, retain_graph=True)
    with torch.no_grad():
        layer.bias.add_(1)
    assert torch.equal(torch.autograd.grad(loss, output)[0], *expected)


def test_no_effect_where_there_is_no_backward():
    model = make_model("chain")
    batch = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    with recompute_outputs(), torch.no_grad():
        model(batch)
    expected = model.eval()(batch)
    with recompute_outputs():
        assert torch.equal(model(batch), expected)


def test_transforms_of_functions_have_no_hooks():
    model = recompute_outputs(nn.Sequential(SyncBatchNorm(4, track_running_stats=False), nn.SiLU()))
    batch = torch.randn(5, 4)
    parameters = dict(model.named_parameters())
    grads = grad(lambda parameters: functional_call(model, parameters, (batch,)).square().sum())(parameters)
    model(batch).square().sum().backward()
    torch.testing.assert_close(grads, {name: parameter.grad for name, parameter in parameters.items()})


@pytest.mark.parametrize("inside", [False, True])
def test_compiled(inside):
    batch = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    model = make_model("chain")

    def forward(input):
        with recompute_outputs():
            return model(input)

    if inside:
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    else:
        compiled = around(recompute_outputs)
        compiled = partial(compiled, torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(step(model, batch, compiled), step(make_model("chain"), batch))


def test_compiled_for_good():
    batch = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    model = recompute_outputs(make_model("chain"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(model, batch, compiled), step(make_model("chain"), batch))


def test_replicas(single_threaded):
    layer = next(iter(PAIRS))
    results = []
    for prepare in (recompute_outputs, lambda model: model):
        torch.manual_seed(0)
        fused = SyncBatchNorm(3, activation="silu")
        model = nn.Sequential(layer(3), nn.SiLU(), nn.Conv1d(3, 3, 1), fused, nn.Conv1d(3, 3, 1)).double()
        results.append(step(prepare(parallel(model, "cpu", 2)), inputs_of(layer, 4)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module or None, got list"):
        recompute_outputs([])
