"""The CUDA kernels compile for all cards that a wheel is for, and keep no registers in local memory."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.emulated import CSRC, compile_check

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
SOURCES = sorted(path for path in (CSRC / "cuda").glob("*.cu") if path.name != "check.cu")
REPORT = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores",
    re.DOTALL,
)


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", [75, 80, 86, 90, 100, 120])
def test_kernels_compile_without_warnings_and_no_kernel_spills_registers(arch, tmp_path):
    def report_on(source):
        command = [NVCC, "-std=c++17", "-O3", f"-arch=sm_{arch}", "-Xptxas=-v", "-cubin", source]
        command += ["-o", tmp_path / f"{source.stem}.cubin"]
        report = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
        assert "warning" not in report, report
        return {match["name"]: max(int(match["stack"]), int(match["stores"])) for match in REPORT.finditer(report)}

    with ThreadPoolExecutor(2) as pool:
        kernels = {name: size for report in pool.map(report_on, SOURCES) for name, size in report.items()}
    assert len(kernels) > 100
    assert {name: size for name, size in kernels.items() if size} == {}


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_the_check_compiles_without_torch(tmp_path):
    subprocess.run([NVCC, "-I", CSRC, CSRC / "cuda" / "check.cu", "-o", tmp_path / "check"], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "differ"), [
    (None, []),
    ("scale = invstd.as<A>() * weight.as<A>()", ["backward_elemt", "backward_reduce", "elemt"]),
], ids=["right", "without the weight"])  # fmt: skip
def test_the_check_tells_right_kernels_from_wrong_ones(emulated, tmp_path, wrong, differ):
    """In the emulator."""
    run = subprocess.run(compile_check(tmp_path, wrong), capture_output=True, text=True)
    assert re.findall(r"batch_norm_(\w+) +DIFFERS", run.stdout) == differ
    assert (run.stdout.count(" ok "), run.returncode) == (5 - len(differ), int(wrong is not None))
