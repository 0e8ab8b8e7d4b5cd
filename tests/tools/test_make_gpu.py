"""``make gpu`` without a GPU: its Python runs on tiny CPU tensors, and its report is a function of recorded data.

All figures in this file are made up.
"""

import inspect
import json
import os
import subprocess
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import aten
import counts
import inputs
import measure
import one_rank
import op_cases
import parts
import preflight
import prove
import pytest
import shapes
import summary
import targets
import torch
from clock import CudaClock, HostClock, Plan
from clock import measure as measure_in_turn
from torch import distributed as dist

import bagua_syncbn

ROOT = Path(__file__).parents[2]
OPS = [f"{side} {op}" for op in shapes.OPS for side in ("ours", "aten")]


def made_up(**times):
    """The samples of an op case: 10 us each but for ``times``."""
    return {name: [times.get(name.replace(" ", "_"), 10.0)] * 3 for name in OPS}


def ops_case(shape=(8, 64, 100, 100), dtype="float32", layout="planar", **times):
    case = shapes.Case("made up", shape, dtype, layout).record()
    return {"kind": "ops", **case, "microseconds": made_up(**times), "behind": [], "disagreements": []}


def layer_case(ours, torchs, shape=(2, 64, 8, 8)):
    times = {"ours step": [ours], "torch step": [torchs], "ours forward": [ours], "torch forward": [torchs]}
    return {"kind": "layer", **shapes.Case("made up", shape, "float32", "planar").record(), "microseconds": times}


def results(*cases, cache=1_000_000):
    copy = {"kind": "copy", "bytes": 3_000_000, "microseconds": {"copy": [1.0, 2.0, 9.0]}}  # 1.5 MB in a microsecond
    return {"machine": {"l2_bytes": cache}, "parts": [], "cases": [copy, *cases]}


def find(recorded, what):
    (target,) = (target for target in targets.judge(recorded) if what in target.what)
    return target


# The program


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("measured") / "cases.jsonl"
    command = [sys.executable, "benchmarks/gpu/measure.py", "--device", "cpu", "--dry-run", "--output", str(output)]
    path = str(Path(bagua_syncbn.__file__).parents[1])
    finished = subprocess.run(
        [*command, "--seconds", "20"], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    return prove.read_cases(output)


def test_a_dry_run_measures_every_case(dry_run):
    wanted = [tuple(case.record().values()) for case in shapes.cases(shapes.TINY)]
    for kind in ("ops", "layer"):
        measured = [case for case in dry_run if case["kind"] == kind]
        assert [(c["network"], tuple(c["shape"]), c["dtype"], c["layout"]) for c in measured] == [
            (network, tuple(shape), dtype, layout) for network, shape, dtype, layout in wanted
        ]
        assert all(sample > 0 for c in measured for samples in c["microseconds"].values() for sample in samples)
    assert dry_run[0]["kind"] == "copy"
    assert dry_run[-1] == {"kind": "end", "left_out": 0, "errors": 0}


def test_a_dry_run_agrees_with_the_stand_in(dry_run):
    measured = [case for case in dry_run if case["kind"] == "ops"]
    assert measured
    assert [case["disagreements"] for case in measured] == [[]] * len(measured)


def test_a_dry_run_counts_collectives(dry_run):
    counted = [case["counts"] for case in dry_run if case["kind"] == "counts"]
    assert counted
    for passes in counted:
        assert passes["ours forward"]["collectives"] == passes["ours backward"]["collectives"] == 1


def test_the_whole_of_it(tmp_path):
    """But for the build, and the tests, which a machine without a GPU skips."""
    chosen = ["--dry-run", "--parts", "memcheck", "racecheck", "benchmarks", "--output", str(tmp_path / "out")]
    path = str(Path(bagua_syncbn.__file__).parents[1])
    # The package that is tested here stands in for the one that the build part would have built.
    code = f"import sys; sys.path.insert(0, {str(prove.HERE)!r}); import prove; from pathlib import Path\n"
    code += f"prove.environment = lambda *_: {{'PYTHONPATH': {path!r}}}; sys.exit(prove.main(sys.argv[1:]))"
    finished = subprocess.run([sys.executable, "-c", code, *chosen], capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    recorded = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(part["name"], part["outcome"]) for part in recorded["parts"]] == [
        (name, "passed") for name in ("memcheck", "racecheck", "benchmarks")
    ]
    assert recorded["cases"][-1]["kind"] == "end"
    assert "DRY RUN" in finished.stdout
    assert summary.targets_table(recorded) in finished.stdout
    assert summary.targets_table(recorded) in (tmp_path / "out" / "log.txt").read_text()


def test_what_raises_is_recorded_and_ends_nothing(tmp_path):
    def fail(message):
        raise RuntimeError(message)

    def run(*works):
        path = tmp_path / "cases.jsonl"
        with path.open("w") as output:
            errors = measure.run(iter(works), measure.time.monotonic() + 100, output)
        return errors, prove.read_cases(path)

    good = ("good", lambda: {"kind": "ops"})
    errors, cases = run(("bad", lambda: fail("first\nsecond")), ("empty", lambda: fail("")), good)
    assert errors == 2
    assert cases[0] == {"kind": "error", "what": "bad", "error": "RuntimeError: first"}
    assert cases[2:] == [{"kind": "ops"}, {"kind": "end", "left_out": 0, "errors": 2}]
    # A lost context raises in every call: once is enough.
    errors, cases = run(("lost", lambda: fail("CUDA error: an illegal memory access")), good, good)
    assert (errors, cases[-1]) == (1, {"kind": "end", "left_out": 2, "errors": 1})


def test_a_cut_line_is_left_out(tmp_path):
    (tmp_path / "cases.jsonl").write_text('{"kind": "copy"}\n{"kind": "op')
    assert prove.read_cases(tmp_path / "cases.jsonl") == [{"kind": "copy"}]
    assert prove.read_cases(tmp_path / "none") == []


def test_results_can_be_read_back(tmp_path):
    recorded = results(ops_case(), layer_case(1.0, 3.0))
    prove.write(recorded, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(recorded))


# What it runs


def test_parts_are_told_apart_by_how_they_end(tmp_path):
    with (tmp_path / "log").open("w") as log:
        runner = parts.Runner(log, 60)

        def run(code, limit=20.0):
            return runner.run("part", [sys.executable, "-c", code], limit, {"ADDED": "yes"}, tmp_path)

        assert run("import os; print(os.environ['ADDED'], os.getcwd())").passed
        failed = run("print('said'); raise SystemExit(3)")
        assert (failed.outcome, failed.details) == ("failed", "said")
        # A child that holds the pipe open is ended too.
        child = "import subprocess, time; subprocess.Popen(['sleep', '60'])\n"
        slow = run(child + "print('begun', flush=True); time.sleep(60)", 1.0)
        assert (slow.outcome, slow.details) == ("timed out", "begun")
        assert slow.seconds < 15
        assert run(child).passed
        assert runner.run("part", ["/nowhere/program"], 1.0, {}, tmp_path).outcome == "failed"
    assert f"yes {tmp_path}" in (tmp_path / "log").read_text()
    with (tmp_path / "log").open("w") as log:
        assert parts.Runner(log, 0.0).run("part", [sys.executable], 9.0, {}, tmp_path).outcome.startswith("not run")


def test_a_failed_part_hides_no_other_but_a_failed_build_ends_the_run(monkeypatch, tmp_path):
    arguments = Namespace(output=tmp_path, dry_run=True, parts=["op tests", "memcheck", "benchmarks"])
    program = {
        "op tests": "raise SystemExit(1)",
        "memcheck": "pass",
        "benchmarks": "pass",
        "build": "raise SystemExit(1)",
        "bagua tests": "raise SystemExit(1)",
    }
    monkeypatch.setattr(
        prove, "commands", lambda *_: {name: [sys.executable, "-c", code] for name, code in program.items()}
    )
    with (tmp_path / "log").open("w") as log:
        recorded = {"machine": {}, "parts": [], "cases": []}
        outcomes = prove.run_parts(arguments, parts.Runner(log, 300), recorded)
        assert [outcome.outcome for outcome in outcomes] == ["failed", "passed", "passed"]
        assert json.loads((tmp_path / "results.json").read_text())["parts"] == recorded["parts"]
        arguments.parts = ["bagua tests"]  # left out where there is no Bagua, and run where there is
        assert prove.run_parts(arguments, parts.Runner(log, 300), recorded) == []
        recorded["machine"] = {"bagua": "0.9.3"}
        assert [outcome.outcome for outcome in prove.run_parts(arguments, parts.Runner(log, 300), recorded)] == [
            "failed"
        ]
        arguments.parts = ["build", "op tests"]
        assert [outcome.name for outcome in prove.run_parts(arguments, parts.Runner(log, 300), recorded)] == ["build"]


def test_what_hangs_leaves_the_benchmarks_their_time(monkeypatch, tmp_path):
    program = {"op tests": "import time; time.sleep(60)", "memcheck": "pass", "benchmarks": "pass", "build": "pass"}
    monkeypatch.setattr(
        prove, "commands", lambda *_: {name: [sys.executable, "-c", code] for name, code in program.items()}
    )
    monkeypatch.setattr(prove, "LIMITS", dict.fromkeys(program, 20.0))
    arguments = Namespace(output=tmp_path, dry_run=True, parts=["op tests", "memcheck", "benchmarks", "build"])
    with (tmp_path / "log").open("w") as log:
        outcomes = prove.run_parts(arguments, parts.Runner(log, 21), {"machine": {}, "parts": [], "cases": []})
    assert [outcome.outcome for outcome in outcomes] == ["timed out", "not run: no time left", "passed", "passed"]


def test_what_is_run_on_a_machine_with_a_gpu(tmp_path):
    arguments = prove.parse_arguments(["--output", str(tmp_path)])
    commands = prove.commands(arguments, {"compute_sanitizer": "/opt/compute-sanitizer"}, 300.0)
    assert list(commands) == list(prove.LIMITS)
    assert commands["memcheck"][0] == commands["racecheck"][0] == "/opt/compute-sanitizer"
    files = {part: [Path(path).name for path in commands[part] if path.endswith(".py")] for part in commands}
    assert (files["op tests"], files["layer tests"]) == (["test_gpu_ops.py"], ["test_gpu_layers.py"])
    assert {"test_data_parallel_contract.py", "test_data_parallel_protocol.py"} <= set(files["further tests"])
    assert not {"test_native.py", "test_gpu_ops.py", "test_gpu_layers.py"} & set(files["further tests"])
    assert files["bagua tests"] == ["test_bagua_one_rank.py"]
    assert "--dry-run" not in commands["benchmarks"]
    assert commands["benchmarks"][commands["benchmarks"].index("--seconds") + 1] == "155"
    for part in ("op tests", "layer tests", "further tests", "bagua tests"):
        assert prove.environment(part, {}, False)["FAIL_WITHOUT_CUDA"] == "1"
    build = prove.environment("build", {"architecture": "90"}, False)
    assert build == {"BAGUA_SYNCBN_BUILD": "cuda", "BAGUA_SYNCBN_CUDA_ARCHS": "90"}
    assert prove.TOTAL < 8 * 60


def test_missing_things_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(preflight, "find_tool", lambda name: None)
    monkeypatch.setattr(preflight, "version_of", lambda package: {"torch": (2, 9), "setuptools": (70, 0)}.get(package))
    missing = preflight.examine()["missing"]
    for name in ("torch 2.10 or later", "nvcc", "setuptools 77", "pytest 8"):
        assert any(name in line for line in missing), missing
    if not torch.cuda.is_available():
        assert any("CUDA" in line for line in missing)
    monkeypatch.setattr(prove, "examine", lambda: {"machine": {}, "missing": ["nvcc", "pytest 8 or later"]})
    assert prove.main(["--output", str(tmp_path)]) == 2
    assert "missing: nvcc; pytest 8 or later" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["missing"] == ["nvcc", "pytest 8 or later"]


def test_a_python_without_torch_gets_as_far_as_to_say_so():
    """``-S``: without what is installed."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); import prove"
    subprocess.run([sys.executable, "-S", "-c", program, str(ROOT / "benchmarks" / "gpu")], check=True)


def test_preflight_examines_this_machine():
    found = prove.examine()
    assert found["machine"]["torch"] == torch.__version__
    if not torch.cuda.is_available():
        assert any("CUDA" in line for line in found["missing"])


# What it calls that only a GPU can run


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there")
@pytest.mark.parametrize("name", shapes.OPS)
def test_atens_kernels_take_these_arguments(name):
    """Without a GPU they refuse the device, which they do after they have taken the arguments."""
    x, dy = torch.randn(2, 4, 3, 5, 5).unbind()
    layer = op_cases.make_layer(shapes.Case("", (4, 3, 5, 5), "float32", "planar"), x, dy)
    with pytest.raises(NotImplementedError, match="Could not run 'aten::"):
        getattr(aten.Kernels(torch, layer, 1e-5, 0.1), name)(x, dy)


def test_torchs_layer_takes_these_arguments():
    from torch.nn.modules._functions import SyncBatchNorm

    names = list(inspect.signature(SyncBatchNorm.forward).parameters)[1:]
    assert names == [
        "input", "weight", "bias", "running_mean", "running_var", "eps", "momentum", "process_group", "world_size"
    ]  # fmt: skip


@pytest.mark.parametrize("layout", shapes.LAYOUTS)
@pytest.mark.parametrize("shape", shapes.TINY["tiny"])
def test_the_stand_in_is_what_it_stands_for(shape, layout):
    """ATen's own definition of the kernels, F.batch_norm, on CPU: forward and backward."""
    case = shapes.Case("", shape, "float32", layout)
    x, dy = (inputs.lay_out(torch.randn(case.values), case) for _ in range(2))
    layer = op_cases.make_layer(case, x, dy)
    kernels = aten.Kernels(aten.StandIn, layer, op_cases.EPS, op_cases.MOMENTUM)
    leaf = x.detach().requires_grad_()
    output = torch.nn.functional.batch_norm(leaf, None, None, layer["weight"], layer["bias"], True, eps=op_cases.EPS)
    output.backward(dy)
    torch.testing.assert_close(kernels.elemt(x, dy), output.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernels.backward_elemt(x, dy), leaf.grad, rtol=1e-4, atol=1e-4)
    assert op_cases.disagreements(case, op_cases.Ours(layer), kernels, x, dy) == []


def test_kernels_that_disagree_are_named():
    case = shapes.Case("", (4, 3, 5, 5), "float32", "planar")
    x, dy = (inputs.lay_out(torch.randn(case.values), case) for _ in range(2))
    layer = op_cases.make_layer(case, x, dy)

    class Wrong(aten.StandIn):
        @staticmethod
        def batch_norm_elemt(*args):
            return aten.StandIn.batch_norm_elemt(*args) * 1.01

    kernels = aten.Kernels(Wrong, layer, op_cases.EPS, op_cases.MOMENTUM)
    assert op_cases.disagreements(case, op_cases.Ours(layer), kernels, x, dy) == ["elemt"]


# Inputs and clock


@pytest.mark.parametrize("cache", [10_000, 1_000_000])
@pytest.mark.parametrize("case", [c for c in shapes.cases(shapes.TINY) if c.dtype != "bfloat16"], ids=str)
def test_inputs_are_laid_out_and_more_than_the_cache_holds(case, cache):
    pool = inputs.Pool(torch.device("cpu"), cache, case.size)
    sets = pool.sets(case)
    assert sum(x.nbytes for x, _ in sets) >= min(4 * cache, 2048 * case.size) * 0.9
    addresses = sorted((t.data_ptr(), t.nbytes) for pair in sets for t in pair)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(addresses))
    for x, dy in sets[:2]:
        assert x.shape == dy.shape == case.shape
        assert x.dtype == getattr(torch, case.dtype)
        assert (x.stride(1) == 1) == (case.layout == "interleaved")
        assert x.permute(0, *range(2, x.dim()), 1).is_contiguous() or x.is_contiguous()
        assert (x.data_ptr() - sets[0][0].data_ptr()) % 512 == 0


class MadeUpClock(HostClock):
    """Calls take what ``seconds`` says; the host needs ``host`` for each."""

    def __init__(self, seconds, host=0.0):
        self.seconds, self.host, self.asked = seconds, host, []

    def time(self, function, calls, head_start):
        self.asked.append((calls, head_start))
        return self.seconds[function], calls * self.host <= head_start


def test_functions_take_turns_and_fast_ones_are_called_more_often_for_a_sample():
    fast, slow = (lambda: None), (lambda: 0)
    clock = MadeUpClock({fast: 3e-5, slow: 1e-3})
    samples, behind = measure_in_turn(clock, {"fast": fast, "slow": slow}, runs_ahead=True, seconds=0.02)
    assert {name: set(values) for name, values in samples.items()} == {"fast": {30.0}, "slow": {1000.0}}
    assert [calls for calls, _ in clock.asked[2:6]] == [10, 1, 10, 1]
    assert 3 <= len(samples["fast"]) <= 11
    assert behind == []


class MadeUpDevice:
    """What CudaClock uses of torch.cuda, on a device that runs at 1 GHz and takes 1 ms for each call."""

    def __init__(self):
        self.now = self.synchronized = 0.0

    def Event(self, enable_timing):  # noqa: N802
        assert enable_timing
        return MadeUpEvent(self)

    def _sleep(self, cycles):
        assert isinstance(cycles, int)
        self.now += cycles / 1e6

    def call(self):
        self.now += 1.0

    def synchronize(self):
        self.synchronized = self.now


class MadeUpEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.now

    def query(self):
        return self.device.synchronized >= self.at

    def synchronize(self):
        self.device.synchronized = self.at

    def elapsed_time(self, other):
        assert self.device.synchronized >= other.at, "the device is not there yet"
        return other.at - self.at


@pytest.mark.parametrize("sleeps", [True, False])
def test_the_clock_of_a_device(monkeypatch, sleeps):
    device = MadeUpDevice()
    for name in ("Event", "synchronize", *(["_sleep"] if sleeps else [])):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    if not sleeps:
        monkeypatch.delattr(torch.cuda, "_sleep")
    clock = CudaClock()
    seconds, ahead = clock.time(device.call, 4, head_start=0.5)
    assert seconds == pytest.approx(1e-3)  # without the head start
    assert ahead == sleeps
    assert clock.time(device.call, 1, head_start=0.0) == (pytest.approx(1e-3), False)
    samples, _ = measure_in_turn(clock, {"op": device.call}, runs_ahead=True, seconds=0.1)
    assert samples["op"] == [pytest.approx(1000.0)] * 11
    assert device.synchronized == device.now


def test_a_host_that_cannot_run_ahead_is_told():
    call = lambda: None  # noqa: E731
    clock = MadeUpClock({call: 1e-5}, host=1.0)
    samples, behind = measure_in_turn(clock, {"op": call}, runs_ahead=True, seconds=1e-3)
    assert behind == ["op"]
    assert len(samples["op"]) == 3
    assert max(head_start for _, head_start in clock.asked) <= 5e-2
    assert measure_in_turn(clock, {"op": call}, runs_ahead=False, seconds=1e-3)[1] == []
    assert Plan(clock, call, runs_ahead=False).head_start == 0


def test_the_group_of_one_is_what_an_empty_second_rank_would_make_it(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        communicator = one_rank.OneRankGroup()
        input, grad_output = torch.randn(2, 4, 3, 5).unbind()
        for _ in range(2):  # the second on rows that are there already
            x = input.clone().requires_grad_()
            layer = bagua_syncbn.SyncBatchNorm1d(3, process_group=communicator)
            output = layer(x)
            output.backward(grad_output)
            y = input.clone().requires_grad_()
            local = torch.nn.BatchNorm1d(3)
            local(y).backward(grad_output)
            torch.testing.assert_close(output, local(input))
            torch.testing.assert_close(x.grad, y.grad)
            assert layer.num_batches_tracked == 1
        assert "SyncBatchNorm" in type(output.grad_fn).__name__
    finally:
        dist.destroy_process_group()


# What it counts


def event(category, name, start, duration=1.0):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def test_a_trace_is_counted():
    recorded = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", "bagua_syncbn: counted", 100.0, 50.0),
            event("gpu_user_annotation", "bagua_syncbn: counted", 100.0, 50.0),
            event("cuda_runtime", "cudaDeviceSynchronize", 90.0),  # before
            event("cuda_runtime", "cudaLaunchKernel", 101.0),
            event("cuda_driver", "cuLaunchKernelEx", 102.0),
            event("cuda_runtime", "cudaMemcpyAsync", 103.0),
            event("cuda_runtime", "cudaStreamSynchronize", 104.0),
            event("cuda_runtime", "cudaEventSynchronize_v3020", 104.5),
            event("cuda_runtime", "cudaMemcpy_ptds_v7000", 104.6),
            event("cuda_runtime", "cudaMemcpyAsync_v3020", 104.7),
            event("cuda_runtime", "cudaEventQuery", 105.0),
            event("cpu_op", "c10d::_allgather_base_", 106.0),
            event("cpu_op", "aten::empty", 107.0),
            event("kernel", "planar_stats", 130.0),
            event("kernel", "merge_ranks", 190.0),  # the device is behind
            event("gpu_memcpy", "Memcpy DtoD", 131.0),
            event("gpu_memset", "Memset", 132.0),
            event("cuda_runtime", "cudaDeviceSynchronize", 160.0),  # after
        ]
    }
    assert counts.count(recorded) == {
        "kernels": 2,
        "copies": 1,
        "fills": 1,
        "collectives": 1,
        "waits": 3,
        "runtime": 5,
        "names": [
            "cudaEventSynchronize_v3020",
            "cudaMemcpy_ptds_v7000",
            "cudaStreamSynchronize",
            "merge_ranks",
            "planar_stats",
        ],
    }


def count_case(kernels=3, waits=0, runtime=9):
    counted = {"kernels": kernels, "copies": 1, "fills": 0, "collectives": 1, "waits": waits, "runtime": runtime}
    passes = {f"{side} {part}": counted for side in ("ours", "torch") for part in ("forward", "backward")}
    return {"kind": "counts", **shapes.Case("made up", (2, 3, 4, 4), "float32", "planar").record(), "counts": passes}


def test_counts_are_judged_by_the_most():
    recorded = results(count_case(kernels=2), count_case(kernels=3, waits=1))
    assert find(recorded, "kernels in a forward").met
    assert not find(recorded, "kernels in a backward").met
    assert (find(recorded, "waits in a forward").measured, find(recorded, "waits in a forward").met) == (1, False)
    # Nothing was seen of the device: that is not to have none.
    assert find(results(count_case(kernels=0, runtime=0)), "kernels in a forward").met is None


# What it makes of figures


def test_ops_are_compared_with_copying():
    size = 8 * 64 * 100 * 100 * 4
    recorded = results(ops_case(ours_elemt=2 * size / 1.5e6 / 0.9))
    case = recorded["cases"][1]
    assert targets.copy_bandwidth(recorded) == 1.5e6
    assert targets.fraction_of_copy(case, "elemt", 1.5e6) == pytest.approx(0.9)
    assert targets.fraction_of_copy(case, "stats", 1.5e6) == pytest.approx(size / 1.5e6 / 10)
    target = find(recorded, "of the copy bandwidth")
    assert target.measured == pytest.approx(0.9)
    assert target.where == "elemt 8x64x100x100 float32 planar"
    assert target.met
    slow = results(ops_case(ours_elemt=2 * size / 1.5e6 / 0.84))
    assert find(slow, "of the copy bandwidth").verdict == "MISSED"
    # Smaller than four caches, or a cache that is not known.
    assert find(results(ops_case(), cache=size // 4 + 1), "of the copy bandwidth").met is None
    assert find(results(ops_case(), cache=None), "of the copy bandwidth").verdict == "not measured"


def test_kernels_are_compared_with_atens():
    fast = {f"aten_{op}": 40.0 for op in shapes.OPS}
    recorded = results(ops_case(**fast), ops_case(), ops_case(layout="interleaved", aten_stats=9.0))
    assert find(recorded, "ours, planar, mean").measured == pytest.approx(2.0)
    assert find(recorded, "ours, planar, mean").met
    assert find(recorded, "ours, interleaved, mean").measured == pytest.approx(0.98)
    least = find(recorded, "ours, least")
    assert (least.measured, least.where) == (pytest.approx(0.98), "8x64x100x100 float32 interleaved")
    assert not least.met


def test_layers_are_compared_on_small_inputs():
    large = (8, 64, 50, 50)
    recorded = results(layer_case(10.0, 31.0), layer_case(10.0, 30.0), layer_case(10.0, 1.0, large))
    assert (find(recorded, "below 4 MB").measured, find(recorded, "below 4 MB").met) == (3.0, True)
    assert not find(results(layer_case(10.0, 29.0)), "below 4 MB").met


def test_nothing_measured_is_nothing_met():
    empty = {"machine": {}, "parts": [], "cases": []}
    assert {target.verdict for target in targets.judge(empty)} == {"not measured"}
    assert "not measured" in summary.full(empty)


def rows(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_tables_show_every_case():
    bad = {**ops_case(dtype="float16"), "behind": ["ours stats"], "disagreements": ["elemt"]}
    error = {"kind": "error", "what": "ops of something", "error": "OutOfMemoryError: no"}
    recorded = results(ops_case(), bad, layer_case(10.0, 31.0), count_case(), error)
    recorded["parts"] = [parts.Outcome("op tests", "timed out", 12.3, "no\n" * 9 + "the last line").record()]
    assert [row[0] for row in rows(summary.ops_table(recorded))[2:]] == [
        "8x64x100x100 float32 planar",
        "8x64x100x100 float16 planar",
    ]
    assert rows(summary.ops_table(recorded))[3][-1] == "disagrees: elemt; host-bound: ours stats"
    assert rows(summary.ops_table(recorded))[2][-2] == "1.00"
    assert rows(summary.layers_table(recorded))[2][1:] == ["10.0", "31.0", "10.0", "31.0", "3.10"]
    assert rows(summary.networks_table(recorded))[2][:3] == ["made up", "1.00, 3.10", "1.00, -"]
    short = summary.short(recorded)
    for part in (
        "timed out",
        "the last line",
        "8x64x100x100 float16 planar: elemt",
        "ops of something: OutOfMemoryError: no",
    ):
        assert part in short
    assert len(rows(summary.counts_table(recorded))) == 6
    assert "DRY RUN" not in short


def test_every_network_is_there():
    """The shapes that were promised: batches 2, 8 and 32 of ResNet-50, both U-Nets, and tensors of four caches."""
    planned = list(shapes.cases(shapes.NETWORKS))
    assert {(case.dtype, case.layout) for case in planned} == {(d, k) for d in shapes.DTYPES for k in shapes.LAYOUTS}
    sizes = {case.shape for case in planned}
    assert {(n, c, s, s) for n in (2, 8, 32) for c, s in shapes.RESNET50} <= sizes
    assert {512, 96} <= {shape[-1] for shape in sizes}
    assert (64, 8, 224, 224) in sizes
    four_caches = 4 * 60 * 2**20
    assert all(any(c.size >= four_caches and c.dtype == d for c in planned) for d in shapes.DTYPES)
    assert any(case.size < targets.SMALL for case in planned)
