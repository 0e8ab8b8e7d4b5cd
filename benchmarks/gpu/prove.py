"""``make gpu``: builds the kernels for this machine's GPU, tests them, also under compute-sanitizer, and measures them.

    python3 benchmarks/gpu/prove.py --output build/gpu

Needs a CUDA build of torch, nvcc, a C++ compiler and setuptools 64, and no network; names what is missing. Each part
is a process of its own with a time limit, and none hides another; all take less than eight minutes, and longer only
where torch takes long to be imported. ``results.json``, made anew twice a second, has all that is known by then,
``log.txt`` all that was printed and tables of every input. Exits with 0 if every part passed, 1 if one did not, 2 if
something was missing.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata, util
from math import ceil
from pathlib import Path
from typing import Any

started = time.monotonic()
import torch  # noqa: E402 - the time that it takes is taken
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.modules._functions import SyncBatchNorm  # noqa: E402
from torch.utils.benchmark import Timer  # noqa: E402

IMPORTING = time.monotonic() - started  # from a slow disk perhaps: time limits are longer by as much
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import one_rank, recorded  # noqa: E402 - found through the line above
from benchmarks.gpu import report, shapes  # noqa: E402
from benchmarks.gpu.shapes import Case  # noqa: E402

BUILT = ROOT / "build" / "gpu-kernels"
TESTS = {
    "op tests": ["tests/gpu/test_gpu_ops.py"],
    "layer tests": ["tests/gpu/test_gpu_layers.py"],
    "further tests": ["tests/data_parallel", "tests/bagua_job"],
}
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Parts that run side by side, with their seconds. The benchmarks run alone; what hangs before them leaves them theirs.
STAGES = ((("build",), 280), (tuple(TESTS), 110), (("benchmarks",), 150), (TOOLS, 150))
PARTS = [part for parts, _ in STAGES for part in parts]
TOTAL = 465
# One machine, no network: NCCL and gloo talk over the loopback interface and look for no other.
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
EPS, MOMENTUM = 1e-5, 0.1
# Differences of our results and ATen's that rounding explains, relative to the largest value.
AGREEMENT = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: all parts, on a few tiny CPU tensors")
    parser.add_argument("--measure", nargs=2, metavar=("FILE", "SECONDS"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def find_tool(name: str) -> str | None:
    places = [f"{os.environ.get('CUDA_HOME', '')}/bin/{name}", name, f"/usr/local/cuda/bin/{name}"]  # as setup.py
    return next((path for place in places if (path := shutil.which(place))), None)


def first_line(*command: str, having: str = "") -> str | None:
    """The first line of what a command prints that has ``having`` in it; None if there is none."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next((line.strip() for line in output.splitlines() if having in line), None)


def release(package: str) -> int:
    return int(metadata.version(package).split(".")[0])


def examine() -> tuple[dict[str, Any], list[str]]:
    """Returns facts about the machine, and the names of what is missing."""
    nvcc, compiler = find_tool(os.environ.get("NVCC", "nvcc")), os.environ.get("CXX", "g++").split()
    facts: dict[str, Any] = {
        "torch": torch.__version__, "torch_cuda": torch.version.cuda, "python": platform.python_version(),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": nvcc and first_line(nvcc, "--version", having="release"),
        "compiler": first_line(*compiler, "--version"), "compute_sanitizer": find_tool("compute-sanitizer"),
        "pytest": metadata.version("pytest") if util.find_spec("pytest") else None,
    }  # fmt: skip
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        facts |= {"card": device.name, "architecture": f"{device.major}{device.minor}"}
        facts |= {"multiprocessors": device.multi_processor_count, "l2_bytes": device.L2_cache_size}
    needed = {
        "torch 2.10 or later": tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10),
        "a CUDA build of torch that sees a device": torch.cuda.is_available(),
        "NCCL in torch": dist.is_nccl_available(),
        "nvcc (set NVCC or CUDA_HOME)": facts["nvcc"],
        "a C++17 compiler (g++, or set CXX)": facts["compiler"],
        "setuptools 64 or later": util.find_spec("setuptools") and release("setuptools") >= 64,
        "Python.h (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    return facts, [name for name, found in needed.items() if not found]


def copy_sources() -> None:
    """Copies what is built apart from any other build, without pyproject.toml, which setuptools before 77 refuses."""
    for name in ("bagua_syncbn", "csrc"):
        shutil.rmtree(BUILT / name, ignore_errors=True)
        shutil.copytree(ROOT / name, BUILT / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", BUILT)


def command(part: str, machine: dict[str, Any], dry: bool, cases: Path, limit: float) -> list[str] | str:
    """Returns the program that a part runs, or the reason why it is left out."""
    if part == "build":
        copy_sources()
        return [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", ".", "build_py", "--build-lib", "."]
    if part == "benchmarks":  # with time to start and to write
        seconds = "30" if dry else str(max(5, limit - 15 - IMPORTING))
        return [sys.executable, __file__, *(["--dry-run"] if dry else []), "--measure", str(cases), seconds]
    tests = [str(ROOT / path) for path in TESTS.get(part, TESTS["op tests"])]
    tests += [] if part in TESTS else ["-k", "every_kernel"]
    if machine["pytest"]:  # a test that hangs says where
        runner = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    elif part == "further tests":
        return "they need pytest"
    else:
        runner = [str(ROOT / "tests" / "gpu" / "without_pytest.py")]
    sanitizer, tests = machine["compute_sanitizer"], [sys.executable, *runner, *tests]
    if part in TESTS or dry:
        return tests
    if not sanitizer:
        return "there is no compute-sanitizer"
    # Our kernels alone, where the option is known. What the driver refuses torch is no error of theirs.
    chosen = ["--kernel-name", "kns=bagua_syncbn"] if first_line(sanitizer, "--help", having="--kernel-name ") else []
    return [sanitizer, "--tool", part, *chosen, "--report-api-errors", "no", "--error-exitcode", "9", *tests]


def environment(part: str, machine: dict[str, Any], dry: bool) -> dict[str, str]:
    if part == "build":
        kind = {"BAGUA_SYNCBN_BUILD": "cuda", "BAGUA_SYNCBN_CUDA_ARCHS": machine.get("architecture", "")}
        return {"BAGUA_SYNCBN_BUILD": "cpu", "CXX": "true"} if dry else kind  # a compiler that does nothing
    # The build comes before the checkout, which may have kernels of another build.
    always = {"PYTHONPATH": f"{BUILT}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **LOOPBACK}
    if part in TOOLS:  # each tensor an allocation of its own, so that the first value after its end is seen
        always["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return always if dry else always | {"FAIL_WITHOUT_CUDA": "1"}


def run_stage(programs: dict[str, Any], limit: float, tick: Callable[[], None], log: Any) -> list[dict[str, Any]]:
    """Runs programs, given with their environment, side by side for at most so many seconds; returns how they ended.

    What they print goes to the log. Calls ``tick`` twice a second.
    """
    start, running, seconds, outcomes = time.monotonic(), {}, {}, []
    for part, (words, settings) in programs.items():
        output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with its program
        running[part] = output, subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            cwd=BUILT, env=os.environ | settings,
        )  # fmt: skip
    while len(seconds) < len(running) and time.monotonic() < start + limit:
        time.sleep(0.5)
        ended = [part for part, (_, process) in running.items() if process.poll() is not None]
        seconds |= {part: time.monotonic() - start for part in ended if part not in seconds}
        tick()
    for part, (output, process) in running.items():
        status = process.poll()
        with suppress(ProcessLookupError):  # and its children
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with output:
            output.seek(0)
            said = output.read()
        log.write(f"== {part}: {' '.join(programs[part][0])}\n{said}\n")
        outcome = "timed out" if status is None else "passed" if status == 0 else "failed"
        details = "" if outcome == "passed" else "\n".join(said.splitlines()[-15:])
        print(f"{part}: {outcome}\n{details}".rstrip(), flush=True)
        outcomes.append({"name": part, "outcome": outcome, "seconds": seconds.get(part, limit), "details": details})
    return outcomes


def inputs(case: Case, device: torch.device, cache: int) -> list[Any]:
    """Returns pairs of x and dy, so many that the cache holds none until it comes again."""
    dtype = getattr(torch, case.dtype)
    stride = ceil(case.size / 512) * 512 // dtype.itemsize  # where an allocation of its own could begin
    count = max(1, min(1024, ceil(4 * cache / case.size)))

    def lay_out(values: Any) -> Any:
        batch, channels, *inner = case.shape
        planar = case.layout == "planar"
        return values.view(case.shape) if planar else values.view(batch, *inner, channels).movedim(-1, 1)

    pools = [torch.empty(count * stride, dtype=dtype, device=device).normal_() for _ in range(2)]
    return [[lay_out(p[i * stride : i * stride + case.values]) for p in pools] for i in range(count)]


def device_times(calls: dict[str, Any]) -> dict[str, list[float]]:
    """Microseconds of a call on the device: of ten that the host queues while the device is kept waiting."""
    if not torch.cuda.is_available():
        return host_times(calls, 0.0)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i, (name, call) in enumerate(list(calls.items()) * 7):
        torch.cuda._sleep(2_000_000)  # cycles, a millisecond or more
        begin.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        samples[name] += [begin.elapsed_time(end) * 100] if i >= len(calls) else []  # the first round warms up
    return samples


def host_times(calls: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Microseconds of a call among others, the host's work and all, measured for about so many seconds."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in list(calls.items()) * 3:  # in turn
        measured = Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=seconds / len(calls) / 3)
        samples[name].append(1e6 * measured.median)
    return samples


def op_calls(x: Any, dy: Any) -> dict[str, Any]:
    """Our five ops, and ATen's five kernels as torch.nn.SyncBatchNorm calls them."""
    from bagua_syncbn import ops

    weight, bias = torch.randn(2, x.size(1), device=x.device).unbind()
    running, batches = (torch.zeros_like(bias), torch.ones_like(bias)), torch.tensor(0, device=x.device)
    packed = ops.batch_norm_stats(x)[None]
    mean, invstd, count = ops.batch_norm_gather_stats(packed, None, None, None, MOMENTUM, EPS)
    sums = ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight)[0]
    factors, wide, narrow, parts = (mean, invstd, weight), count.view(1).float(), count.view(1).int(), sums.chunk(2)
    gather = torch.batch_norm_gather_stats_with_counts
    return {
        "ours stats": lambda x, dy: ops.batch_norm_stats(x),
        "aten stats": lambda x, dy: torch.batch_norm_stats(x, EPS),
        "ours gather_stats": lambda x, dy: ops.batch_norm_gather_stats(packed, *running, batches, MOMENTUM, EPS),
        "aten gather_stats": lambda x, dy: gather(x, mean[None], invstd[None], *running, MOMENTUM, EPS, wide),
        "ours elemt": lambda x, dy: ops.batch_norm_elemt(x, weight, bias, mean, invstd),
        "aten elemt": lambda x, dy: torch.batch_norm_elemt(x, weight, bias, mean, invstd, EPS),
        "ours backward_reduce": lambda x, dy: ops.batch_norm_backward_reduce(dy, x, *factors),
        "aten backward_reduce": lambda x, dy: torch.batch_norm_backward_reduce(dy, x, *factors, True, True, True),
        "ours backward_elemt": lambda x, dy: ops.batch_norm_backward_elemt(dy, x, weight, mean, invstd, sums, count),
        "aten backward_elemt": lambda x, dy: torch.batch_norm_backward_elemt(dy, x, *factors, *parts, narrow),
    }


def disagreements(case: Case, results: dict[str, Any]) -> Iterator[str]:
    """The ops whose results are further from ATen's than rounding explains."""
    ours = results["ours stats"][: case.channels], results["ours backward_reduce"][0]
    atens = results["aten stats"][0], torch.cat(results["aten backward_reduce"][:2])
    pairs = {op: (results[f"ours {op}"], results[f"aten {op}"], 1.0) for op in ("elemt", "backward_elemt")}
    pairs["stats"] = ours[0], atens[0], 1.0
    pairs["backward_reduce"] = ours[1], atens[1], case.values / case.channels / 100  # terms of size 1 cancel
    for op, (actual, expected, scale) in pairs.items():
        allowed = AGREEMENT[case.dtype] * max(scale, float(expected.abs().max()))
        if not (actual.float() - expected.float()).abs().max() <= allowed:
            yield op


def measure_ops(case: Case, sets: list[Any]) -> dict[str, Any]:
    calls, following, on_cpu = op_calls(*sets[0]), itertools.cycle(sets), not sets[0][0].is_cuda
    if on_cpu:  # ATen's are not there
        calls = {name: call for name, call in calls.items() if name.startswith("ours")}
    if case.shape in shapes.PUBLISHED:
        factors = torch.zeros(4, case.channels, device=sets[0][0].device).unbind()
        calls["F.batch_norm"] = lambda x, dy: F.batch_norm(x, *factors, True, MOMENTUM, EPS)
    wrong = [] if on_cpu else list(disagreements(case, {name: call(*sets[0]) for name, call in calls.items()}))
    timed = device_times({name: lambda call=call: call(*next(following)) for name, call in calls.items()})
    return {"microseconds": timed, "disagreements": wrong}


def measure_layers(case: Case, sets: list[Any], seconds: float) -> dict[str, Any]:
    """Our layer, and the function of torch.nn.SyncBatchNorm, over a group of one rank, the path of several forced."""
    import bagua_syncbn

    device = sets[0][0].device
    layer = bagua_syncbn.SyncBatchNorm(
        case.channels, EPS, MOMENTUM, device=device, process_group=one_rank.OneRankGroup()
    )
    parameters, running = list(layer.parameters()), (layer.running_mean, layer.running_var)
    following = itertools.cycle([(x.detach().requires_grad_(), dy) for x, dy in sets])

    def torchs(x: Any) -> Any:
        layer.num_batches_tracked.add_(1)
        return SyncBatchNorm.apply(x, *parameters, *running, EPS, MOMENTUM, dist.group.WORLD, 1)

    def step(forward: Any) -> None:
        x, dy = next(following)
        torch.autograd.grad(forward(x), (x, *parameters), dy)

    calls: dict[str, Any] = {}
    for name, forward in {"ours": layer, "torch": torchs}.items():
        if name == "ours" or device.type == "cuda":
            calls[f"{name} forward"] = lambda forward=forward: forward(next(following)[0])
            calls[f"{name} step"] = lambda forward=forward: step(forward)
    return {"microseconds": host_times(calls, seconds)}


def measure(path: Path, seconds: float, dry: bool) -> None:
    """Writes a line of JSON for each case as soon as it is measured."""
    start, errors = time.monotonic(), 0
    torch.set_num_threads(1)
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    cache = 2**16 if dry else torch.cuda.get_device_properties(0).L2_cache_size
    job = {"backend": "gloo"} if dry else {"backend": "nccl", "device_id": device}
    dist.init_process_group(init_method=f"file://{path}.store", rank=0, world_size=1, **job)
    cases = [*shapes.cases(shapes.TINY)] if dry else [*shapes.published(), *shapes.cases(shapes.NETWORKS)]
    with path.open("w", encoding="utf-8") as output:

        def say(**values: Any) -> None:
            print(json.dumps(values), file=output, flush=True)

        source = torch.zeros(8 * cache, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        say(kind="copy", bytes=2 * len(source), microseconds=device_times({"copy": lambda: target.copy_(source)}))
        for i, case in enumerate(cases):
            if time.monotonic() > start + seconds:
                say(kind="left out", cases=len(cases) - i)
                break
            try:
                sets = inputs(case, device, cache)
                say(kind="ops", **case.record(), **measure_ops(case, sets))
                each = (start + seconds - time.monotonic()) / (len(cases) - i) / 2
                say(kind="layer", **case.record(), **measure_layers(case, sets, max(each, 0.0)))
            except Exception as error:
                errors += 1
                traceback.print_exc()
                say(kind="error", what=str(case), error=f"{type(error).__name__}: {error}".splitlines()[0])
                if "CUDA error" in str(error):  # the context is lost, and each further call would say the same
                    break
    os._exit(min(errors, 1))  # all is written, and destroying a communicator can hang


def main(given: list[str] | None = None) -> int:
    arguments = parse_arguments(given)
    if arguments.measure:
        measure(Path(arguments.measure[0]), float(arguments.measure[1]), arguments.dry_run)
    machine, missing = examine()
    if missing and not arguments.dry_run:
        print("make gpu: missing: " + "; ".join(missing))
        return 2
    output: Path = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    BUILT.mkdir(parents=True, exist_ok=True)
    results: recorded.Results = {
        "date": str(datetime.date.today()), "commit": recorded.find_commit(), "dry_run": arguments.dry_run,
        "machine": machine, "parts": [], "cases": [],
    }  # fmt: skip
    deadline = time.monotonic() + TOTAL + len(STAGES) * IMPORTING
    with tempfile.TemporaryDirectory() as directory, (output / "log.txt").open("w", encoding="utf-8") as log:
        cases = Path(directory, "cases.jsonl")

        def save() -> None:
            lines = cases.read_text("utf-8").split("\n")[:-1] if cases.exists() else []
            results["cases"] = [json.loads(line) for line in lines]
            recorded.write(results, output / "results.new")
            (output / "results.new").replace(output / "results.json")

        for i, (parts, seconds) in enumerate(STAGES):
            limit = min(seconds + IMPORTING, deadline - time.monotonic() - (STAGES[2][1] if i < 2 else 0))
            programs = {}
            for part in (part for part in parts if part in arguments.parts):
                chosen = command(part, machine, arguments.dry_run, cases, limit)
                if isinstance(chosen, str):
                    left_out = {"name": part, "outcome": f"left out: {chosen}", "seconds": 0.0, "details": ""}
                    results["parts"].append(left_out)
                else:
                    programs[part] = chosen, environment(part, machine, arguments.dry_run)
            results["parts"] += run_stage(programs, limit, save, log)
            save()
        log.write(report.tables(results, every_input=True))
    print(f"\n{report.tables(results)}\n\nresults: {output / 'results.json'}; log: {output / 'log.txt'}")
    return int(any(part["outcome"] in ("failed", "timed out") for part in results["parts"]))


if __name__ == "__main__":
    sys.exit(main())
