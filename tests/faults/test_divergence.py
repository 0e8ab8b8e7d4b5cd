"""Ranks that do not make the same calls: each row ends right, or with an error on all ranks that names what they did.

The table in docs/reliability.md is about these rows.
"""

import copy
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua_syncbn
from bagua_syncbn import ops
from bagua_syncbn.agreement.history import history_in
from bagua_syncbn.agreement.signatures import RAISED, describe
from bagua_syncbn.communicators import LOCAL, shared
from tests.faults import programs
from tests.faults.programs import REFUSED, Change, Model, is_odd, message_of, own_group, own_model, run
from tests.helpers.replicated import parallel


@dataclass(frozen=True)
class Row:
    """Calls of the last rank, ``program`` in place of ``base`` after ``change``, and words of the errors."""

    program: str = "abc<"
    change: Change | None = None
    told: tuple[str, ...] = ()  # in the error of each rank
    base: str = "abc<"
    prepare: Change | None = None  # on all ranks


def setter(layer, name, value):
    def change(model: Model) -> None:
        setattr(getattr(model, layer), name, value)

    return change


def exchange(first, second):
    def change(model: Model) -> None:
        one, other = getattr(model, first), getattr(model, second)
        setattr(model, first, other)
        setattr(model, second, one)

    return change


def other_channels(model: Model) -> None:
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.ones(10)
        setattr(model.b, name, nn.Parameter(value) if name in ("weight", "bias") else value)
    model.b.num_features = 10


def made_by_hand(model: Model) -> None:
    model.a = bagua_syncbn.SyncBatchNorm1d(8, process_group=model.a.process_group)


def by_a_function(model: Model) -> None:
    def normalize(layer: nn.Module, x: Tensor) -> Tensor:
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        return bagua_syncbn.sync_batch_norm(x, *tensors, process_group=layer.process_group)

    model.spoiled = {"a": normalize}


def attribute(name, value):
    return lambda model: setattr(model, name, value)


# Named at once: "forward of SyncBatchNorm1d 'a'" and so on.
A, B, C = "'a' of Model (8", "'b' of Model (8", "'c' of Model (12"
NAMED = {
    # other order, other branch, more or fewer calls
    "two layers of equal size swapped": Row("bac<", told=(A, B)),
    "two layers of other sizes swapped": Row("cba<", told=(A, C)),
    "the objects swapped": Row(change=exchange("a", "b"), told=(A, B)),
    "another branch of equal size": Row("abb<", told=(B, C)),
    "first layer skipped": Row("bc<", told=(A, B)),
    "layer skipped": Row("ac<", told=(B, C)),
    "last layer skipped": Row("ab<", told=(C, "backward of", B)),
    "all but one skipped": Row("c<", told=(A, C)),
    "first layer twice": Row("aabc<", told=(A, B)),
    "another call after one that others of another size follow": Row("abac<", base="aabac<", told=(A, B)),
    "last layer twice": Row("abcc<", told=("forward of", "backward of", C)),
    "two forwards before a backward": Row("abcabc<", told=("forward of", "backward of", A, C)),
    "backward in parts": Row("ab<c<", told=("backward of", "forward of", B, C)),
    "backward in another order": Row("abc>", told=("backward of", A, C)),
    "two backward passes of a layer in another order": Row(
        "aa>", base="aa<", told=("backward of", A, "of the forward in call")
    ),
    "double backward in another order": Row("abv", base="ab^", told=("double backward of", A, B)),
    "no backward": Row("abc", told=("backward of", C, "forward of", A)),
    "no backward of one layer's input": Row(change=attribute("no_gradient_for", "b"), told=("backward of", A, B)),
    "no backward of the first input": Row(change=attribute("no_gradient_for", "a"), told=("backward of", A)),
    "torch.no_grad": Row(change=attribute("grad", False), told=("backward of", C, "forward of", A)),
    # evaluation
    "evaluation of a layer": Row(change=lambda model: model.b.eval(), told=(B, C)),
    "evaluation of the last layer": Row(change=lambda model: model.c.eval(), told=(C, "backward of", B)),
    "frozen statistics of a layer": Row(change=lambda model: bagua_syncbn.freeze_statistics(model.b), told=(B, C)),
    # exceptions that are swallowed
    "exception between two layers": Row("a!", told=(A, B)),
    "exception before backward": Row("abc!", told=("backward of", C, "forward of", A)),
    "exception in backward, first": Row(change=attribute("raises_in_backward", "c"), told=("backward of", C, A)),
    # terms
    "other eps": Row(change=setter("a", "eps", 1e-3), told=("eps=1e-05", "eps=0.001", A)),
    "other momentum": Row(change=setter("b", "momentum", 0.2), told=("momentum=0.1", "momentum=0.2", B)),
    "momentum=None": Row(change=setter("b", "momentum", None), told=("momentum=0.1", "momentum=None", B)),
    "momentum=None where others have 0": Row(
        prepare=setter("b", "momentum", 0.0),
        change=setter("b", "momentum", None),
        told=("momentum=0.0", "momentum=None", B),
    ),
    "momentum=-2 where others have -1": Row(
        prepare=setter("b", "momentum", -1), change=setter("b", "momentum", -2), told=("momentum=-1", "momentum=-2", B)
    ),
    "untracked statistics": Row(change=setter("b", "track_running_stats", False), told=(B, "untracked")),
    "averages over other numbers of batches": Row(
        change=lambda model: model.b.num_batches_tracked.add_(2),
        prepare=setter("b", "momentum", None),
        told=("momentum=None", B, "num_batches_tracked="),
    ),
    "other eps_mode": Row(change=setter("a", "eps_mode", "clamp"), told=("eps_mode=clamp", A)),
    "other skip_nonfinite": Row(change=setter("a", "skip_nonfinite", True), told=("skip_nonfinite", A)),
    "float64": Row(change=nn.Module.double, told=("float32", "float64", A)),
    "other number of channels": Row(change=other_channels, told=("8 channels", "10 channels", "'b'")),
    "a layer made by hand": Row(change=made_by_hand, told=(A, "SyncBatchNorm1d (8")),
    "a functional call": Row(change=by_a_function, told=(A, "sync_batch_norm (8")),
}  # fmt: skip

# Nothing is sent that others could compare: they wait until the time-out.
ABSENT = {
    "evaluation of the model": Row(change=nn.Module.eval, told=(A,)),
    "frozen statistics of the model": Row(change=bagua_syncbn.freeze_statistics, told=(A,)),
    "step left out": Row("", told=(A,)),
    "exception before the first layer": Row("!", told=(A,)),
    "last step ends early": Row("ab", told=("of SyncBatchNorm1d 'c'",)),
}


def refused_in_evaluation(model: Model) -> None:
    message_of(lambda: model.a.eval()(torch.ones(2, 9)))
    model.a.train()


LEGITIMATE = {
    "the same": Row(),
    "statistics that all freeze": Row(
        "ac<", base="ac<", prepare=lambda model: bagua_syncbn.freeze_statistics(model.b), change=nn.Module.train
    ),
    "a momentum of another type": Row(prepare=setter("b", "momentum", 0.0), change=setter("b", "momentum", False)),
    "a momentum of -0.0": Row(prepare=setter("b", "momentum", 0), change=setter("b", "momentum", -0.0)),
    "a bias of another dtype": Row(change=setter("a", "bias", nn.Parameter(torch.zeros(8, dtype=torch.float64)))),
    "an activation": Row(change=setter("a", "fused_activation", "relu")),
    "no affine": Row(change=setter("a", "bias", None)),
    "a layer that is not synchronized, evaluated": Row(change=lambda model: nn.BatchNorm1d(8).eval()(torch.ones(2, 8))),
    "an error in evaluation": Row(change=refused_in_evaluation),
    "an error in replicas": Row(change=lambda model: message_of(lambda: parallel(model.a, "cpu", 2)(torch.ones(4, 8)))),
    "a frozen weight": Row(change=lambda model: model.a.weight.requires_grad_(False)),
    "a layer called twice on all ranks": Row("aab<", base="aab<"),
    "calls that repeat": Row("aabb<ab<", base="aabb<ab<"),
    "no backward on all ranks": Row("abc", base="abc"),
    "calls beyond the last number": Row(
        prepare=lambda model: setattr(history_in(model.a.process_group), "calls", ops.WORD - 7)
    ),
    "backward in parts on all ranks": Row("ab>c<", base="ab>c<"),
}

ROWS = NAMED | ABSENT | LEGITIMATE


def run_row(name, when, timeout):
    row = ROWS[name]
    return run(row.base, row.program, row.change, when, timeout, row.prepare)


ALWAYS_WITH_3 = ("two layers of equal size swapped", "two layers of other sizes swapped", "layer skipped", "other eps")


def cases(rows):
    """All rows with two ranks, from the first step on and from the second; with more mostly if there is time."""
    for name in rows:
        for ranks, when in ((2, 0), (2, 1), (3, 1), (4, 1)):
            slow = ranks > 2 and name not in ALWAYS_WITH_3
            yield pytest.param(name, ranks, when, marks=pytest.mark.slow if slow or ranks == 4 else ())


def ranks_named_in(message):
    """Returns the ranks of each text, as in "got ranks 0-2, 5: ...; rank 3: ..."."""
    named = []
    for runs in re.findall(r"(?:, got|;) ranks? ([\d, -]+): ", message):
        ends = ([int(end) for end in run.split("-")] for run in runs.split(", "))
        named.append([rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1)])
    return named


@pytest.mark.parametrize(("name", "ranks", "when"), list(cases(NAMED)))
def test_a_divergence_is_named_on_all_ranks(groups, name, ranks, when):
    for message in groups.run(run_row, ranks, name, when, 300.0):
        assert "expected all ranks of a group to call the same layers" in message
        named = ranks_named_in(message)
        assert len(named) > 1
        assert sorted(rank for each in named for rank in each) == list(range(ranks))
        for told in NAMED[name].told:
            assert told in message


def run_row_where_no_host_looks(name, late=0, timeout=300.0):
    row = NAMED[name]
    return programs.run_where_no_host_looks(row.base, row.program, row.change, row.prepare, late, timeout)


@pytest.mark.parametrize("name", NAMED)
def test_where_no_host_looks_a_divergence_is_named_and_the_group_sends_no_more(groups, name):
    for message, again, sent in groups.run(run_row_where_no_host_looks, 2, name):
        assert "expected all ranks of a group to call the same layers" in message
        assert "expected all ranks of a group" in again or "got one that failed before" in again
        assert sent == 0


@pytest.mark.parametrize("name", NAMED)
def test_ranks_that_find_out_late_send_no_messages_of_other_sizes(groups, name):
    """Another backend may end the process then, where shared memory raises."""
    for message, again, _ in groups.run(run_row_where_no_host_looks, 2, name, 4, 1.0):
        assert "to send alike" not in message + again
        assert again != "finished"


@pytest.mark.slow
@pytest.mark.parametrize("name", ABSENT)
def test_ranks_that_wait_for_one_say_where(pool, name):
    waiting, absent = pool.run(run_row, 2, name, 2, 10.0)
    assert absent == "finished"
    assert "sync_batch_norm: collective failed in the" in waiting
    for told in ABSENT[name].told:
        assert told in waiting


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_differences_are_not_refused(pool, name):
    assert pool.run(run_row, 2, name, 1, 300.0) == ["finished"] * 2


@pytest.mark.ranks(2)
def test_a_call_that_is_refused_before_the_first_message_is_told_to_nobody():
    with own_model() as model:
        if is_odd():
            message_of(lambda: model.a(torch.ones(4, 8, dtype=torch.int64)))
        model.a(torch.randn(4, 8))
        assert model.a.num_batches_tracked == 1


@pytest.mark.parametrize("momentum", [1.0, None])
def test_a_rank_that_falls_back_from_compiled_code_is_no_other(groups, momentum):
    for running_mean in groups.run(programs.run_partly_compiled, 2, momentum):
        assert running_mean.tolist() == [0.5] * 8


@pytest.mark.ranks(2)
def test_ranks_go_on_in_compiled_code_after_a_call_that_all_are_refused():
    with own_group() as communicator:
        model = bagua_syncbn.convert_sync_batchnorm(Judge(nn.BatchNorm1d(8)), communicator)
        for call, channels in ((model, 8), (model, 7), (torch.compile(model, backend="eager"), 8), (model, 8)):
            message = message_of(lambda call=call, channels=channels: call(torch.randn(4, channels)))
            assert (message == "finished") is (channels == 8)
        assert model[0].num_batches_tracked == 3


BESIDE = {"bac<": (A, B), "cab<": (A, C), "abc>": ("backward of", C), "ac<": (B, C), "abc<": ("finished",)}


class Critic(nn.Sequential):
    pass


class Judge(nn.Sequential):
    pass


def run_beside_compiled(program):
    """Steps of a compiled model and one that is not, of which the last rank runs another program from the second on."""
    with own_group() as communicator:
        model = bagua_syncbn.convert_sync_batchnorm(Model(), communicator)
        judge = bagua_syncbn.convert_sync_batchnorm(Judge(nn.BatchNorm1d(8)), communicator)
        compiled = torch.compile(judge, backend="eager")

        def run_steps():
            for step in range(3):
                compiled(torch.randn(4, 8, requires_grad=True)).sum().backward()
                model.run(program if step and is_odd() else "abc<")

        return message_of(run_steps)


@pytest.mark.parametrize("program", BESIDE)
def test_a_compiled_model_takes_nothing_from_other_models(pool, program):
    first, second = pool.run(run_beside_compiled, 2, program)
    assert (first == "finished") is (program == "abc<") is (second == "finished")
    for told in BESIDE[program]:
        assert told in first + second


# Backends abort where sizes differ, as from the first call on; shared memory does not.
@pytest.mark.ranks(3)
@pytest.mark.parametrize("calls", [2, *[0] * (not shared.problem())])
def test_a_rank_that_compiles_beside_others_is_named(calls):
    with own_group() as communicator:
        model = bagua_syncbn.convert_sync_batchnorm(Judge(nn.BatchNorm1d(8)), communicator)
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


def test_compiled_models_that_differ_are_found_out(groups):
    for messages in groups.run(programs.run_compiled, 2):
        assert len(messages) == 2
        assert all("expected all ranks of a group to call the same layers" in message for message in messages)


@pytest.mark.ranks(2)
def test_a_fault_in_one_group_is_told_in_no_other():
    with own_group() as first, own_group() as second:
        judge = bagua_syncbn.convert_sync_batchnorm(Judge(nn.BatchNorm1d(8)), first)
        alike, beside = (bagua_syncbn.SyncBatchNorm(8, process_group=group) for group in (first, second))
        if is_odd():
            judge[0].eps = 1e-3
        # Compiled calls leave what the op has found to the next eager call: as another thread that is late would.
        assert torch.compile(judge, backend="eager")(torch.randn(4, 8)).isnan().all()
        for _ in range(2):
            beside(torch.randn(4, 8, requires_grad=True)).square().sum().backward()
        assert "expected all ranks of a group to call the same layers" in message_of(lambda: alike(torch.randn(4, 8)))


@pytest.mark.ranks(2)
def test_backward_passes_of_the_first_two_calls_of_a_group_are_told_apart():
    with own_model() as model:
        message = message_of(lambda: model.run("aa>" if is_odd() else "aa<"))
    assert "call 3, of the forward in call 2; rank 1: " in message
    assert message.endswith("call 3, of the forward in call 1")


@pytest.mark.ranks(2)
def test_a_group_in_which_ranks_differed_is_not_used_again():
    with own_model() as model:
        first, second = (message_of(lambda: model.call("b" if is_odd() else "a")) for _ in range(2))
    assert "'a'" in first
    assert "'b'" in first
    assert "process_group: expected one that works, got one that failed before, in the forward of" in second


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_on_one_rank_is_told_to_all(groups, kind):
    *waiting, refused = groups.run(programs.run_refused, 3 if kind == "int64" else 2, kind, False)
    assert kind in refused[0]
    assert "got one that failed before" not in refused[0]
    for told in (*(messages[0] for messages in waiting), refused[1]):
        assert "expected all ranks of a group to call the same layers" in told
        assert "Error in SyncBatchNorm1d 'b', call 8: " in told
        assert kind in told
        assert B in told
    assert all("got one that failed before" in messages[-1] for messages in waiting)


def test_an_error_in_backward_is_told_to_all(pool):
    for first, told in pool.run(programs.run_failing_backward, 2):
        assert first == "finished"
        assert "in a backward pass" in told


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["merge_stats", "batch_norm_backward_elemt"])
def test_an_error_between_a_message_and_its_check_is_told_to_all(op):
    def fail(*_, **__):
        raise MemoryError("in a step")

    with own_model() as model, pytest.MonkeyPatch.context() as patch:
        model.run("abc<")
        if is_odd():
            patch.setattr(ops, op, fail)
        message = message_of(lambda: model.run("abc<"))
        dist.barrier()  # the end of the group would tell too
    assert ("in a step" if is_odd() else "has left") in message


@pytest.mark.ranks(2)
def test_an_error_in_a_second_derivative_is_told_to_all():
    def fail(*_):
        raise MemoryError("in a second derivative")

    input = torch.randn(4, 8, requires_grad=True)
    with own_group() as communicator, pytest.MonkeyPatch.context() as patch:
        layer = bagua_syncbn.SyncBatchNorm(8, process_group=communicator)
        for fails in (False, True):
            (grad,) = torch.autograd.grad(layer(input).square().sum(), input, create_graph=True)
            if fails and is_odd():
                patch.setattr(ops, "per_channel", fail)
            message = message_of(grad.square().sum().backward)
            assert ("in a second derivative" in message) is fails


@pytest.mark.parametrize("kind", REFUSED)
def test_ranks_go_on_after_a_call_that_all_are_refused(pool, kind):
    for (message,) in pool.run(programs.run_refused, 2, kind, True):
        assert kind in message


# Two models that look alike, what the last rank calls in the third of three steps, and what the error says of it.
SWAPPED = {
    "models of two classes": (
        "forward of SyncBatchNorm1d '0' of Critic (8",
        "forward of SyncBatchNorm1d '0' of Judge (8",
    ),
    "models of one class": ("'0' of Critic (8", "'0' of Critic #2 (8"),
    "a model and its copy": ("'0' of Critic (8", "'0' of Critic #2 (8"),
    "layers made by hand": ("forward of SyncBatchNorm1d (8", "forward of SyncBatchNorm1d #2 (8"),
}


def steps_of(*steps):
    for step in steps:
        for module in step:
            module(torch.randn(4, 8, requires_grad=True)).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SWAPPED)
def test_models_that_look_alike_are_told_apart(kind):
    with own_group() as communicator:
        first, second = Critic(nn.BatchNorm1d(8)), (Judge if "two classes" in kind else Critic)(nn.BatchNorm1d(8))
        for model in (first, second):
            bagua_syncbn.convert_sync_batchnorm(model, communicator)
        if kind == "a model and its copy":
            second = copy.deepcopy(first)
        if kind == "layers made by hand":
            first, second = (bagua_syncbn.SyncBatchNorm1d(8, process_group=communicator) for _ in range(2))
        usual, swapped = [first, second], [second, first]
        message = message_of(lambda: steps_of(usual, usual, swapped if is_odd() else usual))
    for told in SWAPPED[kind]:
        assert told in message


# The last rank has, besides the model that all train: more models, of which it trains none in this group.
MORE = {
    "a norm that nothing calls": lambda model, _: model.add_module("unused", nn.BatchNorm1d(8)),
    "a head of its own": lambda model, _: model.add_module(
        "head", bagua_syncbn.SyncBatchNorm1d(8, process_group=LOCAL)
    ),
    "a model converted before": lambda model, communicator: bagua_syncbn.convert_sync_batchnorm(
        Critic(nn.BatchNorm1d(8)), communicator
    ),
    "a copy that it evaluates": lambda model, communicator: copy.deepcopy(
        bagua_syncbn.convert_sync_batchnorm(model, communicator)
    ).eval()(torch.ones(2, 8)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", MORE)
def test_a_rank_may_have_more_than_the_others(more):
    models = [Critic(), Critic()]
    with own_group() as communicator:
        for model in models:
            model.add_module("norm", nn.BatchNorm1d(8))
            if is_odd():
                MORE[more](model, communicator)
            bagua_syncbn.convert_sync_batchnorm(model, communicator, filter=lambda name, _: name != "head")
            if is_odd() and more == "a norm that nothing calls":
                model.forward = model.norm.forward
        steps_of(*[models] * 3)


@pytest.mark.ranks(2)
def test_long_texts_differ_in_what_they_end_in():
    model = nn.Sequential()
    model.add_module("x" * 1000, nn.BatchNorm1d(8))
    with own_group() as communicator:
        bagua_syncbn.convert_sync_batchnorm(model, communicator)
        if is_odd():
            model[0].eps = 1.0000001e-5
        message = message_of(lambda: steps_of([model]))
    for told in ("call 1; rank 1: ", "eps=1e-05", "eps=1.0000001e-05"):
        assert told in message


# Collectives of each step: one for each call and one for each probe.
PROBES = {
    "a step that repeats probes nothing": (["abc<"] * 3, [6 + 6, 6 + 1, 6]),
    "nor one that calls a layer twice": (["aabab<"] * 4, [10 + 6, 10 + 1, 10, 10]),
    "a new order probes where it is new": (["abc<"] * 3 + ["cab<"] * 2, [12, 7, 6, 6 + 4, 6 + 1]),
}


@pytest.mark.parametrize("name", PROBES)
def test_a_call_is_probed_once_in_each_new_place_of_a_step(groups, name):
    steps, expected = PROBES[name]
    for counts, _ in groups.run(programs.count_messages, 2, steps, 2**14):
        assert counts == expected


def test_predictions_are_limited_in_number(pool):
    steps = [f"{order}<" for order in ("abc", "acb", "bac", "bca", "cab", "cba", "abc")]
    for _, remembered in pool.run(programs.count_messages, 2, steps, 10):
        assert remembered <= 10


def test_a_rank_that_raised_is_described_where_no_texts_are_exchanged():
    assert describe([0, RAISED, 5]) == "an error of its own, which it shows, call 5"


# Each import in a process of its own, of one that has imported torch.
IMPORTED_IN_MODES = """
import os, torch
from torch._subclasses.fake_tensor import FakeTensorMode
for mode in (torch.device("meta"), FakeTensorMode(), torch.inference_mode()):
    if os.fork() == 0:
        with mode:
            import bagua_syncbn
            bagua_syncbn.check_ranks()
        from bagua_syncbn import ops
        from bagua_syncbn.agreement.faults import record_of
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
def test_ranks_under_a_default_device_find_out_that_they_differ():
    with own_model() as model:
        layer = model.c if is_odd() else model.a
        input = torch.randn(4, layer.num_features)
        with torch.device("meta"):
            message = message_of(lambda: layer(input))
    assert "got rank 0: forward of SyncBatchNorm1d 'a'" in message
    assert "rank 1: forward of SyncBatchNorm1d 'c'" in message
