"""Ranks that make different calls: training stays correct, or all ranks raise an error that names the calls.

The table in docs/reliability.md lists these rows.
"""

import copy
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn import ops
from bagua_syncbn.communicators import LOCAL, shared
from bagua_syncbn.reliability import faults
from bagua_syncbn.reliability.history import CallHistory, history_in
from bagua_syncbn.reliability.signatures import RAISED, describe
from tests.faults.programs import REFUSED, STEP, Model, Row, is_odd, message_of, own_group, own_model, set_in
from tests.helpers.observed import collectives
from tests.helpers.replicated import parallel

DIFFER = "expected all ranks of a group to call the same layers"
FAILED_BEFORE = "this group failed before"


def swap(first, second):
    def change(model):
        one, other = getattr(model, first), getattr(model, second)
        setattr(model, first, other)
        setattr(model, second, one)

    return change


def other_channels(model):
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.ones(10)
        setattr(model.b, name, nn.Parameter(value) if name in ("weight", "bias") else value)
    model.b.num_features = 10


def made_by_hand(model):
    model.a = bagua_syncbn.SyncBatchNorm1d(8, process_group=model.a.process_group)


def by_a_function(model):
    def normalize(layer, x):
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        return bagua_syncbn.sync_batch_norm(x, *tensors, process_group=layer.process_group)

    model.calls = {"a": normalize}


def set_model(name, value):
    return lambda model: setattr(model, name, value)


def freeze(name):
    return lambda model: bagua_syncbn.freeze_statistics(getattr(model, name))


FORWARD, BACKWARD = "forward of", "backward of"
NAMED = {
    # Other calls.
    "two layers of equal size swapped": Row("b a c backward", layers="ab"),
    "two layers of other sizes swapped": Row("c b a backward", layers="ac"),
    "the objects swapped": Row(change=swap("a", "b"), layers="ab"),
    "another branch of equal size": Row("a b b backward", layers="bc"),
    "first layer skipped": Row("b c backward", layers="ab"),
    "layer skipped": Row("a c backward", layers="bc"),
    "last layer skipped": Row("a b backward", layers="cb", says=(BACKWARD,)),
    "all but one skipped": Row("c backward", layers="ac"),
    "first layer twice": Row("a a b c backward", layers="ab"),
    "another call after one that others of another size follow": Row(
        "a b a c backward", layers="ab", others="a a b a c backward"
    ),
    "last layer twice": Row("a b c c backward", layers="c", says=(FORWARD, BACKWARD)),
    "two forwards before a backward": Row("a b c a b c backward", layers="ac", says=(FORWARD, BACKWARD)),
    "backward in parts": Row("a b backward c backward", layers="bc", says=(FORWARD, BACKWARD)),
    "backward in another order": Row("a b c backward-in-order", layers="ac", says=(BACKWARD,)),
    "two backward passes of a layer in another order": Row(
        "a a backward-in-order", layers="a", says=(BACKWARD, "of the forward in call"), others="a a backward"
    ),
    "double backward in another order": Row(
        "a b differentiable-in-reverse", layers="ab", says=("double backward of",), others="a b differentiable-in-order"
    ),
    "no backward": Row("a b c", layers="ca", says=(FORWARD, BACKWARD)),
    "no backward of one layer's input": Row(change=set_model("no_gradient_for", "b"), layers="ab", says=(BACKWARD,)),
    "no backward of the first input": Row(change=set_model("no_gradient_for", "a"), layers="a", says=(BACKWARD,)),
    "torch.no_grad": Row(change=set_model("has_grad", False), layers="ca", says=(FORWARD, BACKWARD)),
    # Evaluation.
    "evaluation of a layer": Row(change=lambda model: model.b.eval(), layers="bc"),
    "evaluation of the last layer": Row(change=lambda model: model.c.eval(), layers="cb", says=(BACKWARD,)),
    "frozen statistics of a layer": Row(change=freeze("b"), layers="bc"),
    # Exceptions that the program catches.
    "exception between two layers": Row("a error", layers="ab"),
    "exception before backward": Row("a b c error", layers="ca", says=(FORWARD, BACKWARD)),
    "exception in backward, first": Row(change=set_model("raises_in_backward", "c"), layers="ca", says=(BACKWARD,)),
    # Other options.
    "other eps": Row(change=set_in("a", eps=1e-3), layers="a", says=("eps=1e-05", "eps=0.001")),
    "other momentum": Row(change=set_in("b", momentum=0.2), layers="b", says=("momentum=0.1", "momentum=0.2")),
    "momentum=None": Row(change=set_in("b", momentum=None), layers="b", says=("momentum=0.1", "momentum=None")),
    "momentum=None where others have 0": Row(
        change=set_in("b", momentum=None), layers="b", says=("momentum=0.0", "momentum=None"),
        prepare=set_in("b", momentum=0.0),
    ),
    "momentum=-2 where others have -1": Row(
        change=set_in("b", momentum=-2), layers="b", says=("momentum=-1", "momentum=-2"),
        prepare=set_in("b", momentum=-1),
    ),
    "untracked statistics": Row(change=set_in("b", track_running_stats=False), layers="b", says=("untracked",)),
    "averages over other numbers of batches": Row(
        change=lambda model: model.b.num_batches_tracked.add_(2), layers="b",
        says=("momentum=None", "num_batches_tracked="), prepare=set_in("b", momentum=None),
    ),
    "other eps_mode": Row(change=set_in("a", eps_mode="clamp"), layers="a", says=("eps_mode=clamp",)),
    "other skip_nonfinite": Row(change=set_in("a", skip_nonfinite=True), layers="a", says=("skip_nonfinite",)),
    "float64": Row(change=nn.Module.double, layers="a", says=("float32", "float64")),
    "other number of channels": Row(change=other_channels, says=("'b'", "8 channels", "10 channels")),
    "a layer made by hand": Row(change=made_by_hand, layers="a", says=("SyncBatchNorm1d (8",)),
    "a functional call": Row(change=by_a_function, layers="a", says=("sync_batch_norm (8",)),
}  # fmt: skip

# The last rank sends no message, so the others wait until the time-out.
ABSENT = {
    "evaluation of the model": Row(change=nn.Module.eval, layers="a"),
    "frozen statistics of the model": Row(change=bagua_syncbn.freeze_statistics, layers="a"),
    "step left out": Row("", layers="a"),
    "exception before the first layer": Row("error", layers="a"),
    "last step ends early": Row("a b", layers="c"),
}


def refused_in_evaluation(model):
    message_of(lambda: model.a.eval()(torch.ones(2, 9)))
    model.a.train()


LEGITIMATE = {
    "the same": Row(),
    "statistics that all freeze": Row("a c backward", nn.Module.train, others="a c backward", prepare=freeze("b")),
    "a momentum of another type": Row(prepare=set_in("b", momentum=0.0), change=set_in("b", momentum=False)),
    "a momentum of -0.0": Row(prepare=set_in("b", momentum=0), change=set_in("b", momentum=-0.0)),
    "a bias of another dtype": Row(change=set_in("a", bias=nn.Parameter(torch.zeros(8, dtype=torch.float64)))),
    "an activation": Row(change=set_in("a", fused_activation="relu")),
    "no affine": Row(change=set_in("a", bias=None)),
    "a layer that is not synchronized, evaluated": Row(change=lambda model: nn.BatchNorm1d(8).eval()(torch.ones(2, 8))),
    "an error in evaluation": Row(change=refused_in_evaluation),
    "an error in replicas": Row(change=lambda model: message_of(lambda: parallel(model.a, "cpu", 2)(torch.ones(4, 8)))),
    "a frozen weight": Row(change=lambda model: model.a.weight.requires_grad_(False)),
    "a second conversion": Row(change=bagua_syncbn.convert_sync_batchnorm),
    "a layer called twice on all ranks": Row("a a b backward", others="a a b backward"),
    "calls that repeat": Row("a a b b backward a b backward", others="a a b b backward a b backward"),
    "no backward on all ranks": Row("a b c", others="a b c"),
    "calls beyond the last number": Row(
        prepare=lambda model: setattr(history_in(model.a.process_group), "calls", ops.WORD - 7)
    ),
    "backward in parts on all ranks": Row(
        "a b backward-in-order c backward", others="a b backward-in-order c backward"
    ),
}

ROWS = NAMED | ABSENT | LEGITIMATE


def run_row(name, *args):
    return ROWS[name].run(*args)


ALWAYS_WITH_3 = ("two layers of equal size swapped", "two layers of other sizes swapped", "layer skipped", "other eps")


def cases(rows):
    """Yields each row for two ranks, diverging in step 0 and in step 1. Most rows with more ranks are slow tests."""
    for name in rows:
        for ranks, when in ((2, 0), (2, 1), (3, 1), (4, 1)):
            slow = ranks > 2 and name not in ALWAYS_WITH_3
            yield pytest.param(name, ranks, when, marks=pytest.mark.slow if slow or ranks == 4 else ())


def ranks_named_in(message):
    """Returns the lists of ranks in a message such as "got ranks 0-2, 5: ...; rank 3: ..."."""
    named = []
    for runs in re.findall(r"(?:, got|;) ranks? ([\d, -]+): ", message):
        ends = ([int(end) for end in run.split("-")] for run in runs.split(", "))
        named.append([rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1)])
    return named


@pytest.mark.parametrize(("name", "ranks", "when"), list(cases(NAMED)))
def test_all_ranks_name_the_divergence(groups, name, ranks, when):
    for message in groups.run(run_row, ranks, name, when):
        named = ranks_named_in(message)
        assert message.startswith(f"sync_batch_norm: {DIFFER}")
        assert len(named) > 1
        assert sorted(rank for each in named for rank in each) == list(range(ranks))
        assert not NAMED[name].missing_in(message)


class Late:
    """The kind of a fault record, read as 0 the first times, as if the device were behind the host."""

    def __init__(self, kind, times):
        self._kind, self._times = kind, times

    @property
    def value(self):
        if not self._kind.value or not self._times:
            return int(self._kind.value)
        self._times -= 1
        return 0


def run_without_looking(name, late, seconds):
    """Runs a row with hosts that check for faults only before each call, as on CUDA, and miss the first ``late`` times.

    Returns the first message about the divergence, the message of another step, and its number of collectives.
    """
    later = []

    def begin(model):
        history = history_in(model.a.process_group)
        record = faults.RECORDS[history.name, "cpu"] = faults.FaultRecord("cpu", history.recent)
        record.is_on_cpu, record.kind = False, Late(record.kind, late)

    def end(model):
        later.append(message_of(bagua_syncbn.check_ranks))
        with collectives() as sent:
            later.append(message_of(lambda: model.run(STEP)))
        later.append(sent.total())

    message = NAMED[name].run(1, seconds, begin, end)
    found, again, sent = later
    return found if message == "finished" else message, again, sent


@pytest.mark.parametrize("name", NAMED)
def test_without_host_checks_the_divergence_is_named_and_the_group_stops(groups, name):
    for message, again, sent in groups.run(run_without_looking, 2, name, 0, 300.0):
        assert DIFFER in message
        assert "expected all ranks of a group" in again or FAILED_BEFORE in again
        assert sent == 0


@pytest.mark.parametrize("name", NAMED)
def test_late_detection_never_sends_messages_of_different_sizes(groups, name):
    """Shared memory raises for these; other backends may abort the process."""
    for message, again, _ in groups.run(run_without_looking, 2, name, 4, 1.0):
        assert "sent different messages" not in message + again
        assert again != "finished"


@pytest.mark.slow
@pytest.mark.parametrize("name", ABSENT)
def test_waiting_ranks_report_their_layer(pool, name):
    waiting, absent = pool.run(run_row, 2, name, 2, 10.0)
    assert absent == "finished"
    assert "sync_batch_norm: collective failed in the" in waiting
    assert not ABSENT[name].missing_in(waiting)


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_differences_are_accepted(pool, name):
    assert pool.run(run_row, 2, name, 1) == ["finished"] * 2


# Compiled code.


class Critic(nn.Sequential):
    pass


class Judge(nn.Sequential):
    pass


def converted(communicator, cls=Judge):
    return bagua_syncbn.convert_sync_batchnorm(cls(nn.BatchNorm1d(8)), communicator)


def train(*models):
    for model in models:
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()


def run_partly_compiled(momentum):
    """Runs two compiled steps; the last rank runs the second one eagerly."""
    layer = bagua_syncbn.SyncBatchNorm(8, momentum=momentum)
    compiled = torch.compile(layer, backend="eager")
    for step in range(2):
        x = torch.full((2, 8), float(dist.get_rank()), requires_grad=True)
        call = layer if step and is_odd() else compiled
        call(x).backward(torch.randn(2, 8))
    assert layer.running_mean.tolist() == [0.5] * 8


@pytest.mark.parametrize("momentum", [1.0, None])
def test_a_rank_may_fall_back_from_compiled_to_eager_code(groups, momentum):
    groups.run(run_partly_compiled, 2, momentum)


@pytest.mark.ranks(2)
def test_compiled_calls_continue_after_an_invalid_call_on_all_ranks():
    with own_group() as communicator:
        model = converted(communicator)
        for call, channels in ((model, 8), (model, 7), (torch.compile(model, backend="eager"), 8), (model, 8)):
            message = message_of(lambda call=call, channels=channels: call(torch.randn(4, channels)))
            assert (message == "finished") is (channels == 8)
        assert model[0].num_batches_tracked == 3


# Steps of the last rank, and the expected parts of the errors.
BESIDE = {
    "b a c backward": Row(layers="ab"),
    "c a b backward": Row(layers="ac"),
    "a b c backward-in-order": Row(layers="c", says=(BACKWARD,)),
    "a c backward": Row(layers="bc"),
    STEP: Row(says=("finished",)),
}


def run_beside_compiled(step):
    with own_group() as communicator:
        model = bagua_syncbn.convert_sync_batchnorm(Model(), communicator)
        compiled = torch.compile(converted(communicator), backend="eager")

        def take_steps():
            for number in range(3):
                train(compiled)
                model.run(step if number and is_odd() else STEP)

        return message_of(take_steps)


@pytest.mark.parametrize("step", BESIDE)
def test_a_compiled_model_leaves_checks_of_other_models_exact(pool, step):
    first, second = pool.run(run_beside_compiled, 2, step)
    assert (first == "finished") is (step == STEP) is (second == "finished")
    assert not BESIDE[step].missing_in(first + second)


# From the first call on, sizes differ: backends abort, shared memory raises.
@pytest.mark.ranks(3)
@pytest.mark.parametrize("calls", [2, *[0] * (not shared.problem())])
def test_a_single_compiled_rank_is_named(calls):
    with own_group() as communicator:
        model = converted(communicator)
        for _ in range(calls):
            model(torch.randn(4, 8))
        if is_odd():
            model = torch.compile(model, backend="eager")
        message = message_of(lambda: (model(torch.randn(4, 8)), bagua_syncbn.check_ranks()))
    if calls == 0:
        assert "rank 0: gathers 3 float32; rank 1: gathers 3 float32; rank 2: gathers 21 float32" in message
    elif is_odd():
        assert "rank 2: compiled forward of a layer of Judge (8 channels" in message
    else:
        assert "ranks 0, 1: forward of SyncBatchNorm1d '0' of Judge (8 channels" in message
        assert "rank 2: compiled forward of a layer of Judge" in message or "rank 2: a compiled call" in message


def run_compiled():
    """Calls a compiled model with a different ``eps`` on the last rank; returns the messages of later calls."""
    messages = []
    with own_group() as communicator:
        model = converted(communicator)
        eager = bagua_syncbn.SyncBatchNorm(8, process_group=communicator)
        if is_odd():
            model[0].eps = 1e-3
        before = copy.deepcopy(model.state_dict())
        compiled = torch.compile(model, backend="eager")
        for find_out in (bagua_syncbn.check_ranks, lambda: eager(torch.randn(4, 8))):
            assert compiled(torch.randn(4, 8)).isnan().all()
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
            messages.append(message_of(find_out))
        assert eager.num_batches_tracked == 0, "the check comes before the call"
    return messages


def test_mismatched_compiled_models_are_detected(groups):
    for messages in groups.run(run_compiled, 2):
        assert [DIFFER in message for message in messages] == [True, True]


@pytest.mark.ranks(2)
def test_a_fault_stays_in_its_group():
    with own_group() as first, own_group() as second:
        judge = converted(first)
        alike, beside = (bagua_syncbn.SyncBatchNorm(8, process_group=group) for group in (first, second))
        if is_odd():
            judge[0].eps = 1e-3
        # Compiled calls only record the fault; the next eager call raises.
        assert torch.compile(judge, backend="eager")(torch.randn(4, 8)).isnan().all()
        train(beside, beside)
        assert DIFFER in message_of(lambda: alike(torch.randn(4, 8)))


# Errors.


@pytest.mark.ranks(2)
def test_a_failed_group_refuses_further_calls():
    with own_model() as model:
        first, second = (message_of(lambda: model.call("b" if is_odd() else "a")) for _ in range(2))
    assert not Row(layers="ab").missing_in(first)
    assert "process_group: this group failed before, in the forward of" in second


@pytest.mark.ranks(2)
def test_an_invalid_call_before_the_first_message_stays_local():
    with own_model() as model:
        if is_odd():
            message_of(lambda: model.a(torch.ones(4, 8, dtype=torch.int64)))
        model.a(torch.randn(4, 8))
        assert model.a.num_batches_tracked == 1


def run_refused(kind, on_all):
    """Runs three steps, ignoring errors. In the second one the call of b is invalid on the last rank, or on all."""
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
        assert not Row(layers="b", says=(DIFFER, kind, "Error in SyncBatchNorm1d 'b', call 8: ")).missing_in(message)
    assert all(FAILED_BEFORE in messages[-1] for messages in waiting)


@pytest.mark.parametrize("kind", REFUSED)
def test_training_continues_after_an_invalid_call_on_all_ranks(pool, kind):
    for (message,) in pool.run(run_refused, 2, kind, True):
        assert kind in message


def fail(*_, **__):
    raise MemoryError("in a step")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("op", "told"), [
    ("batch_norm_backward_reduce", "in a step"),
    *((op, "has left") for op in ("merge_stats", "batch_norm_backward_elemt")),  # between a message and its check
])  # fmt: skip
def test_an_error_inside_a_step_raises_on_all_ranks(op, told):
    with own_model() as model, pytest.MonkeyPatch.context() as patch:
        model.run(STEP)
        if is_odd():
            patch.setattr(ops, op, fail)
        message = message_of(lambda: model.run(STEP))
        dist.barrier()  # the end of the group would tell too
    assert ("in a step" if is_odd() else told) in message


@pytest.mark.ranks(2)
def test_an_error_in_a_second_derivative_raises_on_all_ranks():
    input = torch.randn(4, 8, requires_grad=True)
    with own_group() as communicator, pytest.MonkeyPatch.context() as patch:
        layer = bagua_syncbn.SyncBatchNorm(8, process_group=communicator)
        for fails in (False, True):
            (grad,) = torch.autograd.grad(layer(input).square().sum(), input, create_graph=True)
            if fails and is_odd():
                patch.setattr(ops, "per_channel", fail)
            message = message_of(grad.square().sum().backward)
            assert ("in a step" in message) is fails


# Models that look alike, and texts.

# In the second round, the last rank calls the models in reverse order. Values: parts of the error.
SWAPPED = {
    "models of two classes": ("forward of SyncBatchNorm1d '0' of Critic (8", "forward of SyncBatchNorm1d '0' of Judge"),
    "models of one class": ("'0' of Critic (8", "'0' of Critic #2 (8"),
    "a model and its copy": ("'0' of Critic (8", "'0' of Critic #2 (8"),
    "layers made by hand": ("forward of SyncBatchNorm1d (8", "forward of SyncBatchNorm1d #2 (8"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SWAPPED)
def test_identical_models_are_distinguished(kind):
    with own_group() as communicator:
        first, second = converted(communicator, Critic), converted(communicator, Judge if "two" in kind else Critic)
        if kind == "a model and its copy":
            second = copy.deepcopy(first)
        if kind == "layers made by hand":
            first, second = (bagua_syncbn.SyncBatchNorm1d(8, process_group=communicator) for _ in range(2))
        train(first, second, first, second)
        message = message_of(lambda: train(second, first) if is_odd() else train(first, second))
    assert not Row(says=SWAPPED[kind]).missing_in(message)


# Extra models and layers of the last rank, which it does not train in the group.
MORE = {
    "a norm that nothing calls": lambda model, _: model.add_module("unused", nn.BatchNorm1d(8)),
    "a head of its own": lambda model, _: model.add_module(
        "head", bagua_syncbn.SyncBatchNorm1d(8, process_group=LOCAL)
    ),
    "a model converted before": lambda _, communicator: converted(communicator, Critic),
    "a copy that it evaluates": lambda model, communicator: copy.deepcopy(
        bagua_syncbn.convert_sync_batchnorm(model, communicator)
    ).eval()(torch.ones(2, 8)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", MORE)
def test_a_rank_may_have_extra_models(more):
    models = [Critic(), Critic()]
    with own_group() as communicator:
        for model in models:
            model.add_module("norm", nn.BatchNorm1d(8))
            if is_odd():
                MORE[more](model, communicator)
            bagua_syncbn.convert_sync_batchnorm(model, communicator, filter=lambda name, _: name != "head")
            if is_odd() and more == "a norm that nothing calls":
                model.forward = model.norm.forward
        train(*models * 3)


@pytest.mark.ranks(2)
def test_long_descriptions_keep_their_ends():
    model = nn.Sequential()
    model.add_module("x" * 1000, nn.BatchNorm1d(8))
    with own_group() as communicator:
        bagua_syncbn.convert_sync_batchnorm(model, communicator)
        if is_odd():
            model[0].eps = 1.0000001e-5
        message = message_of(lambda: train(model))
    assert not Row(says=("call 1; rank 1: ", "eps=1e-05", "eps=1.0000001e-05")).missing_in(message)


def test_a_rank_that_raised_is_described_from_its_header():
    assert describe([0, RAISED, 5]) == "an error, which that rank reports, call 5"


# Probes.

# The most collectives of each step: one for each call and one for each probe.
PROBES = {
    "a step that repeats probes nothing": ([STEP] * 3, [6 + 6, 6 + 1, 6]),
    "nor one that calls a layer twice": (["a a b a b backward"] * 4, [10 + 6, 10 + 1, 10, 10]),
    "a new order probes where it is new": ([STEP] * 3 + ["c a b backward"] * 2, [12, 7, 6, 6 + 4, 6 + 1]),
}


def count_messages(steps, most=CallHistory.most):
    """Returns the number of collectives of each step, and of the stored predictions at the end."""
    counts = []
    with pytest.MonkeyPatch.context() as patch, own_model() as model:
        patch.setattr(CallHistory, "most", most)
        for step in steps:
            with collectives() as counted:
                model.run(step)
            counts.append(counted.total())
        return counts, len(history_in(model.a.process_group).after_step)


@pytest.mark.parametrize("name", PROBES)
def test_each_new_position_in_a_step_is_probed_once(groups, name):
    steps, expected = PROBES[name]
    for counts, _ in groups.run(count_messages, 2, steps):
        assert all(count <= most for count, most in zip(counts, expected, strict=True)), counts


def test_the_number_of_predictions_is_bounded(pool):
    steps = [f"{' '.join(order)} backward" for order in ("abc", "acb", "bac", "bca", "cab", "cba", "abc")]
    for _, kept in pool.run(count_messages, 2, steps, 10):
        assert kept <= 10


# Modes.

# Each import runs in a process that has imported only torch.
IMPORTED_IN_MODES = """
import os, torch
from torch._subclasses.fake_tensor import FakeTensorMode
for mode in (torch.device("meta"), FakeTensorMode(), torch.inference_mode()):
    if os.fork() == 0:
        with mode:
            import bagua_syncbn
            bagua_syncbn.check_ranks()
            assert bagua_syncbn.groups_report() == "no calls of synchronized layers over several ranks"
        from bagua_syncbn import ops
        from bagua_syncbn.reliability.faults import record_of
        record = record_of("any", "cpu")
        rows = torch.stack([ops.batch_norm_stats(torch.ones(4, 2), 5, call) for call in (1, 2)])
        ops.batch_norm_gather_stats(rows, None, None, None, None, 1e-5, record.tensor)
        os._exit(0 if record.kind.value == 1 else 9)
    print(os.wait()[1])
"""


def test_the_package_can_be_imported_in_any_mode():
    ended = subprocess.run([sys.executable, "-c", IMPORTED_IN_MODES], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["0"] * 3, ended.stderr


@pytest.mark.ranks(2)
def test_divergence_is_detected_under_a_default_device():
    with own_model() as model:
        layer = model.c if is_odd() else model.a
        input = torch.randn(4, layer.num_features)
        with torch.device("meta"):
            message = message_of(lambda: layer(input))
    assert "got rank 0: forward of SyncBatchNorm1d 'a'" in message
    assert "rank 1: forward of SyncBatchNorm1d 'c'" in message
