"""Outputs that backward recomputes: the same gradients bit for bit, and nothing stored that need not be."""

import copy
import gc
import pickle
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad
from torch.fx import symbolic_trace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, ops, recompute_outputs, revert_sync_batchnorm
from bagua_syncbn.extras.recomputation import depth
from bagua_syncbn.ops import activations
from bagua_syncbn.torch_internals.modules import saving_hooks
from benchmarks.sections.stored import Storages
from tests.helpers.replicated import PAIRS, inputs_of, parallel
from tests.helpers.user_layers import BatchNormAct


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
    "nested": around(recompute_outputs, recompute_outputs),
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
def test_recomputed_outputs_are_the_same_bits_over_ranks(pool, sizes, hows):
    check(pool.run(results_of, len(sizes), hows, "readers", sizes), exactly=True)


@pytest.mark.parametrize("kind", ["chain", "fused"])
def test_second_derivatives_are_the_same_bits(pool, kind):
    check(pool.run(results_of, 2, ["context"], kind, (2, 3), True), exactly=True)


def test_recomputed_outputs_equal_stored_ones_without_a_job():
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
def test_recomputed_outputs_are_not_in_memory(kind):
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


def test_the_input_of_a_layer_is_not_kept_where_it_can_be_recomputed():
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4), nn.Flatten()))
    watch = Watch(model)
    with recompute_outputs():
        loss = model(torch.randn(5, 4, 3)).sum()
    assert watch.inputs[1].expired()
    loss.backward()


def test_a_checkpoint_around_a_model_that_recomputes_repeats_the_first_run():
    layer, input, grads = SyncBatchNorm(4), torch.randn(5, 4, requires_grad=True), []
    model = recompute_outputs(nn.Sequential(layer))
    for call in (model, partial(checkpoint, model, use_reentrant=False)):
        layer.eps = 1e-5
        output = call(input).sin()
        layer.eps = 2.0
        grads += torch.autograd.grad(output.sum(), input)
    torch.testing.assert_close(*grads)


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


# Each with whether it can work in place.
MODULES = {
    "relu": (nn.ReLU, True),
    "relu6": (nn.ReLU6, True),
    "leaky_relu": (partial(nn.LeakyReLU, 0.3), True),
    "elu": (partial(nn.ELU, 1.3), True),
    "silu": (nn.SiLU, True),
    "gelu": (nn.GELU, False),
    "gelu_tanh": (partial(nn.GELU, approximate="tanh"), False),
    "hardswish": (nn.Hardswish, True),
    "sigmoid": (nn.Sigmoid, False),
    "tanh": (nn.Tanh, False),
}
CASES = [(name, inplace) for name in activations.ACTIVATIONS for inplace in (False, True)[: 1 + MODULES[name][1]]]
# As in timm, where one module calls F.batch_norm and an activation.
CASES.append(("own forward", False))


@pytest.mark.parametrize(("name", "inplace"), CASES, ids=str)
@pytest.mark.parametrize("last", [nn.Conv2d, nn.Identity])
def test_no_activation_is_stored(name, inplace, last):
    """Readers of the output store nothing, and an activation that stores its own result does not either."""

    def block():
        convolution = nn.Conv2d(4, 4, 3, padding=1)
        if name == "own forward":
            layer = convert_sync_batchnorm(BatchNormAct(4))
            layer.eps_mode = "clamp"
            return [convolution, layer]
        activation = MODULES[name][0](**({"inplace": True} if inplace else {}))
        return [convolution, SyncBatchNorm(4, eps_mode="clamp"), activation]

    torch.manual_seed(0)
    model = nn.Sequential(*block(), *block(), last(4, 4, 3))
    plain, batch = copy.deepcopy(model), torch.randn(2, 4, 6, 5)
    torch.testing.assert_close(step(recompute_outputs(model), batch), step(plain, batch), rtol=0, atol=0)
    with Storages() as storages:
        loss = model(batch).sum()
    assert storages.sizes_alive().count(batch.nbytes) == 3  # the batch, and the inputs of the layers
    loss.backward()


class Forwards(nn.Module):
    """Facts that nobody can know before a call."""

    def __init__(self):
        super().__init__()
        self.bn, self.act, self.last = SyncBatchNorm(4, eps_mode="clamp"), nn.ReLU(), nn.Conv2d(4, 4, 1)

    def branch(self, input):
        output = self.bn(input)
        return self.last(self.act(output) if torch.is_grad_enabled() else output)

    def function(self, input):
        return self.last(F.silu(self.bn(input))) + torch.tanh(self.bn(input)).exp()

    def written_before(self, input):
        output = self.bn(input)
        with torch.no_grad():
            output.clamp_(-0.5, 0.5)
        return self.last(self.act(output))

    def written_behind(self, input):
        output = self.bn(input)
        activated = torch.tanh(output)
        with torch.no_grad():
            output.zero_()
        return self.last(activated)

    def in_place_twice(self, input):
        return self.last(F.relu_(F.silu(self.bn(input), inplace=True)))

    def in_place_on_a_part(self, input):
        output = self.bn(input)
        output[:, :2].sigmoid_()
        return self.last(output)

    def other_formulas(self, input):
        output = self.bn(input)
        return self.last(F.selu(output)) * self.last(F.hardtanh(output, -1, 2)) + self.last(F.celu(output, 2.0))


FORWARDS = [name for name in vars(Forwards) if name != "__init__" and not name.startswith("__")]


@pytest.mark.parametrize("name", FORWARDS)
def test_only_what_was_computed_counts(name):
    torch.manual_seed(0)
    model = Forwards()
    plain, batch = copy.deepcopy(model), torch.randn(2, 4, 6, 5)
    results = step(model, batch, partial(HOWS["context"], getattr(model, name)))
    torch.testing.assert_close(results, step(plain, batch, getattr(plain, name)), rtol=0, atol=0)


def test_outputs_that_were_written_to_are_refused():
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


def test_zeros_at_masked_positions_are_recomputed():
    layer, mask = SyncBatchNorm(3), torch.arange(5) < 3
    input, factor = (torch.randn(4, 3, 5, requires_grad=True) for _ in range(2))
    with recompute_outputs():
        output = layer(input, mask=mask, zero_masked=True)
        (output * factor).sum().backward()
    assert torch.equal(factor.grad, output)


def test_transforms_of_functions_have_no_hooks():
    model = recompute_outputs(nn.Sequential(SyncBatchNorm(4, track_running_stats=False), nn.SiLU()))
    batch = torch.randn(5, 4)
    parameters = dict(model.named_parameters())
    grads = grad(lambda parameters: functional_call(model, parameters, (batch,)).square().sum())(parameters)
    model(batch).square().sum().backward()
    torch.testing.assert_close(grads, {name: parameter.grad for name, parameter in parameters.items()})


def forward_within(model, input):
    with recompute_outputs():
        return model(input)


COMPILED = {
    "the context within": lambda model, compiles: compiles(partial(forward_within, model)),
    "the context around": lambda model, compiles: partial(forward_within, compiles(model)),
    "the model": lambda model, compiles: compiles(recompute_outputs(model)),
}


@pytest.mark.parametrize("how", COMPILED)
def test_compiled_models_equal_eager_with_recomputed_outputs(how):
    batch, model = torch.randn(2, 4, 6, 5, dtype=torch.float64), make_model("chain")
    compiled = COMPILED[how](model, partial(torch.compile, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(step(model, batch, compiled), step(make_model("chain"), batch))


@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_replicas_recompute_the_same_bits(single_threaded, monkeypatch, is_wrapped_first):
    layer, elemt, normalized, results = next(iter(PAIRS)), ops.batch_norm_elemt, [], []
    monkeypatch.setattr(ops, "batch_norm_elemt", lambda *arguments: (normalized.append(1), elemt(*arguments))[1])
    for prepare in (lambda model: model, recompute_outputs):
        torch.manual_seed(0)
        fused = SyncBatchNorm(3, activation="silu")
        model = nn.Sequential(layer(3), nn.SiLU(), nn.Conv1d(3, 3, 1), fused, nn.Conv1d(3, 3, 1)).double()
        model = prepare(parallel(model, "cpu", 2)) if is_wrapped_first else parallel(prepare(model), "cpu", 2)
        results.append(step(model, inputs_of(layer, 4)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert len(normalized) == 4 + 4 + 4  # two layers in two replicas: two forward passes, and one recomputation


class Interrupted(nn.Module):
    """A forward that an error ends, after a part of it."""

    error = None

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input):
        output = self.layer(input)
        if self.error is not None:
            raise self.error
        return output


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_exception_that_ends_a_forward_ends_the_recomputation(error):
    model = recompute_outputs(Interrupted(SyncBatchNorm(4, track_running_stats=False)))
    input = torch.randn(5, 4)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.error = error
        with pytest.raises(error):
            each(input)
        assert saving_hooks() is None
        assert depth() == 0
        grad(lambda input: input.square().sum())(input)
        each.error = None
        with save_on_cpu():
            each(input)
            assert saving_hooks()[0].__qualname__.startswith("save_on_cpu")
        assert recomputes(each)
        grad(lambda input, each=each: each(input).square().sum())(input)


class Outer(nn.Module):
    """Calls a model that fails, and then a layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.layer = Interrupted(SyncBatchNorm(4)), SyncBatchNorm(4)

    def forward(self, input, depth=1):
        with suppress(ValueError):
            self.inner(input)
        return self(self.layer(input), depth - 1) if depth else self.layer(input)


@pytest.mark.parametrize("raises", ["in forward", "before it"])
def test_calls_within_calls_recompute_to_their_end(raises):
    model = recompute_outputs(Outer())
    recompute_outputs(model.inner)
    model.inner.error = ValueError
    if raises == "before it":
        model.inner.register_forward_pre_hook(lambda *_: int("none"), prepend=True)
    depths = []
    model.layer.register_forward_hook(lambda *_: depths.append(depth()))
    model(torch.randn(5, 4))
    assert depths == [1, 2]
    assert depth() == 0


def recomputes(model):
    """Whether the layers in ``model`` run within hooks for saved tensors."""
    seen = []
    cls = next(type(layer) for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    with patch.object(cls, "_check_input_dim", lambda *_: seen.append(saving_hooks() is not None)):
        model(torch.randn(5, 4))
    return seen == [True]


MODELS = {
    "sequential": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()),
    "layer": lambda: nn.BatchNorm1d(4),
    "traced": lambda: symbolic_trace(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("first", [convert_sync_batchnorm, recompute_outputs])
def test_a_model_recomputes_until_that_is_undone(kind, first):
    model = MODELS[kind]()
    types, facts = [type(part) for part in model.modules()], [dict(vars(part)) for part in model.modules()]
    second = recompute_outputs if first is convert_sync_batchnorm else convert_sync_batchnorm
    assert second(first(model)) is model
    assert recompute_outputs(model) is model
    copies = [] if kind == "traced" else [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in (*copies, model):
        assert recomputes(each)
        assert recompute_outputs(each, enabled=False) is each
        assert recompute_outputs(each, enabled=False) is each
        assert not recomputes(each)
    revert_sync_batchnorm(recompute_outputs(model))
    assert not recomputes(model)
    assert [type(part) for part in model.modules()] == types
    assert [vars(part) for part in model.modules()] == facts


def test_a_call_that_is_not_torchs_is_refused():
    (hook,) = recompute_outputs(nn.Linear(1, 1))._forward_pre_hooks.values()
    with pytest.raises(RuntimeError, match=r"expected modules that are called as in torch 2\.10 to 2\.14, got torch"):
        hook(nn.Linear(1, 1), ())


def test_recomputation_of_no_model_is_refused():
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module or None, got list"):
        recompute_outputs([])
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module with enabled=False, got NoneType"):
        recompute_outputs(None, enabled=False)
