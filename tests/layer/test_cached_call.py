"""A layer that has found a call right finds out about every change before the next one."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm
from bagua_syncbn.communicators import LOCAL
from benchmarks.one_rank import Twin
from tests.helpers.fake_packages import DynamicBatchNorm

pytestmark = pytest.mark.reference_too

CHANNELS, SHAPE = 3, (4, 3, 5)


def set_data(name, size=(), **options):
    def change(layer):
        getattr(layer, name).data = torch.ones(size, **options)

    return change


def set_attribute(name, value):
    return lambda layer: setattr(layer, name, value)


def replace(name):
    return lambda layer: setattr(layer, name, getattr(layer, name).detach().clone())


def drop(*names):
    def change(layer):
        for name in names:
            setattr(layer, name, None)

    return change


TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

CHANGES = {
    "nothing": lambda layer: None,
    **{f"{name}: size": set_data(name, CHANNELS + 1) for name in TENSORS},
    **{f"{name}: dtype": set_data(name, CHANNELS, dtype=torch.float64) for name in TENSORS[:2]},
    **{f"{name}: integers": set_data(name, CHANNELS, dtype=torch.int32) for name in TENSORS[2:4]},
    "num_batches_tracked: dtype": set_data("num_batches_tracked", dtype=torch.float32),
    **{f"another {name}": replace(name) for name in TENSORS[2:]},
    "elsewhere": lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(CHANNELS, device="meta"))),
    "no running_var": drop("running_var"),
    "no counter": drop("num_batches_tracked"),
    "no running statistics": drop("running_mean", "running_var"),
    "no parameters": drop("weight", "bias"),
    "momentum": set_attribute("momentum", 0.5),
    "momentum=None": set_attribute("momentum", None),
    "eps": set_attribute("eps", 0.5),
    "eps=0": set_attribute("eps", 0),
    "eps_mode": set_attribute("eps_mode", "clamp"),
    "an eps_mode that is none": set_attribute("eps_mode", "times"),
    "skip_nonfinite": set_attribute("skip_nonfinite", True),
    "untracked": set_attribute("track_running_stats", False),
    "an activation": set_attribute("fused_activation", "relu"),
    "name_in_model": set_attribute("name_in_model", "other"),
    "evaluation": lambda layer: layer.eval(),
    "frozen": bagua_syncbn.freeze_statistics,
    "alone": set_attribute("process_group", LOCAL),
    "one of DataParallel's replicas": lambda layer: vars(layer).update(_is_replica=True),
    "one of several replicas": set_attribute("_replica", SimpleNamespace(size=2)),
    "parametrized": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus()),
    "float64": lambda layer: layer.double(),
}

INPUTS = {
    "as before": lambda input: input,
    "more samples": lambda input: torch.cat([input, input]),
    "float64": lambda input: input.double(),
    "integers": lambda input: input.int(),
    "more channels": lambda input: torch.cat([input, input], 1),
    "no channels": lambda input: input[0, 0],
    "not finite": lambda input: input / 0,
    "elsewhere": lambda input: input.to("meta"),
}

SELECTIVE = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)

AROUND = {
    "checkpoint": lambda layer, input: checkpoint(layer, input, use_reentrant=False),
    "recomputed outputs": lambda layer, input: bagua_syncbn.recompute_outputs(nn.Sequential(layer))(input),
    "torch.func": lambda layer, input: torch.func.jvp(layer, (input,), (torch.ones_like(input),))[1],
    "vmap": lambda layer, input: torch.func.vmap(layer)(input[None])[0],
    "vmap of nested tensors": lambda layer, input: torch.func.vmap(layer)(STRANGE["nested, jagged"]()),
    "forward-mode differentiation": lambda layer, input: dual(layer, input),
    "selective checkpoint": lambda layer, input: checkpoint(layer, input, use_reentrant=False, context_fn=SELECTIVE),
    "jit.trace": lambda layer, input: torch.jit.trace(layer, input)(input),
    "input that torch.func has left over": lambda layer, input: layer(left_over(input)),
    "accumulated": lambda layer, input: accumulated(layer, input),
    "masked": lambda layer, input: masked(layer, input),
    "a mask": lambda layer, input: layer(input, mask=torch.arange(SHAPE[2]) < 3),
    "a residual": lambda layer, input: layer(input, input),
}


def left_over(input):
    kept = []
    torch.func.grad(lambda x: (kept.append(x * 3), x.sum())[1])(input)
    return kept[0]


def dual(layer, input):
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(layer(forward_ad.make_dual(input, input.detach() ** 2)))
        return output.primal + output.tangent


def accumulated(layer, input):
    with bagua_syncbn.accumulate_statistics(layer):
        return layer(input) + layer(input + 1)


def masked(layer, input):
    with bagua_syncbn.masked(layer, torch.arange(SHAPE[2]) < 3):
        return layer(input)


class Recording(Twin):
    """Notes who speaks, by the words for the layer and the terms."""

    said = None

    def all_gather(self, packed):
        self.said = packed[-3:-1].tolist()
        return super().all_gather(packed)


def call(layer, input, around):
    """Returns what the call gave, or raised, what it said and what it left."""
    input = input.detach().requires_grad_(input.is_floating_point())
    try:
        output = around(layer, input)
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output).to(output))
        told = output, input.grad, *(parameter.grad for parameter in layer.parameters())
    except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        told = type(error), str(error)
    said = getattr(layer.process_group, "said", None)
    return told, said, {name: tensor.clone() for name, tensor in layer.named_buffers()}


def compare(*changes, before=(), alter=INPUTS["as before"], around=lambda layer, input: layer(input)):
    """One call of a layer that knows it, and of a copy that does not."""
    layer, input = SyncBatchNorm(CHANNELS, process_group=Recording()), torch.randn(SHAPE)
    for change in before:
        change(layer)
    remembered = input.clone().requires_grad_()  # as the calls that follow: the guard looks at it
    for _ in range(2):
        layer(remembered)
    assert layer._cached_call is not None
    assert layer._cached_call.run(layer, remembered) is not None
    anew = copy.deepcopy(layer)
    assert anew._cached_call is None
    for change in changes:
        change(layer)
        change(anew)
    told, said, left = call(layer, alter(input), around)
    expected, expected_said, expected_left = call(anew, alter(input), around)
    if isinstance(expected[0], type):
        assert told == expected
    else:
        assert said == expected_said
        torch.testing.assert_close(told, expected, rtol=0, atol=0, equal_nan=True)
    assert left.keys() == expected_left.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, expected_left[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_layer_is_seen(change):
    compare(CHANGES[change])
    compare(CHANGES[change], alter=INPUTS["not finite"])


@pytest.mark.parametrize("kind", ["no running statistics", "no parameters", "untracked", "momentum=None", "float64"])
def test_every_kind_of_layer_does_as_it_did(kind):
    compare(before=[CHANGES[kind]], alter=torch.Tensor.double if kind == "float64" else INPUTS["as before"])


@pytest.mark.parametrize("channels", [CHANNELS, CHANNELS + 1])
def test_a_parameter_that_a_layer_did_not_have_is_seen(channels):
    weight = nn.Parameter(torch.arange(1.0, 1 + channels))
    compare(set_attribute("weight", weight), before=[CHANGES["no parameters"]])


@pytest.mark.parametrize("alter", INPUTS)
def test_every_change_of_the_input_is_seen(alter):
    compare(alter=INPUTS[alter])


@pytest.mark.parametrize("around", AROUND)
def test_all_that_goes_on_around_a_call_is_seen(around):
    compare(around=AROUND[around])


def test_a_class_that_gives_parts_of_its_tensors_is_asked_in_each_call():
    layer = SyncBatchNorm(CHANNELS, process_group=Twin())
    nn.init.normal_(layer.weight)
    layer.__class__ = type("DynamicSyncBatchNorm", (DynamicBatchNorm, SyncBatchNorm), {})
    for active in (3, 3, 2, 2, 1, 3, 3):
        layer.active = active
        part = SyncBatchNorm(active, process_group=Twin())
        state = {name: value[:active] if value.dim() else value for name, value in layer.state_dict().items()}
        part.load_state_dict(state)
        input = torch.randn(4, active, 5)
        torch.testing.assert_close(layer(input), part(input), rtol=0, atol=0)
        for name, value in part.named_buffers():
            torch.testing.assert_close(getattr(layer, name), value, rtol=0, atol=0)


def test_the_cached_call_does_not_travel(tmp_path):
    layer, input = SyncBatchNorm(CHANNELS, process_group=Twin()), torch.randn(SHAPE)
    layer(input)
    torch.save(layer, tmp_path / "layer.pt")
    assert torch.load(tmp_path / "layer.pt", weights_only=False)._cached_call is None
    assert "_cached_call" not in vars(bagua_syncbn.revert_sync_batchnorm(layer))


def nested(layout):
    return lambda: torch.nested.nested_tensor([torch.randn(2, CHANNELS), torch.randn(1, CHANNELS)], layout=layout)


def left_over_from_vmap():
    left = []
    torch.func.vmap(lambda one: left.append(one) or one * 2)(nested(torch.strided)())
    return left[0]


# Inputs that are no plain tensors, by kind.
STRANGE = {
    "nested": nested(torch.strided),
    "nested, jagged": nested(torch.jagged),
    "nested, left over from vmap": left_over_from_vmap,
    "sparse": lambda: torch.randn(4, CHANNELS).to_sparse(),
    "sparse rows": lambda: torch.randn(4, CHANNELS).to_sparse_csr(),
    "mkldnn": lambda: torch.randn(4, CHANNELS).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4, CHANNELS), 0.1, 0, torch.quint8),
    "complex": lambda: torch.randn(4, CHANNELS, dtype=torch.complex64),
    "elsewhere": lambda: torch.randn(4, CHANNELS, device="meta"),
    "None": lambda: None,
    "list": lambda: [[1.0] * CHANNELS] * 4,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_input_after_a_usual_one_is_refused(kind):
    layer, x = SyncBatchNorm(CHANNELS), torch.randn(4, CHANNELS)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)):
        layer(STRANGE[kind]())
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_nested_parameter_after_a_usual_one_is_refused(name):
    layer, x = SyncBatchNorm(CHANNELS), torch.randn(4, CHANNELS)
    layer(x)
    setattr(layer, name, nn.Parameter(STRANGE["nested"]()))
    with pytest.raises(RuntimeError):
        layer(x)
