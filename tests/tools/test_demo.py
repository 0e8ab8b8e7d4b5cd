"""The demo's verdict; `.ci/run` runs the demo itself."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

if not all(map(importlib.util.find_spec, ("matplotlib", "sklearn", "tqdm"))):  # importing them takes seconds
    pytest.skip("the examples need more packages: pip install -e '.[demo]'", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "OUTPUT", tmp_path / "demo")
    return module


def run(demo, monkeypatch, synced, unsynced):
    losses = {"reference": [2.25, 1.0] + [0.5] * 535, "synced": synced, "unsynced": unsynced}
    monkeypatch.setattr(demo, "train", lambda name: {"losses": losses[name], "test_accuracy": 0.9625})
    demo.main()


def test_the_demo_compares_losses_at_all_steps(demo, monkeypatch, capsys):
    run(demo, monkeypatch, [2.25, 1.0 + 1e-12] + [0.5] * 535, [2.25, 1.1] + [0.5] * 535)
    *_, verdict, _ = capsys.readouterr().out.splitlines()
    assert f"`{verdict}`" in (ROOT / "README.md").read_text().splitlines()
    results = json.loads((demo.OUTPUT / "results.json").read_text())
    assert results["synced"]["max_gap"] < 1e-11 < 0.09 < results["unsynced"]["max_gap"]
    assert (demo.OUTPUT / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_if_ranks_differ_or_the_unsynchronized_run_does_not(demo, monkeypatch):
    same = [2.25, 1.0001] + [0.5] * 535
    with pytest.raises(SystemExit, match=r"synced: expected .*\nunsynced: expected "):
        run(demo, monkeypatch, same, same)
    assert {path.name for path in demo.OUTPUT.iterdir()} == {"results.json", "loss.png"}
    assert len(demo.find_failures(math.nan, math.nan)) == 2
