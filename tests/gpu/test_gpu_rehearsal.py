"""The tests for a GPU, and what measures one, without a GPU: on CPU tensors that stand for its own, see :mod:`card`.

This is no run on a GPU. What can fail here is what the tests say in Python, and the values of the kernels; there, all
else can fail.
"""

import shutil
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import FunctionType, SimpleNamespace

import clock
import measure
import preflight
import pytest
import small_ops
import summary
import targets
import test_gpu_layers
import test_gpu_ops
import torch
import torch.distributed as dist
from card import CARD, PROPERTIES, on_card
from emulated import find_headers, load_library
from prove import read_cases
from test_gpu_layers import nccl  # noqa: F401  a fixture

pytestmark = [
    pytest.mark.skipif(
        find_headers() is None or shutil.which("g++") is None, reason="needs g++ and the headers of the CUDA toolkit"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run there"),
]


@pytest.fixture(scope="module", autouse=True)
def card(library):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what the programs and other tests do to it too
    with on_card(library.ops, library.emulate_stream) as here:
        yield here
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def one_sample(monkeypatch):
    """Of each image, and 64 channels at most: the emulator takes a tenth of a second for a million values, and as much
    for 500 blocks. What was split is split still."""

    def tensors(shape, *options):
        return made((1, min(shape[1], 64), *shape[2:]) if len(shape) == 4 else shape, *options)

    made = test_gpu_ops.tensors
    monkeypatch.setattr(test_gpu_ops, "tensors", tensors)


def run_on_card(path, function, *args):
    library = load_library(path)
    with on_card(library.ops, library.emulate_stream):
        return function(*args)


@pytest.fixture
def pool(pool, library):
    """Ranks that all have the card."""
    return SimpleNamespace(run=lambda function, size, *args: pool.run(run_on_card, size, library.path, function, *args))


# The card


def test_tensors_here_and_there_do_not_mix(card):
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    assert {t.device for t in (there, there + there, there[1:], here.cuda(), torch.zeros_like(there))} == {CARD}
    assert {t.device for t in (here, here + here, there.cpu(), there.to("cpu", torch.float64))} == {torch.device("cpu")}
    assert (there + torch.tensor(2.0)).tolist() == [3, 3, 3]
    for call in (lambda: there + here, lambda: torch.equal(there, here), lambda: torch.stack([here, there])):
        with pytest.raises(RuntimeError, match="on the same device"):
            call()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    x = here.requires_grad_()
    (x.cuda() * there).sum().backward()
    assert x.grad.device == torch.device("cpu")


def test_a_graph_does_nothing_until_it_is_replayed():
    total, value = torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = value * 2
        total.add_(doubled)
    assert total.tolist() == [0, 0]
    for step in (1, 2):
        graph.replay()
        assert total.tolist() == [2 * step] * 2
    value.fill_(5)
    graph.replay()
    assert (doubled.tolist(), total.tolist()) == ([10, 10], [14, 14])


def test_what_waits_is_refused_where_it_is_forbidden():
    there = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in (lambda: there.sum().item(), there.cpu, lambda: torch.ones(3).cuda()):
            with pytest.raises(RuntimeError, match="synchronizing"):
                call()
        torch.ones(3).pin_memory().cuda(non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="capturing"):
        there.sum().item()


# What measures


def test_measuring(card, monkeypatch, tmp_path):
    """On the one rank of a job of its own: before the tests of layers start theirs."""
    output, codes = tmp_path / "cases.jsonl", []
    monkeypatch.setattr(measure.os, "_exit", codes.append)
    monkeypatch.setattr(clock, "_SAMPLES", 3)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--dry-run", "--output", str(output)])
    try:
        measure.main()
    finally:
        dist.destroy_process_group()
    cases = read_cases(output)
    results = {"machine": {"l2_bytes": PROPERTIES.L2_cache_size}, "parts": [], "cases": cases}
    assert targets.of_kind(results, "error") == []
    assert (codes, cases[-1]) == ([0], {"kind": "end", "left_out": 0, "errors": 0})
    assert [case["disagreements"] for case in targets.of_kind(results, "ops")] == [[]] * 18
    for what in ("kernels", "collectives", "waits"):
        assert [t.met for t in targets.judge(results) if t.what.startswith(what)] == [True, True], what
    assert "MISSED" in summary.full(results)


def test_small_ops(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["small_ops.py"])
    with pytest.raises(SystemExit) as end:
        small_ops.main()
    assert end.value.code == 0, capsys.readouterr().out


def test_what_preflight_asks_of_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    facts, missing = preflight.examine_torch()
    assert missing == []
    assert (facts["architecture"], facts["nccl"], facts["l2_bytes"]) == ("90", "2.28.9", PROPERTIES.L2_cache_size)


# The tests, but for the one of what was built

for _module in (test_gpu_ops, test_gpu_layers):
    globals().update({name: test for name, test in vars(_module).items() if name.startswith("test_")})
del test_the_library_has_cuda_kernels  # noqa: F821


def _on_one_gpu(test):
    """The test of replicas with the last of each of its parameters: those for a CPU run them all."""
    twin = FunctionType(test.__code__, test.__globals__, test.__name__)
    marks = {mark.args[0]: list(mark.args[1])[-1:] for mark in test.pytestmark if mark.name == "parametrize"}
    twin.pytestmark = [pytest.mark.parametrize(*mark).mark for mark in (marks | {"place": ["one GPU"]}).items()]
    return twin


for _path in Path(__file__).parents[1].glob("data_parallel/test_data_parallel_*.py"):
    for _name, _test in vars(import_module(_path.stem)).items():
        if _name.startswith("test_") and "place" in signature(_test).parameters:
            globals()[_name] = _on_one_gpu(_test)
# Where a gradient is undefined autograd makes zeros of its own, without a mark.
del test_gradients_are_those_of_finite_differences, test_a_replica_that_is_partly_outside_of_the_graph  # noqa: F821
