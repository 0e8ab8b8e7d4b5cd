"""Hundreds of ranks, each a thread: they equal one process, and one that differs is named in a short message."""

import pytest
import torch

import bagua_syncbn
from bagua_syncbn.groups import said_by, text_of_ranks
from tests.faults.programs import REFUSED, Model, message_of
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
    """All names with 64 ranks; slow ones with 256 and 1,024."""
    every = [(size, name) for size, names in names_of.items() for name in names]
    return [pytest.param(size, name, marks=pytest.mark.slow if size > 64 else ()) for size, name in every]


@pytest.mark.parametrize(("size", "name"), sized({64: CASES, 256: CASES, 1024: MOST}))
def test_they_equal_one_process(size, name):
    given, also = CASES[name]
    case = Case(tuple(3 * rank % 5 for rank in range(1, size + 1)), (3, 2), **given)
    compare(case, run_threads(size, lambda communicator: run_rank(case, communicator, communicator.rank)), also)


def test_no_message_of_theirs_grows_with_their_number():
    def sent(communicator):
        for _ in range(3):
            run_rank(Case((2,) * communicator.size, (3, 2)), communicator, communicator.rank)
        return communicator.sent[-4:]

    assert run_threads(32, sent)[0] == run_threads(64, sent)[0] != run_threads(31, sent)[0]


def setter(name, value):
    return lambda model, rank: setattr(model.a, name, value)


def refused(model, rank):
    model.spoiled = {"b": REFUSED["int64"]}


A, B = "'a' of Model (8", "'b' of Model (8"
EPS = f"{A} channels, float32, eps="
# What one rank does in the second of three steps, the words for it, and those for all others.
ONE = {
    "another option": (
        setter("eps", 1e-3),
        "abc<",
        f"forward of SyncBatchNorm1d {EPS}0.001",
        f"forward of SyncBatchNorm1d {EPS}1e-05",
    ),
    "another order": (None, "bac<", f"forward of SyncBatchNorm1d {B}", f"forward of SyncBatchNorm1d {A}"),
    "a layer more": (None, "aabc<", f"forward of SyncBatchNorm1d {A}", f"forward of SyncBatchNorm1d {B}"),
    "a layer less": (None, "ab<", "backward of SyncBatchNorm1d 'b'", "forward of SyncBatchNorm1d 'c'"),
    "an error": (refused, "abc<", "TypeError in SyncBatchNorm1d 'b', call 8: ", f"forward of SyncBatchNorm1d {B}"),
}


def told(size, change, program, differs):
    """Returns for each rank its messages, and what it has sent since the first step, from which on ranks differ."""

    def run(communicator):
        model, messages, rank = bagua_syncbn.convert_sync_batchnorm(Model(), communicator), [], communicator.rank
        model.run("abc<")
        before = len(communicator.sent)
        for step in range(2):
            is_other = step == 0 and differs(rank)
            if is_other and change is not None:
                change(model, rank)
            messages.append(message_of(lambda other=is_other: model.run(program if other else "abc<")))
        return [message for message in messages if message != "finished"], communicator.sent[before:]

    return run_threads(size, run)


@pytest.mark.parametrize(("size", "name"), sized({64: ONE, 1024: ONE}))
def test_one_that_differs_is_named_in_a_short_message(size, name):
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
def test_many_that_differ_make_no_long_message(size):
    def change(model, rank):
        model.a.eps = 1 / (1 + rank)

    message = told(size, change, "abc<", lambda rank: True)[size - 1][0][0]
    assert [f"rank {rank}: " in message for rank in range(size)] == [rank < 7 for rank in range(size)]
    assert message.endswith(f"; ranks 7-{size - 1}: others")
    assert len(message) < 1500


@pytest.mark.parametrize(("ranks", "text"), [
    ([3], "rank 3"),
    ([0, 1], "ranks 0, 1"),
    ([0, 1, 2, 4, 6, 7], "ranks 0-2, 4, 6, 7"),
    ([*range(512), *range(513, 1024)], "ranks 0-511, 513-1023"),
    (range(0, 1024, 8), "ranks 0, 8, 16, 24, 32, 40, 48, 56 and 120 more"),
])  # fmt: skip
def test_ranks_are_named_by_their_runs(ranks, text):
    assert text_of_ranks(ranks) == text


def test_what_ranks_say_is_told_once():
    said = "aabbacdefghij"
    assert said_by(enumerate(said[:8])) == [
        *(("ranks 0, 1, 4", "a"), ("ranks 2, 3", "b")),
        *(("rank 5", "c"), ("rank 6", "d"), ("rank 7", "e")),
    ]
    assert said_by(enumerate(said))[-2:] == [("rank 9", "g"), ("ranks 10-12", "others")]
    assert said_by([]) == []
