"""``make gpu`` without a GPU: all parts on tiny CPU tensors, and how each ends."""

import json
import sys
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu import prove, report, shapes


@pytest.mark.slow
def test_a_dry_run_passes_all_parts(tmp_path, capsys):
    assert prove.main(["--dry-run", "--output", str(tmp_path)]) == 0
    recorded = json.loads((tmp_path / "results.json").read_text())
    assert [(part["name"], part["outcome"]) for part in recorded["parts"]] == [(p, "passed") for p in prove.PARTS]
    inputs = [list(case.shape) for case in shapes.cases(shapes.TINY)]
    for kind in ("ops", "layer"):
        assert [case["shape"] for case in recorded["cases"] if case["kind"] == kind] == inputs
    assert "DRY RUN" in capsys.readouterr().out
    assert "== memcheck" in (tmp_path / "log.txt").read_text()


def test_a_part_that_hangs_is_ended_and_does_not_lose_the_rest(tmp_path):
    child = "import subprocess, time; print('begun', flush=True); subprocess.Popen(['sleep', '60']); time.sleep(60)"
    codes = {"passes": "print(1)", "fails": "print('said'); raise SystemExit(3)", "hangs": child}
    programs = {name: ([sys.executable, "-c", code], {}) for name, code in codes.items()}
    with (tmp_path / "log").open("w") as log, patch.object(prove, "BUILT", tmp_path):
        outcomes = prove.run_stage(programs, 4, lambda: None, log)
    ends = [(part["name"], part["outcome"], part["details"]) for part in outcomes]
    assert ends == [("passes", "passed", ""), ("fails", "failed", "said"), ("hangs", "timed out", "begun")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there")
def test_atens_kernels_take_these_arguments():
    """Without a GPU they refuse the device, which they do after they have taken the arguments."""
    x, dy = torch.randn(2, 4, 3, 5, 5).unbind()
    calls = {name: call for name, call in prove.op_calls(x, dy).items() if name.startswith("aten")}
    assert len(calls) == 5
    for call in calls.values():
        with pytest.raises(NotImplementedError, match="Could not run 'aten::"):
            call(x, dy)


def test_targets_are_judged_by_what_was_measured():
    case = shapes.Case("made up", (8, 64, 100, 100), "float32", "planar").record()
    times = {f"{side} {op}": [took] for side, took in (("ours", 10.0), ("aten", 19.0)) for op in shapes.OPS}
    recorded = {"machine": {}, "cases": [{"kind": "ops", **case, "microseconds": times}]}
    verdicts = [row[3] for row in report.targets(recorded)]
    assert verdicts == ["not measured", "MISSED", "not measured", "met", "not measured"]
