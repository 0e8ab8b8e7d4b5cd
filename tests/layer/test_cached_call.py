"""After any change, a layer with a cached call behaves like a new copy."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm, SyncBatchNorm1d, functional
from bagua_syncbn._groups import replaced_groups
from bagua_syncbn.communicators import LOCAL
from tests.helpers.cases import WAYS, within
from tests.helpers.fake_packages import DynamicBatchNorm
from tests.helpers.one_rank import Twin
from tests.helpers.options import OTHER, attributes

CHANNELS, SHAPE = 3, (4, 3, 5)
MASK = torch.arange(5).view(1, 1, 5) < 3
TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Recording(Twin):
    """Records the hashes of layer and options in the last header."""

    header = None

    def all_gather(self, packed):
        if type(packed) is torch.Tensor:  # fake tensors hold no values
            self.header = packed[-3:-1].tolist()
        return super().all_gather(packed)


def call(layer, input, around):
    """Returns the results or the error of a step, the header, and the buffers."""
    input, buffers, group = leaf(input), copy.deepcopy(dict(layer.named_buffers())), layer.process_group
    if group is not LOCAL:
        group.header = None
    try:
        output = around(layer, input)
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output).to(output))
        results = output, input.grad, *(parameter.grad for parameter in layer.parameters())
    except Exception as error:
        results = type(error), str(error)
        torch.testing.assert_close(dict(layer.named_buffers()), buffers, rtol=0, atol=0)
    return results, getattr(group, "header", None), dict(layer.named_buffers())


def assert_same(found, expected):
    """Compares what two calls returned or raised."""
    if isinstance(expected[0][0], type):
        assert found[0] == expected[0]
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def leaf(input):
    return input.clone().requires_grad_() if isinstance(input, torch.Tensor) and input.is_floating_point() else input


def plain(layer, input):
    return layer(input)


def compare(change=lambda layer: None, before=(), alter=lambda input: input, around=plain, first=plain):
    """Compares a layer after three calls with a new layer; returns the results or the error."""
    layer, new = (SyncBatchNorm(CHANNELS, process_group=Recording()) for _ in range(2))
    for make in before:
        make(layer)
        make(new)
    input = torch.randn(SHAPE)
    for _ in range(3):
        first(layer, leaf(input))
    new.load_state_dict(layer.state_dict())
    change(layer)
    change(new)
    results, expected = (call(each, alter(input), around) for each in (layer, new))
    assert_same(results, expected)
    return expected[0]


def set_attribute(name, value):
    return lambda layer: setattr(layer, name, value)


def replace(name, make):
    return lambda layer: setattr(layer, name, make(getattr(layer, name)))


def drop(*names):
    return lambda layer: [setattr(layer, name, None) for name in names]


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([torch.randn(2, CHANNELS), torch.randn(1, CHANNELS)], layout=layout)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda layer: None,
    "bias.data: dtype": lambda layer: setattr(layer.bias, "data", torch.ones(CHANNELS, dtype=torch.float64)),
    **{f"another {name}": replace(name, torch.clone) for name in TENSORS[2:]},
    **{f"expanded {name}": replace(name, lambda buffer: buffer[:1].expand(CHANNELS)) for name in TENSORS[2:4]},
    **{f"nested {name}": replace(name, lambda _: nn.Parameter(nested())) for name in TENSORS[:2]},
    "new weight": replace("weight", lambda weight: nn.Parameter(weight.detach() * 2)),
    "no running_var": drop("running_var"),
    "no counter": drop("num_batches_tracked"),
    "one tensor as both": lambda layer: setattr(layer, "running_var", layer.running_mean),
    "no running statistics": drop("running_mean", "running_var"),
    "no parameters": drop("weight", "bias"),
    **{name: set_attribute(name, value) for name, value in attributes(OTHER._asdict()).items()},
    "momentum=None": set_attribute("momentum", None),
    "eps=0": set_attribute("eps", 0),
    "untracked": set_attribute("track_running_stats", False),
    "a place in a model": lambda layer: bagua_syncbn.convert_sync_batchnorm(nn.ModuleDict({"other": layer})),
    "class": set_attribute("__class__", SyncBatchNorm1d),
    "evaluation": lambda layer: layer.eval(),
    "frozen": bagua_syncbn.freeze_statistics,
    "group": set_attribute("process_group", LOCAL),
    "parametrized": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus()),
    "float64": lambda layer: layer.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_layer_is_noticed(change):
    compare(CHANGES[change])
    compare(CHANGES[change], alter=lambda input: input / 0)
    if change == "momentum=None":  # even if the call passes a different momentum
        compare(CHANGES[change], around=by_function, first=by_function)


@pytest.mark.parametrize(("before", "change"), [
    *((kind, "nothing") for kind in ("no running statistics", "untracked", "momentum=None", "float64")),
    ("no parameters", "new weight"),
    ("group", "evaluation"),
])  # fmt: skip
def test_every_kind_of_layer_notices_changes(before, change):
    change = set_attribute("weight", nn.Parameter(torch.ones(CHANNELS))) if change == "new weight" else CHANGES[change]
    compare(change, before=[CHANGES[before]], alter=torch.Tensor.double if before == "float64" else torch.clone)


def test_classes_that_return_parts_of_tensors_are_not_cached():
    layer = SyncBatchNorm(CHANNELS, process_group=Twin())
    nn.init.normal_(layer.weight)
    layer.__class__ = type("DynamicSyncBatchNorm", (DynamicBatchNorm, SyncBatchNorm), {})
    for active in (3, 3, 2, 1, 3):
        layer.active = active
        part = SyncBatchNorm(active, process_group=Twin())
        part.load_state_dict(
            {key: value[:active] if value.dim() else value for key, value in layer.state_dict().items()}
        )
        input = torch.randn(4, active, 5)
        torch.testing.assert_close(layer(input), part(input), rtol=0, atol=0)
        for name, value in part.named_buffers():
            torch.testing.assert_close(getattr(layer, name), value, rtol=0, atol=0)


def test_calls_of_a_module_without_momentum_are_cached(monkeypatch):
    checked, check = [], functional.check_tensors
    monkeypatch.setattr(functional, "check_tensors", lambda *args: (checked.append(args), check(*args)))
    module = nn.Module()
    for _ in range(3):
        bagua_syncbn.sync_batch_norm(torch.randn(SHAPE), None, None, process_group=LOCAL, layer=module)
    assert len(checked) == 1


# Make a valid tensor invalid in a single respect.
WRONG = {
    "class": lambda t: SimpleNamespace(dtype=t.dtype, device=t.device, layout=t.layout, shape=t.shape, stride=t.stride),
    "dtype": torch.Tensor.bool,
    "device": lambda tensor: tensor.to("meta"),
    "size": lambda tensor: torch.cat([tensor.flatten(), tensor.new_ones(1)]),
    "layout": torch.Tensor.to_sparse,  # checked for residuals
}


@pytest.mark.parametrize("name", ["eps", "momentum"])
@pytest.mark.parametrize("make_group", [Recording, lambda: LOCAL])
def test_a_tensor_as_eps_or_momentum_equals_its_number_even_if_written_to_between_calls(name, make_group):
    layers = [SyncBatchNorm(CHANNELS, process_group=make_group()) for _ in range(2)]
    setattr(layers[0], name, torch.tensor(0.5, dtype=torch.float64))
    for value in (0.5, 0.5, 0.25, 0.25):
        getattr(layers[0], name).fill_(value)
        setattr(layers[1], name, value)
        input = torch.randn(SHAPE)
        for training in (True, False):
            assert_same(*(call(layer.train(training), input, plain) for layer in layers))


def test_a_call_in_evaluation_needs_running_statistics_although_the_layer_normalizes_without():
    layer = SyncBatchNorm(CHANNELS, track_running_stats=False).eval()
    input = torch.randn(SHAPE)
    layer(input)
    with pytest.raises(ValueError, match="expected tensors with training=False"):
        bagua_syncbn.sync_batch_norm(input, None, None, layer.weight, layer.bias, False, layer=layer)


def test_a_layer_without_tensors_keeps_a_step_for_each_number_of_channels():
    without = [CHANGES["no parameters"], CHANGES["no running statistics"]]
    compare(before=without, alter=lambda input: input[:, :2])


INPUTS = {
    "more samples": lambda input: torch.cat([input, input]),
    "float64": lambda input: input.double(),
    "another device": lambda input: input.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "not a tensor": WRONG["class"],
}


def by_function(layer, input, is_named=True, **others):
    tensors = {name: getattr(layer, name).detach() for name in TENSORS} | others
    options = {"training": layer.training, "process_group": layer.process_group, "layer": layer if is_named else None}
    return bagua_syncbn.sync_batch_norm(input, **tensors, **options)


@pytest.mark.parametrize("around", [plain, by_function, partial(by_function, is_named=False)])
@pytest.mark.parametrize("alter", INPUTS)
def test_every_change_of_the_input_is_noticed(alter, around):
    kind, *_ = compare(alter=INPUTS[alter], around=around, first=around)
    assert isinstance(kind, type) == (alter in ("another device", "sparse", "not a tensor"))


def with_residual(layer, input, **others):
    return by_function(layer, input, **{"residual": input.detach()} | others)


@pytest.mark.parametrize(("name", "wrong"), [
    *((name, wrong) for name in TENSORS for wrong in WRONG if wrong != "layout"),
    *(("residual", wrong) for wrong in WRONG),
])  # fmt: skip
def test_every_invalid_tensor_is_noticed(name, wrong):
    def around(layer, input):
        tensor = input if name == "residual" else getattr(layer, name)
        return with_residual(layer, input, **{name: WRONG[wrong](tensor.detach())})

    kind, message = compare(around=around, first=with_residual)
    assert issubclass(kind, (TypeError, RuntimeError))
    assert f": {name}: expected" in message


def left_over_from_grad(layer, input):
    kept = []
    torch.func.grad(lambda x: (kept.append(x * 3), x.sum())[1])(input)
    return layer(kept[0])


def with_tangent(layer, input):
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(layer(forward_ad.make_dual(input, input.detach() ** 2)))
        return output.primal + output.tangent


def after_fake_tensors(layer, input):
    with FakeTensorMode() as mode:
        layer(mode.from_tensor(input))
    return layer(input)


def in_way(way):
    return lambda layer, input: way(layer)(input)


def with_replaced_groups(layer, input):
    with replaced_groups(LOCAL):  # as verify_synchronization does; the layer may be outside of the model
        return layer(input)


AROUND = {
    "checkpoint": in_way(WAYS["checkpointed"]),
    "torch.func": lambda layer, input: torch.func.jvp(layer, (input,), (torch.ones_like(input),))[1],
    "vmap": lambda layer, input: torch.func.vmap(layer)(input[None])[0],
    "vmap of nested tensors": lambda layer, input: torch.func.vmap(layer)(nested(torch.jagged)),
    "forward-mode differentiation": with_tangent,
    "jit.trace": lambda layer, input: torch.jit.trace(layer, input)(input),
    "input that an ended torch.func transform left wrapped": left_over_from_grad,
    "fake tensors": after_fake_tensors,
    "replaced groups": with_replaced_groups,
    "accumulated": in_way(WAYS["accumulated"]),
    "masked": in_way(within(lambda layer: bagua_syncbn.masked(layer, MASK))),
    "a mask": lambda layer, input: layer(input, mask=MASK),
    "a residual": lambda layer, input: layer(input, input),
}


@pytest.mark.parametrize("around", AROUND)
def test_every_context_of_a_call_is_noticed(around):
    before = ["no parameters", "no running statistics"] if around == "fake tensors" else []
    compare(before=[CHANGES[name] for name in before], around=AROUND[around])
    compare(before=[CHANGES[name] for name in (*before, "group")], around=AROUND[around])


def replaced_data(layer, draw):
    tensor = getattr(layer, draw.choice(TENSORS))
    if tensor is not None:
        tensor.data = tensor.data.to(draw.choice((torch.float32, torch.float64))) + 1


def parametrized(layer, draw):
    if nn.utils.parametrize.is_parametrized(layer):
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
    else:
        nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())


def another_class(layer, draw):
    if not nn.utils.parametrize.is_parametrized(layer):  # by another class
        layer.__class__ = draw.choice((SyncBatchNorm, SyncBatchNorm1d))


def frozen(layer, draw):
    draw.choice((bagua_syncbn.freeze_statistics, bagua_syncbn.unfreeze_statistics))(layer)


def in_thread(layer, input):
    results = []
    thread = threading.Thread(target=lambda: results.append(layer(input)))
    thread.start()
    thread.join()
    return results[0]


# Changes of a layer, drawn from both directions.
DRAWN: dict[str, Callable[[Any, Random], object]] = {
    "eps": lambda layer, draw: setattr(layer, "eps", draw.choice((1e-5, 0.5))),
    "eps in vars": lambda layer, draw: vars(layer).update(eps=draw.choice((1e-5, 0.5))),
    "momentum": lambda layer, draw: setattr(layer, "momentum", draw.choice((0.1, 0.5, None))),
    "eps_mode": lambda layer, draw: setattr(layer, "eps_mode", draw.choice(("plus", "clamp"))),
    "skip_nonfinite": lambda layer, draw: setattr(layer, "skip_nonfinite", draw.choice((False, True))),
    "activation": lambda layer, draw: setattr(layer, "fused_activation", draw.choice((None, "relu", "silu"))),
    "tracking": lambda layer, draw: setattr(layer, "track_running_stats", draw.choice((False, True))),
    "class": another_class,
    "mode": lambda layer, draw: layer.train(draw.choice((False, True))),
    "group": lambda layer, draw: setattr(layer, "process_group", draw.choice((layer.own_group, LOCAL))),
    "gradient": lambda layer, draw: layer.bias.requires_grad_(draw.choice((False, True))),
    "data": replaced_data,
    "another buffer": lambda layer, draw: replace(draw.choice(TENSORS[2:]), torch.clone)(layer),
    "dtype": lambda layer, draw: layer.to(draw.choice((torch.float32, torch.float64))),
    "parametrized": parametrized,
    "frozen": frozen,
}
DRAWN_AROUND = {"the layer": plain, "a function": by_function, "another thread": in_thread} | {
    name: around
    for name, around in AROUND.items()
    if name not in ("fake tensors", "vmap of nested tensors", "jit.trace")
}


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 64))])
def test_drawn_calls_equal_those_of_a_layer_that_keeps_no_step(seed):
    draw = Random(seed)
    layers = [SyncBatchNorm(CHANNELS, process_group=Recording()) for _ in range(2)]
    for layer in layers:
        layer.own_group = layer.process_group
    for _ in range(60):
        names, values = draw.choices([*DRAWN], k=draw.choice((0, 0, 1, 2))), draw.random()
        for layer in layers:
            for name in names:
                DRAWN[name](layer, Random(values))
        input = torch.randn(draw.choice((4, 6)), *SHAPE[1:]).to(draw.choice((torch.float32, torch.float64)))
        around = DRAWN_AROUND[draw.choice((*DRAWN_AROUND, *["the layer"] * 9))]
        layers[1]._sync_state.steps.clear()
        found, expected = (call(layer, input, around) for layer in layers)
        assert_same(found, expected)
