"""What the second pass over a tensor finds in L2, simulated: ``python -m benchmarks.gpu.cache`` prints a table.

The order of loads is that of the kernels (``cache.cpp``), the cache a model: 50 MB, 16 ways, the line not used for the
longest time makes way. Needs g++ and the headers of the CUDA toolkit. Nothing of it is measured.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ..recorded import ROOT, table

_SHAPES = ((8, 64, 12544), (32, 512, 784), (32, 256, 3136), (30, 256, 4096), (64, 256, 3136))  # 13 to 103 MB


class Passes(NamedTuple):
    """A reduction and the element-wise pass after it: of 16-bit values of size (batch, channels, inner)."""

    shape: tuple[int, int, int]
    interleaved: bool = False
    backward: bool = False


def compile_simulation(directory: Path, headers: Path = Path("/usr/local/cuda/include")) -> Path:
    csrc, program = ROOT / "csrc", directory / "cache"
    command = ["g++", "-std=c++17", "-O2", "-w", "-DBAGUA_SYNCBN_EMULATOR", f"-I{csrc}", f"-I{csrc / 'cuda'}"]
    source = Path(__file__).with_name("cache.cpp")
    subprocess.run([*command, "-isystem", str(headers), str(source), "-o", str(program)], check=True)
    return program


def simulate(program: Path, passes: Sequence[Passes]) -> list[tuple[float, float]]:
    """Returns for each of ``passes`` what share of the second one's reads hits, and would in the ideal order, in %."""
    lines = [f"{1 + each.backward:d} {each.interleaved:d} 2 {' '.join(map(str, each.shape))}" for each in passes]
    said = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    return [(float(own), float(ideal)) for own, ideal in map(str.split, said.splitlines())]


def main() -> None:
    passes = [Passes(shape, *kind) for shape in _SHAPES for kind in product((False, True), repeat=2)]
    with tempfile.TemporaryDirectory() as directory:
        found = [f"{own:.0f} of {ideal:.0f}" for own, ideal in simulate(compile_simulation(Path(directory)), passes)]
    kinds = [f"{layout}, {way}" for layout in ("planar", "interleaved") for way in ("forward", "backward")]
    sizes = [f"{2 * batch * channels * inner / 1e6:.0f}" for batch, channels, inner in _SHAPES]
    print(table(["MB", *kinds], [[size, *found[4 * i : 4 * i + 4]] for i, size in enumerate(sizes)]))


if __name__ == "__main__":
    main()
