"""The tests for a GPU, and what measures one, without a GPU: on CPU tensors that stand for its own, see :mod:`card`.

This is no run on a GPU. What can fail here is what the tests say in Python, and the values of the kernels.
"""

import shutil
import sys

import pytest
import test_gpu_layers
import test_gpu_ops
import torch
import torch.distributed as dist
from card import on_card
from emulated import find_headers
from test_gpu_layers import nccl  # noqa: F401  a fixture

from benchmarks.gpu import measure, report, timer
from benchmarks.gpu.prove import read_cases

pytestmark = [
    pytest.mark.skipif(find_headers() is None or shutil.which("g++") is None, reason="needs g++ and CUDA's headers"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run there"),
]


@pytest.fixture(scope="module", autouse=True)
def card(library):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what the programs do to it too
    library.emulate_stream(0, 0, False)
    with on_card(library.ops):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def one_sample(monkeypatch):
    """Of each image, and 16 channels and 40000 values a row at most: emulated, a million values take 0.1 s."""

    def small(shape, *options):
        sizes = [min(size, 40000) for size in shape]
        return made((1, min(sizes[1], 16), *sizes[2:]) if len(shape) == 4 else sizes, *options)

    made = test_gpu_ops.tensors
    monkeypatch.setattr(test_gpu_ops, "tensors", small)


@pytest.mark.slow
def test_measuring(monkeypatch, tmp_path):
    """On the one rank of a job of its own: before the tests of layers start theirs."""
    output, codes = tmp_path / "cases.jsonl", []
    monkeypatch.setattr(measure.os, "_exit", codes.append)
    monkeypatch.setattr(timer, "_MOST", 3)
    monkeypatch.setattr(sys, "argv", ["measure", "--dry-run", "--output", str(output)])
    try:
        measure.main()
    finally:
        dist.destroy_process_group()
    cases = read_cases(output)
    results = {"machine": {"l2_bytes": 2**16}, "parts": [], "cases": cases}
    assert report.of_kind(results, "error") == []
    assert (codes, cases[-1]) == ([0], {"kind": "end", "left_out": 0, "errors": 0})
    assert [case["disagreements"] for case in report.of_kind(results, "ops")] == [[]] * 15
    verdicts = {target.what: target.verdict for target in report.judge(results)}
    for part in ("forward", "backward"):
        for what in ("kernels", "collectives", "waits"):
            assert verdicts[f"{what} in a {part} pass of a layer, most"] == "met"


# Of the tests, all but those of what was built, of streams and graphs, of several ranks, and of billions of values.
for _module in (test_gpu_ops, test_gpu_layers):
    _left_out = ("library", "stream", "graph", "captured", "share", "to_the_31")
    globals().update(
        {n: t for n, t in vars(_module).items() if n.startswith("test_") and not any(word in n for word in _left_out)}
    )
