"""recompute_outputs gives bitwise equal gradients, and stores no tensor that backward can recompute."""

import copy
import gc
import pickle
from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad
from torch.fx import symbolic_trace

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, recompute_outputs, revert_sync_batchnorm
from bagua_syncbn import _ops as ops
from benchmarks.sections.stored import Storages
from tests.helpers.checkpoints import CHECKPOINTS
from tests.helpers.observed import kept
from tests.helpers.rows import rows
from tests.helpers.steps import assert_same_bits, draw, step
from tests.helpers.user_layers import BatchNormAct, BatchNormAct1d

BATCH = draw(2, 4, 6, 5)


class Forwards(nn.Module):
    """Forward passes that use layers' outputs in many ways."""

    def __init__(self, name):
        super().__init__()
        self.forward = getattr(self, name)
        self.bn, self.other = (SyncBatchNorm(4, eps_mode="clamp", affine=affine) for affine in (True, False))
        self.fused = SyncBatchNorm(4, activation="silu")
        self.last = nn.Conv2d(4, 4, 1)

    def parts_and_views(self, input):
        left, right = self.other(input).chunk(2, 1)
        return self.last(torch.cat([F.gelu(left), right.sin()], 1))

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
        return self.last(self.bn(input, mask=(torch.arange(5) < 3).view(1, 1, 1, 5), zero_masked=True))

    def other_formulas(self, input):
        output = self.bn(input)
        return self.last(F.selu(output)) * self.last(F.hardtanh(output, -1, 2)) + self.last(F.celu(output, 2.0))


FORWARDS = [name for name in vars(Forwards) if not name.startswith("__")]


def make_model(kind="chain"):
    torch.manual_seed(0)
    if kind in FORWARDS:
        return Forwards(kind).double()
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU()]
    return convert_sync_batchnorm(nn.Sequential(*layers, *copy.deepcopy(layers)).double())


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


def check_bits(hows, kind, sizes, order):
    """Compares a plain step on this rank with a step of each kind."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    batch = draw(sum(sizes), 4, 6, 5, seed=1).split(sizes)[rank]
    expected = step(make_model(kind), batch, order=order)
    for how in hows:
        model = make_model(kind)
        assert_same_bits(step(model, batch, order=order, call=partial(HOWS[how], model)), expected, how)


@pytest.mark.parametrize(("sizes", "hows", "order"), [
    ((3, 0, 1), ["context", "in a checkpoint"], 1),
    ((2, 3), ["context"], 2),
    ((4,), list(HOWS), 1),
], ids=["ranks", "second derivatives", "without a job"])  # fmt: skip
@pytest.mark.parametrize("kind", FORWARDS)
def test_recomputed_outputs_are_the_same_bits(pool, kind, sizes, hows, order):
    if len(sizes) > 1:
        pool.run(check_bits, len(sizes), hows, kind, sizes, order)
    else:
        check_bits(hows, kind, sizes, order)


READERS = [nn.ReLU(), SyncBatchNorm(4), nn.Flatten()], [nn.Flatten(), nn.Linear(12, 2)]


@pytest.mark.parametrize("readers", READERS, ids=str)
def test_outputs_behind_activations_and_views_are_recomputed(readers):
    model, batch = nn.Sequential(SyncBatchNorm(4), *readers), torch.randn(5, 4, 3)
    assert kept(model, batch) == 1
    assert kept(recompute_outputs(model), batch) == 0


def test_no_tensor_outlives_the_graph():
    gc.collect()
    gc.disable()  # no reference cycle may keep it alive
    try:
        model = recompute_outputs(make_model())[:5]
        with Storages() as storages, recompute_outputs():
            output = model(BATCH)
            output.sum().backward()
            assert storages.sizes_alive([BATCH]).count(BATCH.nbytes) == 1
            del output
            assert storages.sizes_alive([BATCH]).count(BATCH.nbytes) == 0
    finally:
        gc.enable()


def test_two_readers_of_an_output_share_one_recomputation(monkeypatch):
    layer, input = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    with recompute_outputs():
        output = layer(input)
        loss = (output.sin() + output.cos()).sum()
    made, make = [], ops.batch_norm_elemt
    monkeypatch.setattr(ops, "batch_norm_elemt", lambda *args: made.append(args) or make(*args))
    for passes in (1, 2):
        loss.backward(retain_graph=True)
        assert len(made) == passes  # freed after the last reader


MODULES = [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.3), nn.ELU(1.3), nn.SiLU(), nn.GELU(), nn.GELU("tanh")]
MODULES += [nn.Hardswish(), nn.Sigmoid(), nn.Tanh(), nn.Mish()]
IN_PLACE = [type(module)(inplace=True) for module in MODULES if hasattr(module, "inplace")]


@pytest.mark.parametrize("activation", [*MODULES, *IN_PLACE, "own forward"], ids=str)
@pytest.mark.parametrize("last", [nn.Conv2d, nn.Identity])
def test_no_activation_is_kept(activation, last):
    """Neither readers of the output nor activations that save their result keep a tensor."""

    def block():
        if activation == "own forward":  # like in timm, where one module calls F.batch_norm and an activation
            layers = [convert_sync_batchnorm(BatchNormAct(4))]
        else:
            layers = [SyncBatchNorm(4), copy.deepcopy(activation)]
        layers[0].eps_mode = "clamp"
        return [nn.Conv2d(4, 4, 3, padding=1), *layers]

    model = nn.Sequential(*block(), *block(), last(4, 4, 3)).double()
    plain = copy.deepcopy(model)
    assert_same_bits(step(recompute_outputs(model), BATCH), step(plain, BATCH))
    assert kept(model, BATCH) == 2  # the layers' inputs


def test_outputs_that_were_written_to_are_refused():
    model = make_model()
    with recompute_outputs():
        middle = model[0](BATCH)
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


def test_other_saved_tensor_hooks_get_the_same_tensors():
    model, packed = make_model("activation_of_the_layer"), []
    for forward in (model, partial(in_context, model)):
        with saved_tensors_hooks(lambda tensor: packed.append(tensor.shape) or tensor, lambda tensor: tensor):
            forward(BATCH)
    assert packed[: len(packed) // 2] == packed[len(packed) // 2 :]


def test_recompute_outputs_has_no_effect_in_function_transforms():
    model = recompute_outputs(nn.Sequential(SyncBatchNorm(4, track_running_stats=False), nn.SiLU()))
    batch = torch.randn(5, 4)
    parameters = dict(model.named_parameters())
    grads = grad(lambda parameters: functional_call(model, parameters, (batch,)).square().sum())(parameters)
    model(batch).square().sum().backward()
    torch.testing.assert_close(grads, {name: parameter.grad for name, parameter in parameters.items()})


COMPILED = {
    "the context around": lambda model, compiles: partial(in_context, compiles(model)),
    "the model": lambda model, compiles: compiles(recompute_outputs(model)),
}


@pytest.mark.parametrize("how", rows(COMPILED, ["the model"]))
def test_compiled_models_equal_eager_with_recomputed_outputs(how):
    model = make_model()
    compiled = COMPILED[how](model, partial(torch.compile, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(step(model, BATCH, call=compiled), step(make_model(), BATCH))


ROWS = draw(5, 4)


def test_an_exception_that_ends_a_forward_ends_only_its_recomputation():
    plain, model = (convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), nn.SiLU())).double() for _ in range(2))
    interrupt = recompute_outputs(model)[1].register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
    for context, count in ((nullcontext(), 1), (recompute_outputs(), 0), (nullcontext(), 1)):
        with context:
            with pytest.raises(KeyboardInterrupt):
                model(ROWS)
            assert kept(plain, ROWS) == count
    interrupt.remove()
    assert kept(model, ROWS) == 0


MODELS = {
    "sequential": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.SiLU()),
    "layer": lambda: BatchNormAct1d(4),
    "traced": lambda: symbolic_trace(nn.Sequential(nn.BatchNorm1d(4), nn.SiLU())),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("first", [convert_sync_batchnorm, recompute_outputs])
def test_a_model_recomputes_until_that_is_undone(kind, first):
    model = MODELS[kind]().double()
    types, facts = [type(part) for part in model.modules()], [dict(vars(part)) for part in model.modules()]
    second = recompute_outputs if first is convert_sync_batchnorm else convert_sync_batchnorm
    assert second(first(model)) is model
    assert recompute_outputs(model) is model
    copies = [] if kind == "traced" else [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in (*copies, model):
        assert kept(each, ROWS) == 0
        for _ in range(2):
            assert recompute_outputs(each, enabled=False) is each
        assert kept(each, ROWS) == 1
    revert_sync_batchnorm(recompute_outputs(model))
    assert [type(part) for part in model.modules()] == types
    assert [vars(part) for part in model.modules()] == facts
