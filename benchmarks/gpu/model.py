"""What the launch geometry promises before a card has run it: ``python -m benchmarks.gpu.model`` prints a table.

From the real geometry (csrc/cuda/split.h), the registers that ptxas gives each kernel (tests/ops/registers.json) and
the loops in its machine code (tests/ops/loops.json): blocks, bytes in flight on a multiprocessor, serial rounds of the
last block, and the share of the bandwidth of copying that an op can reach. Nothing of it is measured. The assumptions:

- A load takes ``LATENCY``, whatever else goes on, and half of that where the value was just written. Memory is busy, or
  the fullest multiprocessor is: by as many bytes in flight as the loops of its threads have, or by their instructions,
  three in four cycles for each of its four schedulers.
- Beside that an op takes three latencies to begin and to end, as copying does, two more to hand over to the block that
  merges parts, and half of one for each round of eight parts that a thread of it loads.
- A thread begins, goes through its loop for each batch and ends, by the instructions on the shortest way; where rows
  are not aligned, all batches have ends of rows in them. Kernels with an activation have a
  residual, where it goes in, and the least work for a slot with 64 arithmetic instructions.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

from ..core.records import ROOT
from ..core.tables import table
from . import shapes
from .shapes import PASSES, Case

LATENCY = 0.7e-6
_ENDS = 3  # latencies
_SLOT, _WARP = 16, 32
_REGISTERS, _THREADS, _BLOCKS = 65536, 2048, 32  # of a multiprocessor
_MERGED_AHEAD = 8
_REDUCTIONS = ("stats", "backward_reduce")
# Sizes of the input that are moved, with a residual; of a mask, a byte for all channels of a position is not counted.
FUSED = {"act_elemt": 3, "act_backward_reduce": 4, "act_backward_elemt": 3}
MASKED = {f"masked_{op}": passes for op, passes in PASSES.items()}
_MOVED = PASSES | FUSED | MASKED
_STORED = {"elemt": 1, "backward_elemt": 1, "act_backward_reduce": 1}
# Instructions more for a batch with ends of rows, for each value of a slot; read off the machine code, not tested.
_ENDS_OF_ROWS = {"stats": 5, "backward_reduce": 12, "elemt": 12, "backward_elemt": 6}


class Card(NamedTuple):
    name: str
    multiprocessors: int
    bandwidth: float  # bytes a second: what copying reaches, nine tenths of the nominal figure
    clock: float


CARDS = (
    Card("A100", 108, 0.9 * 2.04e12, 1.41e9),
    Card("H100", 132, 0.9 * 3.35e12, 1.98e9),
    Card("H200", 132, 0.9 * 4.8e12, 1.98e9),
)


class Launch(NamedTuple):
    """How an op on a tensor is launched: what geometry.cpp says."""

    kernel: str  # planar, interleaved or grouped
    width: int  # values of a load
    blocks: int
    threads: int  # of a block
    parts: int  # of a channel
    slots: int  # loads of a thread, of each tensor
    groups: int  # of threads that share out the parts of a channel


class Prediction(NamedTuple):
    resident: int  # blocks on the fullest multiprocessor at a time
    in_flight: int  # bytes on it
    rounds: int  # that the last block of a channel loads parts in, one after another
    share: float  # of the bandwidth of copying
    of_copy: float  # of the speed of copying as many bytes, which has a beginning and an end too


def compile_geometry(directory: Path, csrc: Path = ROOT / "csrc") -> Path:
    program = directory / "geometry"
    source = Path(__file__).with_name("geometry.cpp")
    subprocess.run(["g++", "-std=c++17", "-O1", f"-I{csrc}", str(source), "-o", str(program)], check=True)
    return program


def plain(op: str) -> str:
    """The op without activation or mask."""
    return op.removeprefix("act_").removeprefix("masked_")


def launches(
    program: Path, cases: Iterable[Case], ops: Iterable[str] = tuple(PASSES)
) -> dict[tuple[Case, str], Launch]:
    """Returns how each op that touches every value is launched on each input."""
    asked = [(case, op) for case in cases for op in ops]
    lines = []
    for case, op in asked:
        batch, channels = case.shape[:2]
        inner = case.values // (batch * channels)
        numbers: tuple[int, ...] = case.layout == "interleaved", shapes.VALUE_BYTES[case.dtype], batch, channels
        numbers += inner, plain(op) not in _REDUCTIONS, op in _REDUCTIONS
        lines.append(" ".join(str(int(number)) for number in numbers))
    said = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    answers = (line.split() for line in said.splitlines())
    return {key: Launch(kernel, *map(int, n)) for key, (kernel, *n) in zip(asked, answers, strict=True)}


@cache
def _recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "tests" / "ops" / name).read_text())
    return found


def predict(case: Case, op: str, launch: Launch, card: Card) -> Prediction:
    kernel = f"{launch.kernel}_{op} {case.dtype} x {launch.width}"
    begin, loop, loads, end, *again = _recorded("loops.json")[kernel]
    fit = min(_REGISTERS // (_recorded("registers.json")[kernel] * launch.threads), _THREADS // launch.threads, _BLOCKS)
    fullest = ceil(launch.blocks / card.multiprocessors)
    resident = min(fit, fullest)
    tensors = _MOVED[op] - _STORED.get(op, _STORED.get(plain(op), 0))
    loop += sum(again)  # a batch has two slots
    in_flight = resident * launch.threads * min(loads, launch.slots * tensors) * _SLOT
    moved = _MOVED[op] * case.size / card.bandwidth
    slots = tensors * case.size / _SLOT * fullest / launch.blocks  # that the fullest multiprocessor loads
    if launch.kernel == "planar" and prod(case.shape[2:]) % launch.width != 0:
        loop += _ENDS_OF_ROWS[plain(op)] * launch.width
    instructions = begin + ceil(launch.slots * tensors / loads) * loop + end
    computing = fullest * launch.threads / _WARP * instructions / (0.75 * 4 * card.clock)
    busy = max(moved, slots * _SLOT / in_flight * LATENCY, computing)
    merging = plain(op) in _REDUCTIONS and launch.parts > 1
    rounds = ceil(launch.parts / launch.groups / _MERGED_AHEAD) if merging else 0
    seconds = busy + (_ENDS + (2 + rounds / 2 if merging else 0)) * LATENCY
    return Prediction(resident, in_flight, rounds, moved / seconds, (moved + _ENDS * LATENCY) / seconds)


def prediction_table(cases: list[Case], program: Path, ops: tuple[str, ...] = tuple(PASSES)) -> str:
    found = launches(program, cases, ops)
    rows = []
    for case in cases:
        predicted = {op: [predict(case, op, found[case, op], card) for card in CARDS] for op in ops}
        h200 = predicted[ops[0]][-1]
        shares = [" / ".join(f"{100 * predicted[op][i].share:.0f}" for op in ops) for i in range(len(CARDS))]
        size = "x".join(map(str, case.shape))
        beside = " / ".join(f"{100 * predicted[op][-1].of_copy:.0f}" for op in ops)
        of_first = found[case, ops[0]].blocks, h200.in_flight // 1024, h200.rounds
        rows.append([f"{size} {case.dtype} {case.layout}", *of_first, *shares, beside])
    header = ["input", f"blocks of {ops[0]}", "KB in flight", "rounds", *(f"{card.name}: %" for card in CARDS)]
    header.append("H200: % of a copy of as much")
    return table(header, rows)


def main() -> None:
    cases = list(shapes.cases(shapes.NETWORKS))
    chosen = [case for case in cases if case.dtype in (sys.argv[1:] or ["float16"])]
    with tempfile.TemporaryDirectory() as directory:
        program = compile_geometry(Path(directory))
        for ops in (PASSES, FUSED, MASKED):
            print(f"predicted share of copying: {' / '.join(ops)}\n")
            print(prediction_table(chosen, program, tuple(ops)) + "\n")


if __name__ == "__main__":
    main()
