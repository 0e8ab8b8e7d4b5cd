"""What the launch geometry promises before a card has run it: ``python -m benchmarks.gpu.model`` prints a table.

From the real geometry (csrc/cuda/split.h) and the registers that ptxas gives each kernel (tests/ops/registers.json):
blocks, bytes in flight on a multiprocessor, serial rounds of the last block, and the share of the bandwidth of copying
that an op can reach. Nothing of it is measured. The assumptions:

- A load takes ``LATENCY``, whatever else goes on; memory is busy where enough bytes are in flight on all
  multiprocessors to cover that, and slower in proportion where they are not.
- A thread has up to 64 bytes under way, and no more than it has to load; a kernel ends when its fullest multiprocessor
  does.
- Beside that it takes three latencies to begin and to end, two more to hand over to the block that merges parts, and
  one for each round of eight parts that a thread of it loads.
- Instructions are free. They are not where values are narrow; the machine code is not looked at here.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

from ..core.records import ROOT
from ..core.tables import table
from . import shapes
from .shapes import PASSES, Case

LATENCY = 0.7e-6
_IN_FLIGHT = 64  # bytes of a thread
_REGISTERS, _THREADS, _BLOCKS = 65536, 2048, 32  # of a multiprocessor
_MERGED_AHEAD = 8
_REDUCTIONS = ("stats", "backward_reduce")


class Card(NamedTuple):
    name: str
    multiprocessors: int
    bandwidth: float  # bytes a second: what copying reaches, nine tenths of the nominal figure


CARDS = (Card("A100", 108, 0.9 * 2.04e12), Card("H100", 132, 0.9 * 3.35e12), Card("H200", 132, 0.9 * 4.8e12))


class Launch(NamedTuple):
    """How an op on a tensor is launched: what geometry.cpp says."""

    width: int  # values of a load
    blocks: int
    threads: int  # of a block
    parts: int  # of a channel
    slots: int  # loads of a thread, of each tensor


class Prediction(NamedTuple):
    resident: int  # blocks on the fullest multiprocessor at a time
    in_flight: int  # bytes on it
    rounds: int  # that the last block of a channel loads parts in, one after another
    share: float  # of the bandwidth of copying


def compile_geometry(directory: Path, csrc: Path = ROOT / "csrc") -> Path:
    program = directory / "geometry"
    source = Path(__file__).with_name("geometry.cpp")
    subprocess.run(["g++", "-std=c++17", "-O1", f"-I{csrc}", str(source), "-o", str(program)], check=True)
    return program


def launches(program: Path, cases: Iterable[Case]) -> dict[tuple[Case, str], Launch]:
    """Returns how each op that touches every value is launched on each input."""
    asked = [(case, op) for case in cases for op in PASSES]
    lines = []
    for case, op in asked:
        batch, channels = case.shape[:2]
        numbers = case.layout == "interleaved", shapes.VALUE_BYTES[case.dtype], batch, channels
        inner = case.values // (batch * channels)
        lines.append(" ".join(str(int(number)) for number in (*numbers, inner, op not in _REDUCTIONS)))
    said = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    return {key: Launch(*map(int, line.split())) for key, line in zip(asked, said.splitlines(), strict=True)}


@cache
def _registers() -> dict[str, int]:
    found: dict[str, int] = json.loads((ROOT / "tests" / "ops" / "registers.json").read_text())
    return found


def predict(case: Case, op: str, launch: Launch, card: Card) -> Prediction:
    registers = _registers()[f"{case.layout}_{op} {case.dtype} x {launch.width}"]
    fit = min(_REGISTERS // (registers * launch.threads), _THREADS // launch.threads, _BLOCKS)
    fullest = ceil(launch.blocks / card.multiprocessors)
    resident = min(fit, fullest)
    tensors = 1 if op in ("stats", "elemt") else 2
    bytes_of_slot = launch.width * shapes.VALUE_BYTES[case.dtype]
    in_flight = resident * launch.threads * min(_IN_FLIGHT, launch.slots * tensors * bytes_of_slot)
    needed = card.bandwidth / card.multiprocessors * LATENCY
    moved = PASSES[op] * case.size
    # Until the fullest multiprocessor is done, at the speed that its bytes in flight allow.
    imbalance = fullest * card.multiprocessors / launch.blocks
    busy = moved / card.bandwidth * max(imbalance if fullest <= fit else 1.0, needed / in_flight * imbalance)
    merging = op in _REDUCTIONS and launch.parts > 1
    groups = launch.threads if case.layout == "planar" else max(1, launch.threads // min(case.channels, 64))
    rounds = ceil(launch.parts / groups / _MERGED_AHEAD) if merging else 0
    seconds = busy + (3 + (2 + rounds if merging else 0)) * LATENCY
    return Prediction(resident, in_flight, rounds, moved / card.bandwidth / seconds)


def prediction_table(cases: list[Case], program: Path) -> str:
    found = launches(program, cases)
    rows = []
    for case in cases:
        predicted = {op: [predict(case, op, found[case, op], card) for card in CARDS] for op in PASSES}
        first = found[case, "stats"]
        h200 = predicted["stats"][-1]
        shares = [" / ".join(f"{100 * predicted[op][i].share:.0f}" for op in PASSES) for i in range(len(CARDS))]
        size = "x".join(map(str, case.shape))
        rows.append([f"{size} {case.dtype} {case.layout}", first.blocks, h200.in_flight // 1024, h200.rounds, *shares])
    header = ["input", "blocks of stats", "KB in flight", "rounds", *(f"{card.name}: %" for card in CARDS)]
    return table(header, rows)


def main() -> None:
    cases = list(shapes.cases(shapes.NETWORKS))
    chosen = [case for case in cases if case.dtype in (sys.argv[1:] or ["float16"])]
    with tempfile.TemporaryDirectory() as directory:
        print(f"predicted share of copying: {' / '.join(PASSES)}\n")
        print(prediction_table(chosen, compile_geometry(Path(directory))))


if __name__ == "__main__":
    main()
