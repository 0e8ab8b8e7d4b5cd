"""Outputs that backward recomputes: the same gradients bit for bit, and nothing stored that need not be."""

import copy
import gc
import pickle
from contextlib import suppress
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad
from torch.fx import symbolic_trace
from torch.multiprocessing.reductions import StorageWeakRef

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, ops, recompute_outputs, revert_sync_batchnorm
from bagua_syncbn.extras.recomputation import depth
from bagua_syncbn.ops.activations import ACTIVATIONS, activation_of
from bagua_syncbn.step.call import this_thread
from bagua_syncbn.torch_internals.modules import saving_hooks
from benchmarks.sections.stored import Storages
from tests.helpers.checkpoints import CHECKPOINTS
from tests.helpers.replicated import PAIRS, inputs_of, parallel
from tests.helpers.user_layers import BatchNormAct


class Forwards(nn.Module):
    """A forward that uses outputs of layers in one of many ways, which nobody can know before a call."""

    def __init__(self, name):
        super().__init__()
        self.forward = getattr(self, name)
        self.bn, self.other = (SyncBatchNorm(4, eps_mode="clamp", affine=affine) for affine in (True, False))
        self.fused = SyncBatchNorm(4, activation="silu")
        self.last = nn.Conv2d(4, 4, 1)

    def parts_and_views(self, input):
        left, right = self.other(input).chunk(2, 1)
        return self.last(torch.cat([F.gelu(left), right.sin()], 1))

    def several_readers(self, input):
        output = self.bn(input)
        return output.sigmoid() + self.last(output.square()) * output.mean((2, 3), keepdim=True)

    def layer_upon_layer(self, input):
        return self.last(self.other(self.bn(self.last(input))))

    def activation_of_the_layer(self, input):
        return self.last(self.fused(self.last(input)))

    def two_activations(self, input):
        output = self.bn(input)
        return self.last(F.silu(output)) + torch.tanh(output).exp()

    def residual(self, input):
        return self.last(self.bn(input, residual=input.sin()))

    def written_input(self, input):
        input = self.last(input)
        with torch.no_grad():
            input.clamp_(max=0.5)
        return self.last(self.bn(input))

    def written_before(self, input):
        output = self.bn(input)
        with torch.no_grad():
            output.clamp_(-0.5, 0.5)
        return self.last(F.relu(output)) + output.square()

    def written_behind(self, input):
        output = self.bn(input)
        activated = torch.tanh(output)
        with torch.no_grad():
            output.zero_()
        return self.last(activated)

    def written_activation(self, input):
        activated = F.silu(self.bn(input))
        with torch.no_grad():
            activated.clamp_(max=0.5)
        return self.last(activated)

    def in_place_twice(self, input):
        return self.last(F.relu_(F.silu(self.bn(input), inplace=True)))

    def in_place_on_a_part(self, input):
        output = self.bn(input)
        output[:, :2].sigmoid_()
        return self.last(output)

    def masked(self, input):
        return self.last(self.bn(input, mask=torch.arange(5) < 3, zero_masked=True))

    def other_formulas(self, input):
        output = self.bn(input)
        return self.last(F.selu(output)) * self.last(F.hardtanh(output, -1, 2)) + self.last(F.celu(output, 2.0))


FORWARDS = [name for name in vars(Forwards) if not name.startswith("__")]


assert_same_bits = partial(torch.testing.assert_close, rtol=0, atol=0)


def make_model(kind):
    torch.manual_seed(0)
    if kind in FORWARDS:
        return Forwards(kind).double()
    if kind == "fused":
        layer = partial(SyncBatchNorm, 4, activation="silu")
        return nn.Sequential(nn.Conv2d(4, 4, 3), layer(), nn.Conv2d(4, 4, 3), layer()).double()
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


def in_context(model, input):
    with recompute_outputs():
        return model(input)


def on_cpu(model, input):
    with save_on_cpu():
        return model(input)


HOWS = {
    "context": in_context,
    "nested": lambda model, input: in_context(partial(in_context, model), input),
    "around save_on_cpu": lambda model, input: in_context(partial(on_cpu, model), input),
    "in save_on_cpu": lambda model, input: on_cpu(partial(in_context, model), input),
    "around a checkpoint": lambda model, input: in_context(partial(CHECKPOINTS["non-reentrant"], model), input),
    "around a reentrant checkpoint": lambda model, input: in_context(partial(CHECKPOINTS["reentrant"], model), input),
    "in a checkpoint": lambda model, input: CHECKPOINTS["non-reentrant"](recompute_outputs(model), input),
    "in a reentrant checkpoint": lambda model, input: CHECKPOINTS["reentrant"](recompute_outputs(model), input),
}


def results_of(hows, kind, sizes, penalize):
    """Returns the results of plain training on this rank, and in each of the ways."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    batch = torch.randn(sum(sizes), 4, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for how in (None, *hows):
        model = make_model(kind)
        forward = partial(HOWS[how], model) if how else None
        results.append(step(model, batch.split(sizes)[rank], forward, penalize))
    return results


@pytest.mark.parametrize(("sizes", "hows", "penalize"), [
    ((3, 0, 1), ["context", "in a checkpoint"], False),
    ((2, 3), ["context"], True),
    ((4,), list(HOWS), False),
], ids=["ranks", "second derivatives", "without a job"])  # fmt: skip
@pytest.mark.parametrize("kind", FORWARDS)
def test_recomputed_outputs_are_the_same_bits(pool, kind, sizes, hows, penalize):
    arguments = hows, kind, sizes, penalize
    ranks = pool.run(results_of, len(sizes), *arguments) if len(sizes) > 1 else [results_of(*arguments)]
    for expected, *recomputed in ranks:
        for how, results in zip(hows, recomputed, strict=True):
            assert_same_bits(results, expected, msg=lambda message, how=how: f"{how}: {message}")


def watched(model):
    """Returns lists to which each call of a layer in ``model`` adds what tells whether its input and output live."""
    inputs, outputs = [], []

    def note(layer, args, output):
        inputs.append(StorageWeakRef(args[0].untyped_storage()))
        outputs.append(StorageWeakRef(output.untyped_storage()))

    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.register_forward_hook(note)
    return inputs, outputs


def alive(references):
    return [not reference.expired() for reference in references]


@pytest.mark.parametrize("kind", ["chain", "fused"])
def test_recomputed_outputs_are_not_in_memory(kind):
    model, batch = make_model(kind), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    inputs, outputs = watched(model)
    gc.collect()
    gc.disable()  # nothing is to wait for it
    try:
        loss = model(batch).sin().sum()
        assert alive(outputs) == [True, True]
        loss.backward()
        outputs.clear()
        with recompute_outputs():
            loss = model(batch).sin().sum()
            assert alive(outputs) == [False, False]
            last = model[: 5 if kind == "chain" else 4](batch)
            del loss
            assert not any(alive(inputs[:4]))
            last.sin().sum().backward()
        assert not alive(inputs)[-1]  # though its output is still here
        del last
        assert not any(alive(outputs))
    finally:
        gc.enable()


def test_the_input_of_a_layer_is_not_kept_where_it_can_be_recomputed():
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4), nn.Flatten()))
    inputs, _ = watched(model)
    with recompute_outputs():
        loss = model(torch.randn(5, 4, 3)).sum()
    assert not alive(inputs)[1]
    loss.backward()


def test_an_output_that_is_read_as_a_view_is_not_in_memory():
    model = nn.Sequential(SyncBatchNorm(4), nn.Flatten(), nn.Linear(12, 2))
    _, outputs = watched(model)
    with recompute_outputs():
        loss = model(torch.randn(5, 4, 3)).sum()
    assert alive(outputs) == [False]
    loss.backward()


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


MODULES = [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.3), nn.ELU(1.3), nn.SiLU(), nn.GELU(), nn.GELU("tanh")]
MODULES += [nn.Hardswish(), nn.Sigmoid(), nn.Tanh()]
IN_PLACE = [type(module)(inplace=True) for module in MODULES if hasattr(module, "inplace")]


def test_every_activation_is_tested():
    assert {activation_of(module).name for module in MODULES} == set(ACTIVATIONS)


@pytest.mark.parametrize("activation", [*MODULES, *IN_PLACE, "own forward"], ids=str)
@pytest.mark.parametrize("last", [nn.Conv2d, nn.Identity])
def test_no_activation_is_stored(activation, last):
    """Readers of the output store nothing, and an activation that stores its own result does not either."""

    def block():
        if activation == "own forward":  # as in timm, where one module calls F.batch_norm and an activation
            layers = [convert_sync_batchnorm(BatchNormAct(4))]
        else:
            layers = [SyncBatchNorm(4), copy.deepcopy(activation)]
        layers[0].eps_mode = "clamp"
        return [nn.Conv2d(4, 4, 3, padding=1), *layers]

    model = nn.Sequential(*block(), *block(), last(4, 4, 3))
    plain, batch = copy.deepcopy(model), torch.randn(2, 4, 6, 5)
    assert_same_bits(step(recompute_outputs(model), batch), step(plain, batch))
    with Storages() as storages:
        loss = model(batch).sum()
    assert storages.sizes_alive().count(batch.nbytes) == 3  # the batch, and the inputs of the layers
    loss.backward()


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


def test_other_hooks_for_saved_tensors_decide():
    model, packed = make_model("fused"), []
    for forward in (model, partial(in_context, model)):
        with saved_tensors_hooks(lambda tensor: packed.append(tensor.shape) or tensor, lambda tensor: tensor):
            forward(torch.randn(2, 4, 6, 5, dtype=torch.float64))
    assert packed[: len(packed) // 2] == packed[len(packed) // 2 :]


def test_transforms_of_functions_have_no_hooks():
    model = recompute_outputs(nn.Sequential(SyncBatchNorm(4, track_running_stats=False), nn.SiLU()))
    batch = torch.randn(5, 4)
    parameters = dict(model.named_parameters())
    grads = grad(lambda parameters: functional_call(model, parameters, (batch,)).square().sum())(parameters)
    model(batch).square().sum().backward()
    torch.testing.assert_close(grads, {name: parameter.grad for name, parameter in parameters.items()})


COMPILED = {
    "the context within": lambda model, compiles: compiles(partial(in_context, model)),
    "the context around": lambda model, compiles: partial(in_context, compiles(model)),
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
    assert_same_bits(*results)
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
        assert saving_hooks() is this_thread.hooks is None
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
    assert this_thread.hooks is None


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
