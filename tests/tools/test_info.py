"""The facts that an installation tells, and the weight of importing it."""

import json
import subprocess
import sys

import torch

import bagua_syncbn
from bagua_syncbn import info

PROGRAM = """
import runpy, sys, bagua_syncbn
print([module for module in ("bagua", "torch._dynamo", "torchvision") if module in sys.modules])
runpy.run_module("bagua_syncbn", run_name="__main__")
"""


def test_import_is_light_and_the_program_prints_all(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["info", "--json"])
    info.main()
    told = json.loads(capsys.readouterr().out)
    assert told["bagua_syncbn"] == bagua_syncbn.__version__
    assert told["torch"] == torch.__version__
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    heavy, text = done.stdout.split("\n", 1)
    assert heavy == "[]"
    assert all(key in text for key in told)
