"""``make gpu``: builds the kernels for this machine's GPU, tests them, also under compute-sanitizer, and measures them.

    python3 benchmarks/gpu/prove.py --output build/gpu

Needs a CUDA build of torch, nvcc, a C++ compiler and pytest, and no network; names what is missing. Each part has a
time limit, and none hides the others; all take less than eight minutes together. ``results.json``, made anew after each
part, has all that is known by then, ``log.txt`` all that was printed. Exits with 0 if every part passed, 1 if one did
not, and 2 if something was missing.
"""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import summary
from parts import Outcome, Runner

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BUILT = ROOT / "build" / "gpu-kernels"
TOTAL = 460.0
LIMITS = {
    "build": 150.0,
    "op tests": 90.0,
    "layer tests": 90.0,
    "memcheck": 75.0,
    "racecheck": 75.0,
    "benchmarks": 170.0,
    "further tests": 100.0,
    "bagua tests": 100.0,
}
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


def commands(arguments: argparse.Namespace, machine: dict[str, Any], left: float) -> dict[str, list[str]]:
    """What each part runs."""
    output, dry = arguments.output.resolve(), arguments.dry_run
    python, device = sys.executable, "cpu" if dry else "cuda"
    small = [python, str(HERE / "small_ops.py"), "--device", device]
    sanitizer = [machine["compute_sanitizer"] or "compute-sanitizer", "--error-exitcode", "9"]
    # torch asks for things that the driver may refuse, and copes: that is no error of ours.
    sanitizer += ["--report-api-errors", "no", "--tool"]
    seconds = min(LIMITS["benchmarks"], left) - 15  # to start, and to write
    # A test that hangs says where.
    pytest = [python, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    others = [path for path in with_marker("*/test_*.py") if "test_gpu" not in path and "bagua_job" not in path]
    build = [python, "setup.py", "-q", "build", "--build-temp", str(BUILT / "temp"), "--build-lib", str(BUILT / "lib")]
    return {
        "build": build,
        # In processes of their own: after an illegal access nothing runs any more in one.
        "op tests": [*pytest, *with_marker("gpu/test_gpu_ops.py")],
        "layer tests": [*pytest, *with_marker("gpu/test_gpu_layers.py")],
        "memcheck": small if dry else [*sanitizer, "memcheck", *small],
        "racecheck": small if dry else [*sanitizer, "racecheck", *small],
        "benchmarks": [python, str(HERE / "measure.py"), "--device", device, "--output", str(output / "cases.jsonl"),
                       "--seconds", str(int(seconds)), *(["--dry-run"] if dry else [])],
        "further tests": [*pytest, *others],
        "bagua tests": [*pytest, *with_marker("bagua_job/test_*.py")],
    }  # fmt: skip


def with_marker(pattern: str) -> list[str]:
    """The files with tests for a GPU. Others are not even imported: they may need what is not there."""
    files = (ROOT / "tests").glob(pattern)
    return sorted(str(path) for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8"))


def environment(part: str, machine: dict[str, Any], dry: bool) -> dict[str, str]:
    if part == "build":
        kind = {} if dry else {"BAGUA_SYNCBN_BUILD": "cuda"}
        return {**kind, "BAGUA_SYNCBN_CUDA_ARCHS": machine.get("architecture", "90")}
    always = {"PYTHONPATH": str(BUILT / "lib"), "PYTHONUNBUFFERED": "1", **LOOPBACK}
    if part.endswith("tests"):
        # Plugins of other projects on the machine have nothing to do with these tests.
        return {**always, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **({} if dry else {"FAIL_WITHOUT_CUDA": "1"})}
    if part in ("memcheck", "racecheck"):
        # Each tensor an allocation of its own, so that the first value after its end is seen.
        return {**always, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return always


def examine() -> dict[str, Any]:
    found = subprocess.run([sys.executable, str(HERE / "preflight.py")], capture_output=True, text=True, timeout=120)
    if found.returncode != 0:
        return {"machine": {}, "missing": [f"a Python that can say what there is:\n{found.stderr}"]}
    # Libraries may have printed something before.
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def commit() -> str | None:
    """The checkout's commit, with a plus if it was changed; None where there is no git, or no repository."""
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    try:
        found = subprocess.run(
            [*git, "describe", "--always", "--dirty=+", "--abbrev=12"], capture_output=True, text=True
        )
    except OSError:
        return None
    return found.stdout.strip() or None


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The cases measured, also by a run that was ended in the middle of a line."""
    cases = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            cases.append(json.loads(line))
        except ValueError:
            continue
    return cases


def write(results: dict[str, Any], path: Path) -> None:
    """Writes the results with one case to a line."""
    head = json.dumps({name: value for name, value in results.items() if name != "cases"}, indent=1)
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in results["cases"])
    path.write_text(f'{head[:-2]},\n "cases": [\n{lines}\n]}}\n', encoding="utf-8")


def main(given: list[str] | None = None) -> int:
    arguments = parse_arguments(given)
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    for name in ("results.json", "cases.jsonl"):  # of an earlier run
        (output / name).unlink(missing_ok=True)
    with (output / "log.txt").open("w", encoding="utf-8") as log:
        runner = Runner(log, TOTAL)
        found = examine()
        results = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "dry_run": arguments.dry_run,
            "machine": found["machine"],
            "missing": found["missing"],
            "parts": [],
            "cases": [],
        }
        write(results, output / "results.json")
        if found["missing"] and not arguments.dry_run:
            runner.say("make gpu: missing: " + "; ".join(found["missing"]))
            return 2
        outcomes = run_parts(arguments, runner, results)
        runner.say("\n" + summary.short(results))
        runner.say(f"\nresults: {output / 'results.json'}; log: {output / 'log.txt'}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def run_parts(arguments: argparse.Namespace, runner: Runner, results: dict[str, Any]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for i, part in enumerate(arguments.parts):
        if part == "bagua tests" and not results["machine"].get("bagua"):
            runner.say("== bagua tests: left out, Bagua is not installed")
            continue
        command = commands(arguments, results["machine"], runner.left)[part]
        settings = environment(part, results["machine"], arguments.dry_run)
        # What comes before the benchmarks leaves them their time, even if all of it hangs: figures there must be.
        kept = LIMITS["benchmarks"] if "benchmarks" in arguments.parts[i + 1 :] else 0.0
        # Not in the checkout, where Python would find the package with the kernels of another build, if any.
        directory = ROOT if part == "build" else HERE
        outcome = runner.run(part, command, min(LIMITS[part], runner.left - kept), settings, directory)
        outcomes.append(outcome)
        results["parts"] = [outcome.record() for outcome in outcomes]
        results["cases"] = read_cases(arguments.output / "cases.jsonl")
        write(results, arguments.output / "results.json")
        if part == "build" and not outcome.passed:
            runner.say("nothing to test or measure without a build")
            break
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
