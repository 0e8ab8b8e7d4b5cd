"""Tests the report about an installation, and which modules an import loads or requires."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bagua_syncbn
from bagua_syncbn import __main__
from bagua_syncbn.__main__ import collect_info
from tests.helpers.workers import run_fresh

ROOT = Path(__file__).parents[2]

PROGRAM = """
import runpy, sys, torch, bagua_syncbn
key = torch._C._dispatch_has_kernel_for_dispatch_key
assert key("bagua_syncbn::batch_norm_stats", "CUDA")
assert not bagua_syncbn._ops.KERNELS.endswith("cuda")
assert not {"bagua", "torch._dynamo", "torchvision"} & sys.modules.keys()
runpy.run_module("bagua_syncbn", run_name="__main__")
"""


def test_import_is_light_and_the_program_prints_all():
    environment = os.environ | {"BAGUA_SYNCBN_KERNELS": "aten"}  # ATen's kernels compute CUDA tensors
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    printed = json.loads(done.stdout)
    assert printed.keys() == collect_info().keys()
    assert (printed["bagua_syncbn"], printed["torch"]) == (bagua_syncbn.__version__, torch.__version__)


def test_without_torch_importing_says_what_to_install():
    done = run_fresh("import sys; sys.modules['torch'] = None; import bagua_syncbn")
    assert "ModuleNotFoundError: bagua_syncbn needs PyTorch 2.10 or later: pip install torch" in done.stderr


def test_each_card_is_reported_with_the_result_of_the_comparison_or_its_error(monkeypatch):
    def check_kernels(input):
        if input.dtype == torch.float32 and input.device.index == 0:
            raise RuntimeError("comparing the CUDA kernels failed")
        __main__.agreed[input.device] += 2 if input.device.index < 2 else 0

    monkeypatch.setattr(__main__, "check_kernels", check_kernels)
    monkeypatch.setattr(__main__, "cuda_kernels", lambda: "native")
    monkeypatch.setattr(__main__, "agreed", Counter())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", "H100 {}".format)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: SimpleNamespace(dtype=dtype, device=device))
    info = collect_info()
    assert info["devices"] == ["cpu", "H100 0", "H100 1", "H100 2"]
    first, second, third = info["cuda_kernels"]
    equal = r"cases equal plain torch, \d+\.\d s\)"
    assert re.fullmatch(rf"cuda:0: H100 0, sm_90: comparing the CUDA kernels failed \(4 {equal}", first)
    assert re.fullmatch(rf"cuda:1: H100 1, sm_91: native \(8 {equal}", second)
    assert third == "cuda:2: H100 2, sm_92: native"  # nothing was compared


VARIABLES = "KERNELS", "EXCHANGE", "CPU_CAPABILITY"


@pytest.mark.parametrize("variable", VARIABLES)
def test_an_environment_variable_with_an_unknown_value_is_refused(variable):
    """The error names the values that docs/building.md documents."""
    done = run_fresh("import bagua_syncbn", **{f"BAGUA_SYNCBN_{variable}": "sse9"})
    assert done.stderr.endswith(", got 'sse9'\n")
    error = done.stderr.splitlines()[-1]
    assert f"ImportError: BAGUA_SYNCBN_{variable}: expected " in error
    page = (ROOT / "docs" / "building.md").read_text(encoding="utf-8")
    assert re.findall(r'"(\w+)"', error) == re.findall(rf"^\| `BAGUA_SYNCBN_{variable}=(\w+)`", page, re.MULTILINE)


def test_an_empty_environment_variable_counts_as_unset():
    code = "from bagua_syncbn import _ops, communicators as c; print(_ops.native.WANTED, c.shared._WANTED)"
    done = run_fresh(code, **{f"BAGUA_SYNCBN_{variable}": "" for variable in VARIABLES})
    assert done.stdout == "native shared\n", done.stderr


def test_info_explains_why_plain_torch_uses_no_shared_memory(monkeypatch):
    monkeypatch.setenv("BAGUA_SYNCBN_KERNELS", "reference")
    reason = "BAGUA_SYNCBN_KERNELS=reference, which loads no native library"
    assert collect_info()["exchange_on_one_host"] == f"collectives: {reason}"


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("pool", ["reference"], indirect=True)
def test_ranks_run_the_reference_ops_on_demand():
    assert bagua_syncbn._ops.KERNELS == "reference"
