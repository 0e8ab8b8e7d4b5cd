"""The CUDA kernels compile for all cards that a wheel supports."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.emulated import CSRC

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
