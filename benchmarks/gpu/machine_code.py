"""What the machine code of the CUDA kernels does for each 16 bytes that it loads, as ``nvdisasm`` prints it.

``pip install nvidia-cuda-nvdisasm`` where the CUDA toolkit lacks that program.
"""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

_KERNEL = re.compile(r"\n//-+ \.text\.(\S+) -+\n")
_LINE = re.compile(r"^(?:(?P<label>\.L_x_\d+):|\s+/\*[0-9a-f]{4,}\*/\s+(?P<code>.*?)\s*;)", re.MULTILINE)
_BRANCH = re.compile(r"(?P<guard>@\S+ )?\s*(?:BRA|BRX)\b.*`\((?P<target>\.L_x_\d+)\)")
_LOAD = re.compile(r"\bLDG\.E\.128(?:\.CONSTANT)? R(?P<first>\d+)")
# A value takes one at least; ways that take more are not told apart.
_ENOUGH = 64
_STORE = re.compile(r"\bSTG\.E\.128 ")
_ARITHMETIC = re.compile(r"(@\S+ )?\s*[FD](ADD|MUL|FMA)\b")


class Loop(NamedTuple):
    """Once through the loop over the values, on the shortest way that does all the work."""

    instructions: int
    loads: int  # of 16 bytes
    waits: bool = False  # whether a value is used before all loads are under way


class _Way(NamedTuple):
    """How an instruction is reached: so many before it, the last of them, and how that one was."""

    length: int
    last: int
    before: Any


def find_nvdisasm() -> str | None:
    packaged = sorted(Path(sysconfig.get_paths()["purelib"], "nvidia").glob("*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next(map(str, packaged), None)


def vector_loops(cubin: Path) -> dict[str, Loop]:
    """Returns the loop of each kernel that loads 16 bytes at a time, by mangled name."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        raise RuntimeError("nvdisasm: expected it on the PATH, or the package nvidia-cuda-nvdisasm; found neither")
    text = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    _, *parts = _KERNEL.split("\n" + text)
    found = {name: loop_of(code) for name, code in zip(parts[::2], parts[1::2], strict=True)}
    return {name: loop for name, loop in found.items() if loop is not None}


def loop_of(text: str) -> Loop | None:
    """Returns the first loop with 16-byte loads in the machine code of a kernel."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in _LINE.finditer(text):
        if line["label"]:
            labels[line["label"]] = len(code)
        else:
            code.append(line["code"])
    jumps = {i: (labels[m["target"]], m["guard"] is None) for i, c in enumerate(code) if (m := _BRANCH.match(c))}
    for head in sorted({target for i, (target, _) in jumps.items() if target < i}):
        executed = _once(code, jumps, head)
        loads = sum(bool(_LOAD.search(c)) for c in executed)
        if loads:
            return Loop(len(executed), loads, _waits(executed))
    return None


def _once(code: list[str], jumps: dict[int, tuple[int, bool]], head: int) -> list[str]:
    """Returns what is executed from ``head`` until it is reached again: of the most loads, stores and arithmetic."""
    ways: dict[int, dict[tuple[int, ...], _Way | None]] = {head: {(0, 0, 0): None}}  # by the work done, the shortest
    rounds: dict[tuple[int, ...], _Way | None] = {}
    for i in range(head, len(code)):
        target, always = jumps.get(i, (i, False))
        work_here = [bool(pattern.search(code[i])) for pattern in (_LOAD, _STORE, _ARITHMETIC)]
        for work, before in ways.pop(i, {}).items():
            loads, stores, arithmetic = (a + b for a, b in zip(work, work_here, strict=True))
            done = loads, stores, min(arithmetic, _ENOUGH)
            way = _Way(before.length + 1 if before else 1, i, before)
            onward = [rounds] if target == head else [ways.setdefault(target, {})] if target > i else []
            if not always and not code[i].startswith(("EXIT", "RET")):
                onward.append(ways.setdefault(i + 1, {}))
            for known in onward:
                other = known.get(done)
                if other is None or way.length < other.length:
                    known[done] = way
    executed: list[str] = []
    way = max(rounds.items(), default=((), None))[1]
    while way:
        executed.append(code[way.last])
        way = way.before
    return executed[::-1]


def _waits(executed: list[str]) -> bool:
    pending: set[str] = set()
    loads = [i for i, c in enumerate(executed) if _LOAD.search(c)]
    for c in executed[loads[0] : loads[-1] + 1]:
        load = _LOAD.search(c)
        used = set(re.findall(r"\bR\d+", c[load.end() :] if load else c))
        if used & pending:
            return True
        if load:
            pending |= {f"R{int(load['first']) + i}" for i in range(4)}
    return False
