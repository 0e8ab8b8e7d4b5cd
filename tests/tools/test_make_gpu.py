"""``make gpu`` without a GPU: its programs run on tiny CPU tensors, and its report is a function of recorded data."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import counts, op_cases, prove, report, runner, shapes
from benchmarks.gpu.layer_cases import EXTRA_KINDS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_dry_run(tmp_path):
    """But for the build, and the tests, which a machine without a GPU skips."""
    chosen = ["--dry-run", "--parts", "memcheck", "bagua tests", "benchmarks", "--output", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "prove.py"), *chosen]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    recorded = json.loads((tmp_path / "results.json").read_text())
    assert [part["outcome"].split(":")[0] for part in recorded["parts"]] == ["passed", "left out", "passed"]
    cases = recorded["cases"]
    assert (cases[0]["kind"], cases[-1]) == ("copy", {"kind": "end", "left_out": 0, "errors": 0})
    wanted = [case.record() for case in shapes.cases(shapes.TINY)]
    for kind in ("ops", "layer", *EXTRA_KINDS):
        assert [{key: case[key] for key in wanted[0]} for case in report.of_kind(recorded, kind)] == wanted
    assert [case["disagreements"] for case in report.of_kind(recorded, "ops")] == [[]] * len(wanted)
    for case in report.of_kind(recorded, "counts"):
        assert [case["counts"][f"ours {part}"]["collectives"] for part in ("forward", "backward")] == [1, 1]
    assert report.short(recorded) in finished.stdout
    assert "DRY RUN" in (tmp_path / "log.txt").read_text()


def test_the_build_needs_no_setuptools(tmp_path):
    """``-S``: without what is installed; with a compiler that does nothing."""
    command = [sys.executable, "-S", str(ROOT / "benchmarks" / "gpu" / "build.py"), str(tmp_path)]
    settings = os.environ | {
        "BAGUA_SYNCBN_BUILD": "cpu",
        "CXX": "true",
        "PYTHONPATH": str(Path(torch.__file__).parents[1]),
    }
    finished = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "bagua_syncbn" / "build_info.json").read_text())["build"] == "cpu"
    assert (tmp_path / "bagua_syncbn" / "sync_batchnorm.py").exists()


def test_tests_run_without_pytest(tmp_path):
    file = tmp_path / "test_little.py"
    file.write_text("""import pytest
@pytest.fixture(scope="module")
def made():
    yield 3
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize(("a", "c"), [(1, 2), (3, 4)])
def test_four(made, a, b, c):
    assert made == 3 and a + 1 == c
def test_skips():
    pytest.skip("why")
def test_fails():
    with pytest.raises(ValueError, match="other"):
        raise ValueError("one")
""")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "plain_tests.py"), str(file)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout.splitlines()[-1]) == (1, "4 passed, 1 failed")
    assert "skipped test_skips : why" in finished.stdout


def test_parts_are_told_apart_by_how_they_end(tmp_path):
    with (tmp_path / "log").open("w") as log:
        runs, ticks = runner.Runner(log, 60), []

        def run(code, limit=20.0):
            command = [sys.executable, "-c", code]
            return runs.run("part", command, limit, {"ADDED": "yes"}, tmp_path, lambda: ticks.append(1))

        assert run("import os; print(os.environ['ADDED'], os.getcwd())").passed
        failed = run("print('said'); raise SystemExit(3)")
        assert (failed.outcome, failed.details) == ("failed", "said")
        # A child that holds the pipe open is ended too.
        child = "import subprocess, time; subprocess.Popen(['sleep', '60'])\n"
        slow = run(child + "print('begun', flush=True); time.sleep(60)", 2.5)
        assert (slow.outcome, slow.details, len(ticks) > 1) == ("timed out", "begun", True)
        assert slow.seconds < 20
    assert f"yes {tmp_path}" in (tmp_path / "log").read_text()


def test_what_is_missing_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(prove, "examine", lambda: {"machine": {}, "missing": ["nvcc", "a CUDA device"]})
    assert prove.main(["--output", str(tmp_path)]) == 2
    assert "missing: nvcc; a CUDA device" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["missing"] == ["nvcc", "a CUDA device"]


def test_what_is_run_on_a_machine_with_a_gpu(tmp_path):
    arguments = prove.parse_arguments(["--output", str(tmp_path)])
    machine = {"compute_sanitizer": "/opt/compute-sanitizer", "pytest": "8"}
    assert all(prove.command(tool, arguments, machine, 60.0)[6] == tool for tool in prove.TOOLS)
    names = {part: {Path(file).name for file in prove.test_files(part)} for part in prove.LIMITS if "tests" in part}
    assert (names["op tests"], names["layer tests"]) == ({"test_gpu_ops.py"}, {"test_gpu_layers.py"})
    assert "test_data_parallel_contract.py" in names["further tests"]
    assert "plain_tests.py" in prove.command("op tests", arguments, {}, 60.0)[1]
    assert prove.environment("build", {"architecture": "90"}, False)["BAGUA_SYNCBN_CUDA_ARCHS"] == "90"


def test_torchs_layer_takes_these_arguments():
    from torch.nn.modules._functions import SyncBatchNorm

    names = ["weight", "bias", "running_mean", "running_var", "eps", "momentum", "process_group", "world_size"]
    assert list(inspect.signature(SyncBatchNorm.forward).parameters)[2:] == names


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there")
@pytest.mark.parametrize("name", shapes.OPS)
def test_atens_kernels_take_these_arguments(name):
    """Without a GPU they refuse the device, which they do after they have taken the arguments."""
    x, dy = torch.randn(2, 4, 3, 5, 5).unbind()
    layer = op_cases.make_layer(shapes.Case("", (4, 3, 5, 5), "float32", "planar"), x, dy)
    with pytest.raises(NotImplementedError, match="Could not run 'aten::"):
        getattr(op_cases.aten.Kernels(torch, layer, 1e-5, 0.1), name)(x, dy)


def event(category, name, start, duration=1.0):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def test_a_trace_is_counted():
    names = ["cudaMemcpyAsync", "cudaStreamSynchronize", "cudaEventSynchronize_v3020", "cudaMemcpy_ptds_v7000"]
    trace = [event("cuda_runtime", name, 104.0) for name in names]
    trace += [
        event("user_annotation", "bagua_syncbn: counted", 100.0, 50.0),
        event("cuda_driver", "cuLaunchKernelEx", 102.0),
    ]
    trace += [event("cpu_op", "c10d::_allgather_base_", 106.0), event("kernel", "merge_ranks", 190.0)]  # late
    trace += [event("gpu_memset", "Memset", 132.0), event("cuda_runtime", "cudaDeviceSynchronize", 160.0)]  # after
    counted = counts.count({"traceEvents": trace})
    assert counted.pop("names") == sorted([*names[1:], "merge_ranks"])
    assert counted == {"kernels": 1, "copies": 0, "fills": 1, "collectives": 1, "waits": 3, "runtime": 2}


def test_the_report_of_recorded_cases():
    """Figures are made up."""
    size = 8 * 64 * 100 * 100 * 4
    times = {f"{side} {op}": [40.0 if side == "aten" else 10.0] * 3 for side in ("ours", "aten") for op in shapes.OPS}
    times |= {f"ours {op}": [passes * size / 1.5e6 / 0.9] for op, passes in shapes.PASSES.items()}
    case = shapes.Case("made up", (8, 64, 100, 100), "float32", "planar").record()
    small = shapes.Case("made up", (2, 64, 8, 8), "float32", "planar").record()
    counted = {"copies": 1, "fills": 0, "collectives": 1, "waits": 0, "runtime": 9}
    launches = {"forward": 3, "backward": 4}
    passes = {f"{side} {p}": {"kernels": n, **counted} for side in ("ours", "torch") for p, n in launches.items()}
    steps = {"ours step": [10.0], "torch step": [29.0], "ours forward": [1.0], "torch forward": [2.0]}
    masked = {"ours step": [8.0], "unmasked step": [7.0], "ours forward": [1.0], "unmasked forward": [1.0]}
    recorded = {
        "machine": {"l2_bytes": 1_000_000},
        "parts": [runner.Outcome("op tests", "timed out", 12.3, "no\n" * 9 + "the last line").record()],
        "cases": [
            {"kind": "copy", "bytes": 3_000_000, "microseconds": {"copy": [1.0, 2.0, 9.0]}},
            {"kind": "ops", **case, "microseconds": times, "behind": ["ours stats"], "disagreements": ["elemt"]},
            {"kind": "layer", **small, "microseconds": steps},
            {"kind": "masked", **small, "microseconds": masked},
            {"kind": "counts", **small, "counts": passes},
            {"kind": "error", "what": "ops of something", "error": "OutOfMemoryError: no"},
        ],
    }
    verdicts = {target.what: target.verdict for target in report.judge(recorded)}
    assert report.judge(recorded)[0].measured == pytest.approx(0.9)
    assert verdicts["torch's layer / ours, a step, input below 4 MB, least"] == "MISSED"
    assert verdicts["kernels in a forward pass of a layer, most"] == "met"
    assert verdicts["kernels in a backward pass of a layer, most"] == "MISSED"
    assert verdicts["ATen's five kernels / ours, interleaved, mean"] == "not measured"
    shown = report.full(recorded)
    for what in ("timed out", "the last line", "8x64x100x100 float32 planar: elemt", "OutOfMemoryError", "host-bound"):
        assert what in shown
    assert "| 0.88" in shown  # of the time with a mask that without
    for counted in passes.values():
        counted["runtime"] = 0
    assert "Launches could not be counted" in report.short(recorded)
    assert "not measured" in report.full({"machine": {}, "parts": [], "cases": []})
