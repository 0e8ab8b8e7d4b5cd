"""If ranks make different calls, training is still correct, or all ranks raise an error that names the calls."""

import copy
import re
import weakref
from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import bagua_syncbn
from bagua_syncbn import _ops as ops
from bagua_syncbn._reliability import faults
from bagua_syncbn._reliability.history import History, history_in
from bagua_syncbn.communicators import TorchCommunicator, c10d, shared
from tests.faults.programs import (
    REFUSED,
    STEP,
    Critic,
    Program,
    backward,
    forward,
    is_odd,
    own_group,
    own_model,
    set_in,
)
from tests.helpers.messages import message_of
from tests.helpers.observed import collectives
from tests.helpers.one_rank import Twin
from tests.helpers.replicated import parallel
from tests.helpers.rows import rows
from tests.helpers.steps import draw, gathered, unchanged
from tests.helpers.user_layers import BatchNormAct1d

DIFFER = "ranks made different calls"
FAILED_BEFORE = "this group failed before"


def set_model(name, value):
    return lambda model: setattr(model, name, value)


def freeze_b(model):
    bagua_syncbn.freeze_statistics(model.b)


def replace_a(model):
    model.a = bagua_syncbn.SyncBatchNorm1d(8, process_group=model.a.process_group)


def normalize(channels, is_named, layer, x):
    tensors = (each[:channels] for each in (layer.running_mean, layer.running_var, layer.weight, layer.bias))
    named = layer if is_named else None
    return bagua_syncbn.sync_batch_norm(x[:, :channels], *tensors, process_group=layer.process_group, layer=named)


def lengthen_name(model):
    model.a._sync_state.origin = model.a._sync_state.origin._replace(name="x" * 1000)


def call_on_meta(model):
    def call(layer, x):
        with torch.device("meta"):
            return layer(x)

    model.calls = dict.fromkeys("abc", call)


DIVERGENCES = {
    # The last rank runs a step other than "a b c backward".
    "equal layers reordered": Program("b a c backward", named=(forward("a"), forward("b"))),
    "a layer skipped": Program("a c backward", named=(forward("b"), forward("c"))),
    "no backward": Program("a b c", named=(backward("c"), forward("a"))),
    "backward reordered": Program("a b c backward-in-order", named=(backward("a"), backward("c"))),
    "backward of a layer reordered": Program(
        "a a backward-in-order", named=(backward("a"), "of the forward with message"), step="a a backward"
    ),
    "second derivatives reordered": Program(
        "a b differentiable-reversed",
        named=(f"double {backward('a')}", f"double {backward('b')}"),
        step="a b differentiable",
    ),
    "an error caught between two layers": Program("a error", named=(forward("a"), forward("b"))),
    # The last rank runs the same step with a changed model.
    "an error in backward": Program(change=set_model("raises_in_backward", "c"), named=(backward("c"), forward("a"))),
    "an input without gradient": Program(
        change=set_model("no_gradient_for", "b"), named=(backward("a"), backward("b"))
    ),
    "frozen statistics": Program(change=freeze_b, named=(forward("b"), forward("c"))),
    "almost equal eps, long names": Program(
        change=set_in("a", eps=1.0000001e-5), named=("eps=1e-05", "eps=1.0000001e-05"), prepare=lengthen_name
    ),
    "momentum": Program(change=set_in("b", momentum=None), named=(forward("b"), "momentum=0.1", "momentum=None")),
    "no running statistics": Program(change=set_in("b", track_running_stats=False), named=(forward("b"), "untracked")),
    "eps_mode": Program(change=set_in("a", eps_mode="clamp"), named=(forward("a"), "eps_mode=clamp")),
    "skip_nonfinite": Program(change=set_in("a", skip_nonfinite=True), named=(forward("a"), "skip_nonfinite=True")),
    "float64": Program(change=nn.Module.double, named=(forward("a"), "float32", "float64")),
    "number of channels": Program(
        change=set_model("calls", {"b": partial(normalize, 7, True)}), named=(forward("b"), "'b' of Model (7 channels")
    ),
    "a new layer": Program(change=replace_a, named=(forward("a"), "forward of SyncBatchNorm1d (8 channels")),
    "a default device": Program("c b a backward", named=(forward("a"), forward("c")), prepare=call_on_meta),
    "a function": Program(
        change=set_model("calls", {"a": partial(normalize, 8, False)}),
        named=(forward("a"), "forward of sync_batch_norm (8 channels"),
    ),
}


def refuse_on_the_last_rank(model):
    if is_odd():
        message_of(lambda: model.a(torch.ones(4, 8, dtype=torch.int64)))


def refuse_in_evaluation(model):
    message_of(lambda: model.a.eval()(torch.ones(2, 9)))
    model.a.train()


def evaluate_extra_models(model):
    for extra in (converted(model.a.process_group), copy.deepcopy(model.a)):
        extra.eval()(torch.ones(2, 8))


LEGITIMATE = {
    "a layer frozen on all ranks": Program("a c backward", nn.Module.train, step="a c backward", prepare=freeze_b),
    "an activation, no bias": Program(change=set_in("a", fused_activation="relu", bias=None)),
    "a float64 bias": Program(change=set_in("a", bias=nn.Parameter(torch.zeros(8, dtype=torch.float64)))),
    "an error before the first message": Program(prepare=refuse_on_the_last_rank),
    "an error in evaluation": Program(change=refuse_in_evaluation),
    "an error in replicas": Program(
        change=lambda model: message_of(lambda: parallel(model.a, "cpu", 2)(torch.ones(4, 8)))
    ),
    "extra models": Program(change=evaluate_extra_models),
    "a second conversion": Program(change=bagua_syncbn.convert_sync_batchnorm),
    "calls that repeat": Program("a a b b backward a b backward", step="a a b b backward a b backward"),
    "no backward on any rank": Program("a b c", step="a b c"),
    "message numbers that wrap": Program(
        prepare=lambda model: setattr(history_in(model.a.process_group), "messages", ops.WORD - 3)
    ),
}

PROGRAMS = DIVERGENCES | LEGITIMATE
PEERS = {2: "rank 0", 3: "ranks 0, 1", 4: "ranks 0, 1, 2"}
SLOW = pytest.mark.slow
# Programs whose messages differ in the position of the message, its pass, size or options.
KINDS = ("equal layers reordered", "backward reordered", "number of channels", "almost equal eps, long names")


def run_program(name, *args):
    return PROGRAMS[name].run(*args)


@pytest.mark.parametrize(("name", "kind", "ranks", "when"), [
    *((name, "pool", 2, 1) for name in DIVERGENCES),
    *rows(((name, *group) for name in DIVERGENCES for group in (("pool", 2, 0), ("large", 2, 1))), KINDS, 4),
    *(pytest.param(name, *larger, 1, marks=SLOW) for name in DIVERGENCES for larger in (("pool", 3), ("large", 4))),
])  # fmt: skip
def test_all_ranks_name_the_divergence(request, name, kind, ranks, when):
    for message in request.getfixturevalue(kind).run(run_program, ranks, name, when):
        assert message.startswith(f"sync_batch_norm: {DIFFER}: {PEERS[ranks]}: ")
        assert f"; rank {ranks - 1}: " in message
        assert all(part in message for part in DIVERGENCES[name].named)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("name", rows(DIVERGENCES, [*KINDS, "backward of a layer reordered"]))  # found after the steps
def test_on_a_device_the_divergence_is_named_and_the_group_stops(name):
    """The host checks for faults only before messages."""
    later = []

    def end(model):
        with collectives() as sent:  # errors send nothing either, because peers may have stopped sending
            assert "int64" in message_of(lambda: model.a(torch.ones(4, 8, dtype=torch.int64)))
            later.append(message_of(bagua_syncbn.check_ranks))
            again = message_of(lambda: model.run(STEP))
        assert sent.total() == 0
        assert DIFFER in again or FAILED_BEFORE in again

    with patch.object(faults, "CHECKED_AT_ONCE", ()):
        message = DIVERGENCES[name].run(1, end)
    assert DIFFER in (later[0] if message == "finished" else message)


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_differences_are_accepted(pool, name):
    assert pool.run(run_program, 2, name, 1) == ["finished"] * 2


# Compiled code.


def converted(communicator):
    return bagua_syncbn.convert_sync_batchnorm(Critic(nn.BatchNorm1d(8)), communicator)


def step_each(*models):
    for model in models:
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared memory", "collectives"])
def test_a_rank_may_fall_back_from_compiled_to_eager_code(is_shared):
    """Both ranks, then each rank in turn, run compiled code."""
    rank, group = dist.get_rank(), None if is_shared else TorchCommunicator(dist.new_group())
    layer = bagua_syncbn.SyncBatchNorm(8, momentum=1.0, process_group=group)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for number in range(4):
        batch, grad_output = draw(2, 8, 8, seed=number, dtype=torch.float32)
        input = batch.chunk(2)[rank].requires_grad_()
        (compiled if (number + rank) % 2 or number < 2 else layer)(input).backward(grad_output.chunk(2)[rank])
        torch.testing.assert_close(layer.running_mean, batch.mean(0))
        assert all(torch.equal(layer.running_mean, other) for other in gathered(layer.running_mean))


@pytest.mark.ranks(2)
def test_compiled_calls_continue_after_an_invalid_call_on_all_ranks():
    with own_group() as communicator:
        model = converted(communicator)
        for call, channels in ((model, 8), (model, 7), (torch.compile(model, backend="eager"), 8), (model, 8)):
            message = message_of(lambda call=call, channels=channels: call(torch.randn(4, channels)))
            assert (message == "finished") is (channels == 8)
        assert model[0].num_batches_tracked == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("last_rank", "first_call", "last_call"), [
    ("a c backward", forward("b"), forward("c")),
    ("a b c backward-in-order", backward("c"), backward("a")),
])  # fmt: skip
def test_divergence_beside_a_compiled_model_is_named(last_rank, first_call, last_call):
    with own_model() as model:
        compiled = torch.compile(converted(model.a.process_group), backend="eager")
        for _ in range(2):
            step_each(compiled)
            model.run(STEP)
        message = message_of(lambda: model.run(last_rank if is_odd() else STEP))
    assert DIFFER in message
    assert (last_call if is_odd() else first_call) in message


@pytest.mark.ranks(3)
def test_a_single_compiled_rank_is_named():
    with own_group() as communicator:
        model = converted(communicator)
        for _ in range(2):
            model(torch.randn(4, 8))
        call = torch.compile(model, backend="eager") if is_odd() else model
        message = message_of(lambda: call(torch.randn(4, 8)))
        if is_odd() and shared.problem():
            assert message == "finished"
        else:
            assert "ranks 0, 1: forward of SyncBatchNorm1d '0' of Critic (8 channels" in message
            assert re.search(r"rank 2: .*, in compiled code", message)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared memory", "collectives"])
def test_mismatched_compiled_models_raise_or_return_nan(is_shared):
    """They return NaN over collectives, where the host does not see the messages."""
    with own_group() as communicator:
        model = converted(communicator if is_shared else TorchCommunicator(communicator.group))
        if is_odd():
            model[0].eps = 1e-3
        before, input = copy.deepcopy(model.state_dict()), torch.randn(4, 8)
        compiled = torch.compile(model, backend="eager")
        if is_shared and not shared.problem():
            message, is_summed = message_of(lambda: compiled(input)), c10d.sums_statistics(2)
            own = "this rank: sum" if is_summed else r"forward of Critic \(.* eps=0.001" if is_odd() else "eps=1e-05"
            assert DIFFER in message
            assert re.search(own, message)
            assert FAILED_BEFORE in message_of(lambda: model(input))
        else:
            assert compiled(input).isnan().all()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# Errors.


def run_refused(kind, on_all):
    """Runs three steps, ignoring errors. In the second step, layer b's call is invalid on the last rank or on all."""
    messages = []
    with own_model() as model:
        for number in range(3):
            model.calls = {"b": REFUSED[kind]} if number == 1 and (on_all or is_odd()) else {}
            messages.append(message_of(lambda: model.run(STEP)))
    return [message for message in messages if message != "finished"]


@pytest.mark.parametrize("kind", REFUSED)
def test_an_invalid_call_on_one_rank_raises_on_all(groups, kind):
    *waiting, refused = groups.run(run_refused, 3 if kind == "int64" else 2, kind, False)
    assert kind in refused[0]
    assert FAILED_BEFORE not in refused[0]
    for message in (*(messages[0] for messages in waiting), refused[1]):
        for part in (forward("b"), DIFFER, kind, "Error in SyncBatchNorm1d 'b', message 8: "):
            assert part in message
    assert all(f"process_group: {FAILED_BEFORE}, in the forward of" in messages[-1] for messages in waiting)


@pytest.mark.parametrize("kind", REFUSED)
def test_training_continues_after_an_invalid_call_on_all_ranks(pool, kind):
    for (message,) in pool.run(run_refused, 2, kind, True):
        assert kind in message


def fail(*_, **__):
    raise MemoryError("in a step")


# Before the first message of backward, and between a message and its check.
@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["batch_norm_backward_reduce", "merge_stats", "batch_norm_backward_elemt"])
def test_an_error_inside_a_step_raises_on_all_ranks(op):
    with own_model() as model, pytest.MonkeyPatch.context() as patched:
        model.run(STEP)
        if is_odd():
            patched.setattr(ops, op, fail)
        message = message_of(lambda: model.run(STEP))
        dist.barrier()  # the group's destruction would also notify peers
    assert "in a step" in message


@pytest.mark.ranks(2)
def test_an_error_in_a_second_derivative_raises_on_all_ranks():
    input = torch.randn(4, 8, requires_grad=True)
    with own_group() as communicator, pytest.MonkeyPatch.context() as patched:
        layer = bagua_syncbn.SyncBatchNorm(8, process_group=communicator)
        for fails in (False, True):
            (grad,) = torch.autograd.grad(layer(input).square().sum(), input, create_graph=True)
            if fails and is_odd():
                patched.setattr(ops, "per_channel", fail)
            message = message_of(grad.square().sum().backward)
            assert ("in a step" in message) is fails


class Damaging(Twin):
    """Changes the count of rank 1."""

    def all_gather(self, packed):
        rows = super().all_gather(packed)
        rows[1, 16:17] = -1  # after the mean and variance of 8 channels; a probe is shorter
        return rows


def test_a_changed_count_raises_and_the_group_stops():
    layer = bagua_syncbn.SyncBatchNorm1d(8, process_group=Damaging())
    found = r"rank 1 sent a count outside .* in the forward of .*, message 1; end the job, and check"
    for told in (found, FAILED_BEFORE):
        with unchanged(layer), pytest.raises(RuntimeError, match=told):
            layer(torch.ones(4, 8))
    bagua_syncbn.check_ranks()  # does not raise the error again


# Names of models and layers.

ONE, TWO = "'0' of Critic (8", "'0' of Critic #2 (8"
# Pairs of models or layers that the last rank calls in reverse order, and their names in the error.
ALIKE = {
    "models of one class": (lambda group: (converted(group), converted(group)), (ONE, TWO)),
    "a model and its copy": (lambda group: (model := converted(group), copy.deepcopy(model)), (ONE, TWO)),
    "layers": (
        lambda group: [bagua_syncbn.SyncBatchNorm1d(8, process_group=group) for _ in range(2)],
        ("forward of SyncBatchNorm1d (8", "forward of SyncBatchNorm1d #2 (8"),
    ),
    "a model with layers of another": (
        lambda group: (bagua_syncbn.convert_sync_batchnorm(nn.Sequential(*converted(group))), converted(group)),
        ("'0' of Sequential (8", ONE),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ALIKE)
def test_identical_models_are_distinguished(kind):
    make, names = ALIKE[kind]
    with own_group() as communicator:
        first, second = make(communicator)
        step_each(first, second, first, second)
        message = message_of(lambda: step_each(second, first) if is_odd() else step_each(first, second))
    assert all(name in message for name in names), message


# Probes.


def count_messages(steps, most=History.most):
    """Returns the number of collectives of each step."""
    counts = []
    with patch.object(History, "most", most), own_model() as model:
        for step in steps:
            with collectives() as counted:
                model.run(step)
            counts.append(counted.total())
    return counts


# At most one collective for each message, and one for each probe.
@pytest.mark.parametrize(("steps", "most"), [
    ([STEP] * 3, [6 + 6, 6 + 2, 6]),
    (["a a b a b backward"] * 4, [10 + 10, 10 + 4, 10, 10]),
    ([STEP] * 3 + ["c a b backward"] * 2, [12, 8, 6, 6 + 6, 6 + 1]),
], ids=["a step", "a layer called twice", "a new order"])  # fmt: skip
def test_a_repeated_step_is_not_probed(groups, steps, most):
    for counts in groups.run(count_messages, 2, steps):
        assert all(count <= limit for count, limit in zip(counts, most, strict=True)), counts


@pytest.mark.ranks(2)
def test_a_momentum_that_the_layer_computes_for_each_batch_is_not_probed():
    model = bagua_syncbn.convert_sync_batchnorm(nn.Sequential(BatchNormAct1d(3, momentum=None)))
    for step in range(5):
        with collectives() as counted:
            model(torch.randn(4, 3, requires_grad=True)).sum().backward()
        assert step < 2 or counted.total() == 2


def test_all_ranks_forget_predictions_at_the_same_message(pool):
    steps = [f"{' '.join(order)} backward" for order in ("abc", "acb", "bac", "bca", "cab", "cba", "abc")]
    first, second = pool.run(count_messages, 2, steps, 10)
    assert first == second
    assert first[-1] > 6, "forgot nothing"


class Branches(nn.Module):
    """Layers that were built and not converted, called in an order that differs between ranks."""

    def __init__(self, group):
        super().__init__()
        layers = {name: bagua_syncbn.SyncBatchNorm1d(8, process_group=group) for name in "ab"}
        self.branches = nn.ModuleDict(layers)

    def forward(self, x):
        for name in "ba" if is_odd() else "ab":
            x = self.branches[name](x)
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [bagua_syncbn.with_bagua, bagua_syncbn.verify_synchronization])
def test_layers_that_were_built_are_named_in_models_that_a_function_sees(wrap):
    group, x = dist.new_group(), torch.randn(4, 8)
    model = Branches(group)
    if wrap is bagua_syncbn.with_bagua:
        message = message_of(wrap(model, []), x)
    else:
        message = message_of(lambda: wrap(model, x, lambda model, x: model(x).square().sum(), process_group=group))
    for name in "ab":
        assert f"forward of SyncBatchNorm1d 'branches.{name}' of Branches" in message


# Modes.


@pytest.mark.parametrize("mode", [nullcontext(), torch.device("meta"), FakeTensorMode(), torch.inference_mode()])
def test_a_record_of_any_device_made_in_any_mode_is_checked(mode):
    with mode:
        record = faults.FaultRecord("privateuseone", ())
    rows = torch.stack([ops.batch_norm_stats(torch.ones(4, 2), 5, number) for number in (1, 2)])
    ops.batch_norm_gather_stats(rows, None, None, None, None, 1e-5, record.tensor)
    with pytest.raises(RuntimeError, match=DIFFER):
        bagua_syncbn.check_ranks()


def test_the_memory_of_a_record_on_a_device_outlives_it():
    """A captured graph may still write to it."""
    record = faults.FaultRecord("privateuseone", ())
    memory = weakref.ref(record.tensor)
    del record
    assert memory() is not None


def test_check_ranks_says_if_torch_cannot_wait_for_a_device():
    record = faults.FaultRecord("privateuseone", ())
    raised = RuntimeError("Backend doesn't support synchronizing all streams on device.")
    device = {"is_available": lambda: True, "current_accelerator": lambda: torch.device("privateuseone")}
    found = pytest.raises(RuntimeError, match=r"^check_ranks: cannot wait for the device privateuseone, .* Backend")
    with patch.multiple(torch.accelerator, **device, synchronize=Mock(side_effect=raised)), found:
        bagua_syncbn.check_ranks()
    del record  # alive until here, so that there is a device to wait for
