"""Runs the demo with a few steps."""

import importlib.util
import json
import math
import runpy
import sys
from pathlib import Path
from unittest.mock import patch
from warnings import catch_warnings, filterwarnings

import pytest
import torch.distributed as dist

from tests.helpers.workers import launched_by_torchrun

for _package in ("matplotlib", "sklearn", "tqdm"):
    pytest.importorskip(_package, reason=f"the examples need {_package}: pip install -e '.[demo]'")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = str(EXAMPLES / "train_digits.py")


@pytest.fixture
def demo(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "OUTPUT", tmp_path / "demo")
    return module


def run_script(port, arguments):
    with launched_by_torchrun(MASTER_PORT=str(port)), patch.object(sys, "argv", [SCRIPT, *arguments]), catch_warnings():
        filterwarnings("error", "with_bagua")  # the demo's unsynchronized run must not warn
        runpy.run_path(SCRIPT, run_name="__main__")


def test_synchronized_ranks_train_like_one_process_and_others_do_not(demo, pool, monkeypatch, tmp_path, capsys):
    """Two ranks instead of four, and 10 steps instead of 537."""

    def train(name):
        output = tmp_path / f"{name}.json"
        arguments = ["--steps", "10", "--dtype", "float64", *demo.RUNS[name][2], "--output", str(output)]
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        pool.run(run_script, 1 if name == "reference" else 2, store.port, arguments)
        pool.forget_job()
        return json.loads(output.read_text())

    monkeypatch.setattr(demo, "train", train)
    demo.main()
    results = json.loads((demo.OUTPUT / "results.json").read_text())
    assert results["reference"]["losses"][-1] < results["reference"]["losses"][0]
    assert results["synced"]["max_gap"] < 1e-12 < 1e-2 < results["unsynced"]["max_gap"]
    assert results["synced"]["test_accuracy"] == results["reference"]["test_accuracy"] > 0.1
    assert (demo.OUTPUT / "loss.png").read_bytes().startswith(b"\x89PNG")
    *_, verdict, _ = capsys.readouterr().out.splitlines()
    assert verdict.replace("10 steps", "537 steps") in (EXAMPLES.parent / "README.md").read_text().splitlines()


def test_the_demo_fails_if_ranks_differ_or_the_unsynchronized_run_does_not(demo, monkeypatch):
    losses = {"reference": [2.25, 1.0], "synced": [2.25, 1.0001], "unsynced": [2.25, 1.0001]}
    monkeypatch.setattr(demo, "train", lambda name: {"losses": losses[name], "test_accuracy": 0.9625})
    with pytest.raises(SystemExit, match=r"synced: expected .*\nunsynced: expected "):
        demo.main()
    assert {path.name for path in demo.OUTPUT.iterdir()} == {"results.json", "loss.png"}
    assert len(demo.find_failures(math.nan, math.nan)) == 2
