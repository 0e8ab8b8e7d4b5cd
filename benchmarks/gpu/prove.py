"""``make gpu``: builds the kernels for this machine's GPU, tests them, also under compute-sanitizer, and measures them.

    python3 benchmarks/gpu/prove.py --output build/gpu

Needs a CUDA build of torch, nvcc and a C++ compiler, and no network; names what is missing. pytest is used where it is.
Each part has a time limit, and none hides another; all take less than eight minutes together, and longer only where
torch takes long to be imported. ``results.json``, made anew after each case, has all that is known by then, and
``log.txt`` all that was printed. Exits with 0 if every part passed, 1 if one did not, 2 if something was missing.
"""

import argparse
import datetime
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.core import records  # noqa: E402 - found through the line above
from benchmarks.gpu import report  # noqa: E402
from benchmarks.gpu.runner import Outcome, Runner  # noqa: E402

HERE = Path(__file__).resolve().parent
BUILT = ROOT / "build" / "gpu-kernels"
TOTAL = 470.0
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
LIMITS = {
    "build": 290.0,  # without which there is nothing to do
    "op tests": 90.0,
    "layer tests": 90.0,
    "benchmarks": 170.0,
    "memcheck": 60.0,
    "racecheck": 60.0,
    "synccheck": 60.0,
    "initcheck": 60.0,
    "further tests": 100.0,
    "bagua tests": 100.0,
}
# To import torch, from a slow disk perhaps: the limits are longer by as much as that took.
PREFLIGHT = 300.0
# One machine, no network: NCCL and gloo are to talk over the loopback interface, and not to look for another.
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--parts", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument(
        "--dry-run", action="store_true", help="on a machine without a GPU: the same parts on a few tiny CPU tensors"
    )
    return parser.parse_args(arguments)


def command(part: str, arguments: argparse.Namespace, machine: dict[str, Any], limit: float) -> list[str] | str:
    """What a part runs, or why it is left out."""
    dry, python = arguments.dry_run, sys.executable
    device = ["--device", "cpu" if dry else "cuda"]
    if part == "build":
        return [python, str(HERE / "build.py"), str(BUILT)]
    if part == "benchmarks":
        measure = [python, "-m", "benchmarks.gpu.measure", *device, *(["--dry-run"] if dry else [])]
        output = arguments.output.resolve() / "cases.jsonl"
        # Less the time to start, and to write.
        seconds = max(10, limit - 15 - machine.get("import_seconds", 0.0))
        return [*measure, "--output", str(output), "--seconds", str(int(seconds))]
    if part in TOOLS:
        small = [python, "-m", "benchmarks.gpu.small_ops", *device]
        sanitizer = machine.get("compute_sanitizer")
        if not dry and sanitizer is None:
            return "there is no compute-sanitizer"
        # torch asks for things that the driver may refuse, and copes: that is no error of ours.
        sanitize = [sanitizer, "--error-exitcode", "9", "--report-api-errors", "no", "--tool", part]
        return small if dry else [*sanitize, *small]
    files = test_files(part)
    if part == "bagua tests" and not machine.get("bagua"):
        return "Bagua is not installed"
    if machine.get("pytest"):  # a test that hangs says where
        return [python, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", *files]
    if part in ("further tests", "bagua tests"):
        return "they need pytest"
    return [python, str(HERE / "plain_tests.py"), *files]


def test_files(part: str) -> list[str]:
    """The files with tests for a GPU. Others are not even imported: they may need what is not there."""
    marked = [path for path in (ROOT / "tests").glob("*/test_*.py") if "pytest.mark.gpu" in path.read_text("utf-8")]
    own = {"op tests": "test_gpu_ops.py", "layer tests": "test_gpu_layers.py"}
    if part in own:
        return [str(path) for path in marked if path.name == own[part]]
    bagua = part == "bagua tests"
    others = (path for path in marked if path.name not in own.values())
    return sorted(str(path) for path in others if (path.parent.name == "bagua_job") == bagua)


def environment(part: str, machine: dict[str, Any], dry: bool) -> dict[str, str]:
    if part == "build":
        kind = {} if dry else {"BAGUA_SYNCBN_BUILD": "cuda"}
        return {**kind, "BAGUA_SYNCBN_CUDA_ARCHS": machine.get("architecture", "90")}
    # What was built comes before the checkout, which may have kernels of another build.
    always = {"PYTHONPATH": f"{BUILT}:{ROOT}", "PYTHONUNBUFFERED": "1", **LOOPBACK}
    if part.endswith("tests"):
        # Plugins of other projects on the machine have nothing to do with these tests.
        return {**always, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **({} if dry else {"FAIL_WITHOUT_CUDA": "1"})}
    if part in TOOLS:
        # Each tensor an allocation of its own, so that the first value after its end is seen.
        return {**always, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return always


def examine() -> dict[str, Any]:
    """What preflight.py says; libraries may have printed something before."""
    try:
        found = subprocess.run(
            [sys.executable, str(HERE / "preflight.py")], capture_output=True, text=True, timeout=PREFLIGHT
        )
        result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"machine": {}, "missing": [f"a torch that can be imported in {PREFLIGHT:.0f} seconds"]}
    except (ValueError, IndexError):
        return {"machine": {}, "missing": [f"a Python that can say what there is:\n{found.stderr}"]}
    return result


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The cases measured, also by a run that was ended in the middle of a line."""
    cases = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            cases.append(json.loads(line))
        except ValueError:
            continue
    return cases


def save(results: dict[str, Any], output: Path) -> None:
    """Whole at any time: whoever ends this in the middle finds the file as it was or as it is."""
    results["cases"] = read_cases(output / "cases.jsonl")
    records.write(results, output / "results.new")
    (output / "results.new").replace(output / "results.json")


def run_parts(arguments: argparse.Namespace, runner: Runner, results: dict[str, Any]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    importing = results["machine"].get("import_seconds", 0.0)
    for i, part in enumerate(arguments.parts):
        # What comes before the benchmarks leaves them their time, even if all of it hangs: figures there must be.
        kept = LIMITS["benchmarks"] + importing if "benchmarks" in arguments.parts[i + 1 :] else 0.0
        limit = min(LIMITS[part] + importing, runner.left - kept)
        chosen = command(part, arguments, results["machine"], limit)
        if isinstance(chosen, str):
            runner.say(f"== {part}: left out, {chosen}")
            results["parts"].append(Outcome(part, f"left out: {chosen}").record())
            continue
        settings = environment(part, results["machine"], arguments.dry_run)
        # Not in the checkout, where Python would look for the package first.
        directory = ROOT if part == "build" else arguments.output
        outcome = runner.run(part, chosen, limit, settings, directory, partial(save, results, arguments.output))
        outcomes.append(outcome)
        results["parts"].append(outcome.record())
        save(results, arguments.output)
        if part == "build" and not outcome.passed:
            runner.say("nothing to test or measure without a build")
            break
    return outcomes


def main(given: list[str] | None = None) -> int:
    arguments = parse_arguments(given)
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    for name in ("results.json", "cases.jsonl"):  # of an earlier run
        (output / name).unlink(missing_ok=True)
    results = {
        "date": datetime.date.today().isoformat(), "commit": records.find_commit(), "dry_run": arguments.dry_run,
        **examine(), "parts": [],
    }  # fmt: skip
    with (output / "log.txt").open("w", encoding="utf-8") as log:
        importing = results["machine"].get("import_seconds", 0.0)
        runner = Runner(log, TOTAL + len(arguments.parts) * importing)
        save(results, output)
        if results["missing"] and not arguments.dry_run:
            runner.say("make gpu: missing: " + "; ".join(results["missing"]))
            return 2
        outcomes = run_parts(arguments, runner, results)
        runner.say("\n" + report.short(results))
        runner.say(f"\nresults: {output / 'results.json'}; log: {output / 'log.txt'}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
