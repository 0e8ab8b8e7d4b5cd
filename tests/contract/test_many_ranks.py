"""Hundreds of ranks, as threads: results equal one process, and errors stay short."""

import pytest
import torch

import bagua_syncbn
from tests.faults.programs import REFUSED, STEP, Model, message_of
from tests.helpers.cases import Case, compare, run_rank
from tests.helpers.threads import run_threads

pytestmark = pytest.mark.usefixtures("single_threaded")

# By name, and by how much results may be off beside their own rounding: the mean of 1e4 deviations is rounded too, and
# an error of it is one of each value, in deviations.
FAR = {"mean": 1e4, "std": 1.0}
CASES = {
    "float16": ({"dtype": torch.float16, "mean": 5.0}, 0),
    "bfloat16": ({"dtype": torch.bfloat16, "parameter_dtype": torch.float32}, 0),
    "float32": ({"options": {"momentum": None}, "residual": True}, 0),
    "float64": ({"dtype": torch.float64, "masks": "lengths"}, 0),
    "masks": ({"dtype": torch.float16, "masks": "random", "zero_masked": True}, 0),
    "one rank is not padding": ({"masks": "padded rank"}, 0),
    "a mean of 1e4 deviations": (FAR, 1e-2),
    "a mean of 1e4 deviations in float64": (FAR | {"dtype": torch.float64}, 1e-9),
}
MOST = ("masks", "float64", "a mean of 1e4 deviations")  # with 1,024 ranks, some seconds each


def sized(names_of):
    """Yields all names for 64 ranks; more ranks are slow tests."""
    every = [(size, name) for size, names in names_of.items() for name in names]
    return [pytest.param(size, name, marks=pytest.mark.slow if size > 64 else ()) for size, name in every]


@pytest.mark.parametrize(("size", "name"), sized({64: CASES, 256: CASES, 1024: MOST}))
def test_hundreds_of_ranks_equal_one_process(size, name):
    given, also = CASES[name]
    case = Case(tuple(3 * rank % 5 for rank in range(1, size + 1)), (3, 2), **given)
    compare(case, run_threads(size, lambda communicator: run_rank(case, communicator, communicator.rank)), also)


def test_messages_do_not_grow_with_the_number_of_ranks():
    def sent(communicator):
        for _ in range(3):
            run_rank(Case((2,) * communicator.size, (3, 2)), communicator, communicator.rank)
        return communicator.sent[-4:]

    assert run_threads(32, sent)[0] == run_threads(64, sent)[0] != run_threads(31, sent)[0]


def setter(name, value):
    return lambda model, rank: setattr(model.a, name, value)


def refused(model, rank):
    model.calls = {"b": REFUSED["int64"]}


A, B = "'a' of Model (8", "'b' of Model (8"
EPS = f"{A} channels, float32, eps="
# What one rank does in the second of three steps, the words for it, and those for all others.
ONE = {
    "another option": (
        setter("eps", 1e-3),
        STEP,
        f"forward of SyncBatchNorm1d {EPS}0.001",
        f"forward of SyncBatchNorm1d {EPS}1e-05",
    ),
    "another order": (None, "b a c backward", f"forward of SyncBatchNorm1d {B}", f"forward of SyncBatchNorm1d {A}"),
    "a layer more": (None, "a a b c backward", f"forward of SyncBatchNorm1d {A}", f"forward of SyncBatchNorm1d {B}"),
    "a layer less": (None, "a b backward", "backward of SyncBatchNorm1d 'b'", "forward of SyncBatchNorm1d 'c'"),
    "an error": (refused, STEP, "TypeError in SyncBatchNorm1d 'b', call 8: ", f"forward of SyncBatchNorm1d {B}"),
}


def told(size, change, program, differs):
    """Returns the errors of each rank, and its messages after the first step."""

    def run(communicator):
        model, messages, rank = bagua_syncbn.convert_sync_batchnorm(Model(), communicator), [], communicator.rank
        model.run(STEP)
        before = len(communicator.sent)
        for step in range(2):
            is_other = step == 0 and differs(rank)
            if is_other and change is not None:
                change(model, rank)
            messages.append(message_of(lambda other=is_other: model.run(program if other else STEP)))
        return [message for message in messages if message != "finished"], communicator.sent[before:]

    return run_threads(size, run)


@pytest.mark.parametrize(("size", "name"), sized({64: ONE, 1024: ONE}))
def test_a_short_message_names_the_one_diverging_rank(size, name):
    change, program, own, others = ONE[name]
    odd = size // 2 + 1
    results = told(size, change, program, lambda rank: rank == odd)
    message = results[0][0][0]
    assert f"ranks 0-{odd - 1}, {odd + 1}-{size - 1}: {others}" in message
    assert f"; rank {odd}: {own}" in message
    assert len(message) < 500
    for rank, (messages, sent) in enumerate(results):
        # The rank that has an error shows it, and goes on to its next call.
        assert messages[name == "an error" and rank == odd] == message
        # The calls that agree, the one that does not, and the texts: a single message that grows with their number.
        assert len(sent) <= 6
        assert sent[-1] == ("gather", 4 * 480)


@pytest.mark.parametrize("size", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_the_message_stays_short_if_many_ranks_diverge(size):
    def change(model, rank):
        model.a.eps = 1 / (1 + rank)

    message = told(size, change, STEP, lambda rank: True)[size - 1][0][0]
    assert [f"rank {rank}: " in message for rank in range(size)] == [rank < 7 for rank in range(size)]
    assert f"; ranks 7-{size - 1}: others; " in message
    assert len(message) < 1500
