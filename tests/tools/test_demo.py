"""The examples: what ``make demo`` shows, in a few steps, and how it judges what it has measured."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

for _package in ("matplotlib", "sklearn", "tqdm"):
    pytest.importorskip(_package, reason=f"the examples need {_package}: pip install -e '.[demo]'")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "train_digits.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
STEPS = 10


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_digits():
    return load_example("train_digits")


@pytest.fixture(scope="module")
def demo():
    return load_example("demo")


@pytest.fixture(scope="module")
def run_script(tmp_path_factory):
    """Returns a function that runs the script for a few steps on the CPU, and returns what it wrote and showed."""

    def run(launcher, *arguments):
        output = tmp_path_factory.mktemp("digits") / "run.json"
        script = [SCRIPT, "--steps", str(STEPS), "--dtype", "float64", "--output", output, *arguments]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, *map(str, script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return SimpleNamespace(**json.loads(output.read_text()), stdout=done.stdout, stderr=done.stderr)

    return run


@pytest.fixture(scope="module")
def reference(run_script):
    return run_script([])


def largest_gap(run, reference):
    return max(abs(loss - other) for loss, other in zip(run.losses, reference.losses, strict=True))


def test_one_process_learns_and_shows_its_progress(reference):
    assert len(reference.losses) == STEPS
    assert reference.losses[0] == pytest.approx(math.log(10), abs=0.5)  # ten classes, nothing learnt yet
    assert reference.losses[-1] < reference.losses[0]
    assert 0.1 < reference.test_accuracy <= 1
    assert f"{STEPS}/{STEPS}" in reference.stderr
    assert f"loss={reference.losses[-1]:.4f}" in reference.stderr
    assert f"final loss {reference.losses[-1]:.4f}, test accuracy {reference.test_accuracy:.2%}" in reference.stdout


def test_synchronized_ranks_under_torchrun_train_like_one_process(run_script, reference):
    synced = run_script(TORCHRUN)
    assert largest_gap(synced, reference) < 1e-12
    assert synced.test_accuracy == reference.test_accuracy
    assert synced.stdout.count("final loss") == 1  # rank 0 alone reports


def test_the_order_of_samples_depends_on_the_seed_alone(train_digits):
    def epoch(seed, batch_size):
        batches = train_digits.global_batches(20, batch_size, seed)
        return torch.cat([next(batches) for _ in range(20 // batch_size)]).tolist()

    assert sorted(epoch(0, 4)) == list(range(20))
    assert epoch(0, 4) == epoch(0, 10)
    assert epoch(0, 4) != epoch(1, 4)
    batches = train_digits.global_batches(10, 4, seed=0)
    assert [len(next(batches)) for _ in range(5)] == [4] * 5  # incomplete ones are left out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "8"], "--batch-size: expected a multiple of 3, the number of ranks, up to 1437, .* got 8"),
        (["--batch-size", "3000"], "--batch-size: expected a multiple of 3, .* got 3000"),
        (["--batch-size", "9", "--steps", "0"], "--epochs, --steps: expected at least one step, got 0"),
    ],
)
def test_wrong_arguments_are_refused(train_digits, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(train_digits, "join_job", lambda: torch.device("cpu"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        train_digits.main()
    assert re.search(message, capsys.readouterr().err)


BAGUA = {"BAGUA_SERVICE_PORT": "29501"}


@pytest.mark.parametrize(
    ("launcher", "cuda_devices", "device", "calls"),
    [
        pytest.param(None, 0, "cpu", [], id="python"),
        pytest.param({}, 0, "cpu", [("torch", "gloo")], id="torchrun"),
        pytest.param({}, 2, "cuda:1", [("set_device", "cuda:1"), ("torch", "nccl")], id="torchrun, CUDA"),
        pytest.param({}, 1, "cpu", [("torch", "gloo")], id="torchrun, fewer devices than ranks"),
        pytest.param(BAGUA, 2, "cuda:1", [("set_device", "cuda:1"), ("bagua",)], id="Bagua's launcher, CUDA"),
    ],
)
def test_the_launcher_decides_the_engine(train_digits, monkeypatch, launcher, cuda_devices, device, calls):
    for variable in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *BAGUA):
        monkeypatch.delenv(variable, raising=False)
    if launcher is not None:
        for variable, value in {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **launcher}.items():
            monkeypatch.setenv(variable, value)
    made = []
    bagua = ModuleType("bagua")
    bagua.torch_api = ModuleType("bagua.torch_api")
    bagua.torch_api.init_process_group = lambda: made.append(("bagua",))
    monkeypatch.setitem(sys.modules, "bagua", bagua)
    monkeypatch.setitem(sys.modules, "bagua.torch_api", bagua.torch_api)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: made.append(("torch", backend)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda_devices)
    monkeypatch.setattr(torch.cuda, "set_device", lambda chosen: made.append(("set_device", str(chosen))))
    assert str(train_digits.join_job()) == device
    assert made == calls


def test_loss_gaps(demo):
    assert demo.loss_gaps([1.0, 2.0, 3.5], [1.0, 2.5, 3.0]) == [0.0, 0.5, 0.5]
    assert demo.loss_gaps([math.nan, math.inf, 1.0], [1.0, math.inf, math.nan]) == [math.inf] * 3
    with pytest.raises(ValueError, match="losses: expected 2 steps, as in reference, got 1"):
        demo.loss_gaps([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("synced", "unsynced", "failures"),
    [
        (0.0, math.inf, []),
        (1e-9, 1e-2, []),
        (2e-9, 1.0, ["synced: expected a largest gap of at most 1e-09, got 2.0e-09"]),
        (math.nan, 1.0, ["synced: expected a largest gap of at most 1e-09, got nan"]),
        (0.0, 9e-3, ["unsynced: expected a largest gap of at least 1e-02, got 9.0e-03"]),
        (0.0, math.nan, ["unsynced: expected a largest gap of at least 1e-02, got nan"]),
    ],
)
def test_what_is_a_failure(demo, synced, unsynced, failures):
    found = demo.find_failures(synced, unsynced)
    assert [failure[: len(start)] for failure, start in zip(found, failures, strict=True)] == failures


def run_demo(demo, monkeypatch, directory, losses):
    monkeypatch.setattr(demo, "OUTPUT", directory)
    monkeypatch.setattr(demo, "train", lambda name: {"losses": losses[name], "test_accuracy": 0.9625})
    demo.main()


def test_the_demo_writes_its_results_and_shows_a_table(demo, monkeypatch, tmp_path, capsys):
    losses = {"reference": [2.25, 1.0], "synced": [2.25, 1.0 + 1e-12], "unsynced": [2.5, 1.75]}
    run_demo(demo, monkeypatch, tmp_path / "build" / "demo", losses)
    results = json.loads((tmp_path / "build" / "demo" / "results.json").read_text())
    assert results == {
        name: {"losses": losses[name], "test_accuracy": 0.9625, "max_gap": pytest.approx(gap, rel=1e-3, abs=0)}
        for name, gap in {"reference": 0.0, "synced": 1e-12, "unsynced": 0.75}.items()
    }
    table = capsys.readouterr().out.splitlines()
    assert "reference         1.0000          96.25%" in table
    assert "synced            1.0000          96.25%                    1.0e-12" in table
    assert "unsynced          1.7500          96.25%                    7.5e-01" in table
    assert (tmp_path / "build" / "demo" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_and_still_writes_what_it_measured(demo, monkeypatch, tmp_path):
    losses = {"reference": [2.25, 1.0], "synced": [2.25, 1.0001], "unsynced": [2.25, 1.0001]}
    with pytest.raises(SystemExit, match=r"synced: expected .*\nunsynced: expected ") as exit_info:
        run_demo(demo, monkeypatch, tmp_path, losses)
    assert isinstance(exit_info.value.code, str)  # which sys.exit prints, with status 1
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "loss.png"}


@pytest.mark.parametrize(("cuda_devices", "visible"), [(1, ""), (4, None)])
def test_the_demo_runs_the_script_in_three_ways_on_equal_terms(demo, monkeypatch, tmp_path, cuda_devices, visible):
    commands = []

    def run(command, env):
        assert env["OMP_NUM_THREADS"] == "1"
        assert env.get("CUDA_VISIBLE_DEVICES") == visible
        commands.append(command)
        Path(command[command.index("--output") + 1]).write_text('{"losses": [1.0], "test_accuracy": 0.5}')
        return SimpleNamespace(returncode=0)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(demo, "OUTPUT", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda_devices)
    for name in demo.RUNS:
        assert demo.train(name) == {"losses": [1.0], "test_accuracy": 0.5}
    four_ranks = ["torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    assert [command[2:5] == four_ranks for command in commands] == [False, True, True]
    assert ["--no-sync" in command for command in commands] == [False, False, True]
    assert all(str(SCRIPT) in command and command[command.index("--dtype") + 1] == "float64" for command in commands)
