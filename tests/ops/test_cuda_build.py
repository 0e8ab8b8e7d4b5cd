"""The CUDA kernels compile for all cards that a wheel supports, and csrc/cuda/check.cu finds wrong kernels."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.emulated import CSRC, compile_check

pytestmark = pytest.mark.slow

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", [75, 80, 86, 90, 100, 120])
def test_kernels_compile_without_warnings_and_register_spills(arch, tmp_path):
    flags = f"-std=c++17 -O3 -arch=sm_{arch} -Werror=all-warnings -Xptxas=-warn-spills,-warn-lmem-usage -cubin".split()

    def compile(source):
        subprocess.run([NVCC, *flags, source, "-o", tmp_path / f"{source.stem}.cubin"], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile, (CSRC / "cuda").glob("*.cu")))


@pytest.mark.parametrize(("wrong", "differ"), [
    (None, []),
    ("scale = invstd.as<A>() * weight.as<A>()", ["backward_elemt", "backward_reduce", "elemt"]),
], ids=["right", "without the weight"])  # fmt: skip
def test_the_check_tells_right_kernels_from_wrong_ones(emulated, tmp_path, wrong, differ):
    """In the emulator."""
    run = subprocess.run(compile_check(tmp_path, wrong), capture_output=True, text=True)
    assert re.findall(r"batch_norm_(\w+) +DIFFERS", run.stdout) == differ
    assert (run.stdout.count(" ok "), run.returncode) == (5 - len(differ), int(wrong is not None))
