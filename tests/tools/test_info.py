"""The facts that an installation tells, and the weight of importing it."""

import json
import os
import subprocess
import sys

import torch

import bagua_syncbn
from bagua_syncbn import info

PROGRAM = """
import runpy, sys, torch, bagua_syncbn
key = torch._C._dispatch_has_kernel_for_dispatch_key
assert key("bagua_syncbn::batch_norm_stats", "CUDA")
assert not bagua_syncbn.ops.KERNELS.endswith("cuda")
print([module for module in ("bagua", "torch._dynamo", "torchvision") if module in sys.modules])
runpy.run_module("bagua_syncbn", run_name="__main__")
"""


def test_import_is_light_and_the_program_prints_all(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["info", "--json"])
    info.main()
    told = json.loads(capsys.readouterr().out)
    assert told["bagua_syncbn"] == bagua_syncbn.__version__
    assert told["torch"] == torch.__version__
    environment = os.environ | {"BAGUA_SYNCBN_KERNELS": "aten"}  # something computes on CUDA, which is not the library
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    heavy, text = done.stdout.split("\n", 1)
    assert heavy == "[]"
    assert all(key in text for key in told)
