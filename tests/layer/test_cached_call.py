"""A layer that has found a call right finds out about every change before the next one."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm, SyncBatchNorm1d, functional
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.data_parallel.step import Replica
from bagua_syncbn.names import ConvertedModel, Origin
from bagua_syncbn.sync_batchnorm import refuse_alone
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


def expand(name):
    return lambda layer: setattr(layer, name, getattr(layer, name)[:1].expand(CHANNELS))


def drop(*names):
    def change(layer):
        for name in names:
            setattr(layer, name, None)

    return change


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([torch.randn(2, CHANNELS), torch.randn(1, CHANNELS)], layout=layout)


TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

CHANGES = {
    "nothing": lambda layer: None,
    **{f"{name}: size": set_data(name, CHANNELS + 1) for name in TENSORS},
    **{f"{name}: dtype": set_data(name, CHANNELS, dtype=torch.float64) for name in TENSORS[:2]},
    **{f"{name}: integers": set_data(name, CHANNELS, dtype=torch.int32) for name in TENSORS[2:4]},
    "num_batches_tracked: dtype": set_data("num_batches_tracked", dtype=torch.float32),
    **{f"another {name}": replace(name) for name in TENSORS[2:]},
    **{f"expanded {name}": expand(name) for name in TENSORS[2:4]},
    "nested weight": lambda layer: setattr(layer, "weight", nn.Parameter(nested())),
    "nested bias": lambda layer: setattr(layer, "bias", nn.Parameter(nested())),
    "elsewhere": lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(CHANNELS, device="meta"))),
    "no running_var": drop("running_var"),
    "no counter": drop("num_batches_tracked"),
    "one tensor as both": lambda layer: setattr(layer, "running_var", layer.running_mean),
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
    "another place in a model": set_attribute("_origin", Origin("other", ConvertedModel("Model"))),
    "class": set_attribute("__class__", SyncBatchNorm1d),
    "evaluation": lambda layer: layer.eval(),
    "frozen": bagua_syncbn.freeze_statistics,
    "alone": set_attribute("process_group", LOCAL),
    "one of DataParallel's replicas": set_attribute("_attached", (refuse_alone,)),
    "one of several replicas": set_attribute("_attached", (Replica(SimpleNamespace(size=2), 0, "layer"),)),
    "parametrized": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus()),
    "float64": lambda layer: layer.double(),
}


INPUTS = {
    "as before": lambda input: input,
    "more samples": lambda input: torch.cat([input, input]),
    "float64": lambda input: input.double(),
    "not finite": lambda input: input / 0,
}

ALTERED = {
    "no tensor": lambda tensor: SimpleNamespace(**{name: getattr(tensor, name) for name in ATTRIBUTES}),
    "elsewhere": lambda tensor: tensor.to("meta"),
    "bool": lambda tensor: tensor.bool(),
    "size": lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(2),
    "sparse": lambda tensor: tensor.to_sparse(),
}
ATTRIBUTES = "dtype", "device", "shape", "layout", "stride"

REFUSED_TENSORS = [
    *((name, how) for name in (*TENSORS, "residual") for how in ("no tensor", "elsewhere", "bool", "size")),
    ("residual", "sparse"),
]

REFUSED_INPUTS = {
    "integers": lambda input: input.int(),
    "complex": lambda input: input.to(torch.complex64),
    "more channels": lambda input: torch.cat([input, input], 1),
    "no channels": lambda input: input[0, 0],
    "elsewhere": lambda input: input.to("meta"),
    "nested": lambda input: nested(),
    "nested, jagged": lambda input: nested(torch.jagged),
    "sparse": lambda input: input.to_sparse(),
    "sparse rows": lambda input: input[..., 0].to_sparse_csr(),
    "mkldnn": lambda input: input[..., 0].to_mkldnn(),
    "quantized": lambda input: torch.quantize_per_tensor(input[..., 0], 0.1, 0, torch.quint8),
    "None": lambda input: None,
    "list": lambda input: input.tolist(),
}

SELECTIVE = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)

AROUND = {
    "checkpoint": lambda layer, input: checkpoint(layer, input, use_reentrant=False),
    "recomputed outputs": lambda layer, input: bagua_syncbn.recompute_outputs(nn.Sequential(layer))(input),
    "torch.func": lambda layer, input: torch.func.jvp(layer, (input,), (torch.ones_like(input),))[1],
    "vmap": lambda layer, input: torch.func.vmap(layer)(input[None])[0],
    "vmap of nested tensors": lambda layer, input: torch.func.vmap(layer)(nested(torch.jagged)),
    "forward-mode differentiation": lambda layer, input: dual(layer, input),
    "selective checkpoint": lambda layer, input: checkpoint(layer, input, use_reentrant=False, context_fn=SELECTIVE),
    "jit.trace": lambda layer, input: torch.jit.trace(layer, input)(input),
    "input that torch.func has left over": lambda layer, input: layer(left_over(input)),
    "input that vmap has left over": lambda layer, input: layer(left_over_from_vmap()),
    "fake tensors": lambda layer, input: faked(layer, input),
    "accumulated": lambda layer, input: accumulated(layer, input),
    "masked": lambda layer, input: masked(layer, input),
    "a mask": lambda layer, input: layer(input, mask=torch.arange(SHAPE[2]) < 3),
    "a residual": lambda layer, input: layer(input, input),
}


def left_over(input):
    kept = []
    torch.func.grad(lambda x: (kept.append(x * 3), x.sum())[1])(input)
    return kept[0]


def left_over_from_vmap():
    left = []
    torch.func.vmap(lambda one: left.append(one) or one * 2)(nested())
    return left[0]


def dual(layer, input):
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(layer(forward_ad.make_dual(input, input.detach() ** 2)))
        return output.primal + output.tangent


def faked(layer, input):
    with FakeTensorMode() as mode:
        layer(mode.from_tensor(input))
    return layer(input)


def by_function(layer, input, **altered):
    tensors = {name: getattr(layer, name).detach() for name in TENSORS}
    options = {"training": layer.training, "process_group": layer.process_group, "layer": layer}
    return bagua_syncbn.sync_batch_norm(input, **{**tensors, **altered}, **options)


def with_residual(layer, input, name="", how=""):
    tensors = {"residual": input.detach()}
    if name:
        tensors[name] = ALTERED[how](tensors[name] if name in tensors else getattr(layer, name).detach())
    return by_function(layer, input, **tensors)


def accumulated(layer, input):
    with bagua_syncbn.accumulate_statistics(layer):
        return layer(input) + layer(input + 1)


def masked(layer, input):
    with bagua_syncbn.masked(layer, torch.arange(SHAPE[2]) < 3):
        return layer(input)


class Recording(Twin):
    """Notes the caller, by the words for the layer and the options."""

    said = None

    def all_gather(self, packed):
        if type(packed) is torch.Tensor:  # fake ones hold no values
            self.said = packed[-3:-1].tolist()
        return super().all_gather(packed)


def leaf(input):
    return input.clone().requires_grad_() if isinstance(input, torch.Tensor) and input.is_floating_point() else input


def buffers_of(layer):
    return {name: tensor.clone() for name, tensor in layer.named_buffers()}


def call(layer, input, around):
    """Returns what the call gave, or raised, what it said and what it left."""
    before = buffers_of(layer)
    try:
        output = around(layer, input)
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output).to(output))
        told = output, input.grad, *(parameter.grad for parameter in layer.parameters())
    except Exception as error:
        told = type(error), str(error)
        torch.testing.assert_close(buffers_of(layer), before, rtol=0, atol=0)
    return told, getattr(layer.process_group, "said", None), buffers_of(layer)


def plain(layer, input):
    return layer(input)


def compare(*changes, before=(), alter=INPUTS["as before"], around=plain, first=plain):
    """Compares a call of a layer that knows it with that of a copy that does not; returns what it gave or raised."""
    layer, input = SyncBatchNorm(CHANNELS, process_group=Recording()), torch.randn(SHAPE)
    for change in before:
        change(layer)
    remembered = leaf(input)  # as the calls that follow: the guard looks at it
    for _ in range(2):
        first(layer, remembered)
    known = layer._known
    first(layer, remembered)
    assert layer._known is known is not None
    anew = copy.deepcopy(layer)
    assert anew._known is None
    for change in changes:
        change(layer)
        change(anew)
    input = alter(input)
    results, expected = (call(each, leaf(input), around) for each in (layer, anew))
    if isinstance(expected[0][0], type):
        assert results[0] == expected[0]
    else:
        torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
    return expected[0]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_layer_is_seen(change):
    compare(CHANGES[change])
    compare(CHANGES[change], alter=INPUTS["not finite"])


@pytest.mark.parametrize("kind", ["no running statistics", "no parameters", "untracked", "momentum=None", "float64"])
def test_every_kind_of_layer_does_as_it_did(kind):
    compare(before=[CHANGES[kind]], alter=torch.Tensor.double if kind == "float64" else INPUTS["as before"])


def test_evaluation_is_seen_where_nothing_else_tells_it_from_training():
    compare(CHANGES["evaluation"], before=[CHANGES["alone"], CHANGES["no counter"]])


def test_the_momentum_of_a_layer_that_passes_another_one_is_seen():
    compare(CHANGES["momentum=None"], around=by_function, first=by_function)


@pytest.mark.parametrize("channels", [CHANNELS, CHANNELS + 1])
def test_a_parameter_that_a_layer_did_not_have_is_seen(channels):
    weight = nn.Parameter(torch.arange(1.0, 1 + channels))
    compare(set_attribute("weight", weight), before=[CHANGES["no parameters"]])


@pytest.mark.parametrize("alter", INPUTS)
def test_every_change_of_the_input_is_seen(alter):
    compare(alter=INPUTS[alter])


@pytest.mark.parametrize("around", [plain, by_function])
@pytest.mark.parametrize("alter", REFUSED_INPUTS)
def test_wrong_inputs_are_refused_after_a_right_one(alter, around):
    kind, _ = compare(alter=REFUSED_INPUTS[alter], around=around, first=around)
    assert issubclass(kind, Exception)


@pytest.mark.parametrize(("name", "how"), REFUSED_TENSORS)
def test_wrong_tensors_are_refused_after_right_ones(name, how):
    kind, _ = compare(around=partial(with_residual, name=name, how=how), first=with_residual)
    assert issubclass(kind, Exception)


@pytest.mark.parametrize("around", AROUND)
def test_all_that_goes_on_around_a_call_is_seen(around):
    before = [CHANGES["no parameters"], CHANGES["no running statistics"]] if around == "fake tensors" else ()
    compare(before=before, around=AROUND[around])


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


def test_checks_of_others_see_inputs_with_new_facts_until_they_are_content(monkeypatch):
    seen, answers = [], {torch.float32: [False, False, True, True], torch.float64: [True, True]}

    def check(input):
        seen.append(input)
        return answers[input.dtype].pop(0)

    monkeypatch.setattr(functional, "FIRST_CALL_CHECKS", [check])
    layer, input = SyncBatchNorm1d(CHANNELS, process_group=LOCAL), torch.randn(SHAPE)
    wide = input.double()
    for given, is_seen in [(input, True), (input, True), (input, False), (wide, True), (wide, False)]:
        seen.clear()
        layer(given)
        assert all(one is given for one in seen)
        assert bool(seen) == is_seen


def test_revert_forgets_what_is_known():
    layer = SyncBatchNorm(CHANNELS, process_group=Twin())
    layer(torch.randn(SHAPE))
    assert layer._known is not None
    assert "_known" not in vars(bagua_syncbn.revert_sync_batchnorm(layer))
