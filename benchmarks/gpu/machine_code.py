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
_LOAD = re.compile(r"\bLDG\.E(?:\.EF)?\.128(?:\.CONSTANT)? R\d+")
_ANY_LOAD = re.compile(r"\bLDG\.E(?P<kind>(?:\.\w+)*) R(?P<first>\d+)")
# A value takes one at least; ways that take more are not told apart.
_ENOUGH = 64
_STORE = re.compile(r"\bSTG\.E\.128 ")
_ARITHMETIC = re.compile(r"(@\S+ )?\s*[FD](ADD|MUL|FMA)\b")


class Work(NamedTuple):
    """What a warp executes, on the shortest way that does all the work."""

    begin: int  # instructions up to the loop over the values; the loads of its first batch are among them
    loop: int  # once through the loop
    loads: int  # of 16 bytes, in the loop
    end: int  # after it, where the block has all of a channel and the warp is not the first
    again: int = 0  # once more through a loop in the loop, which goes over the slots of a batch
    waits: bool = False  # whether a value is used before all loads of a batch are under way, the first one or another


class _Way(NamedTuple):
    """How an instruction is reached: so many before it, the last of them, and how that one was."""

    length: int
    last: int
    before: Any


def find_nvdisasm() -> str | None:
    packaged = sorted(Path(sysconfig.get_paths()["purelib"], "nvidia").glob("*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next(map(str, packaged), None)


def vector_kernels(cubin: Path) -> dict[str, Work]:
    """Returns what each kernel that loads 16 bytes at a time does, by mangled name."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        raise RuntimeError("nvdisasm: expected it on the PATH, or the package nvidia-cuda-nvdisasm; found neither")
    text = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    _, *parts = _KERNEL.split("\n" + text)
    found = {name: work_of(code) for name, code in zip(parts[::2], parts[1::2], strict=True)}
    return {name: work for name, work in found.items() if work is not None}


def work_of(text: str) -> Work | None:
    """Returns the work around the first loop with 16-byte loads in the machine code of a kernel."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in _LINE.finditer(text):
        if line["label"]:
            labels[line["label"]] = len(code)
        else:
            code.append(line["code"])
    jumps = {i: (labels[m["target"]], m["guard"] is None) for i, c in enumerate(code) if (m := _BRANCH.match(c))}
    for head in sorted({target for i, (target, _) in jumps.items() if target < i}):
        executed = _way(code, jumps, head, head, (_LOAD, _STORE, _ARITHMETIC))
        loads = sum(bool(_LOAD.search(c)) for c in executed)
        if loads:
            after = max(i for i, (target, _) in jumps.items() if target == head) + 1
            begin, end = _way(code, jumps, 0, head, (_LOAD,)), _way(code, jumps, after, None, ())
            inner = [to for i, (to, _) in jumps.items() if head < to < i < after]
            again = _way(code, jumps, min(inner), min(inner), (_STORE, _ARITHMETIC)) if inner else []
            waits = _waits(begin) or _waits(executed)
            return Work(len(begin), len(executed), loads, len(end), len(again), waits)
    return None


def _way(
    code: list[str],
    jumps: dict[int, tuple[int, bool]],
    start: int,
    goal: int | None,
    patterns: tuple[re.Pattern[str], ...],
) -> list[str]:
    """Returns what is executed from ``start`` to ``goal``, or the exit: the most that ``patterns`` match, no more."""
    ways: dict[int, dict[tuple[int, ...], _Way | None]] = {start: {(0,) * len(patterns): None}}
    found: dict[tuple[int, ...], _Way | None] = {}  # by the work done, the shortest
    for i in range(start, len(code)):
        target, always = jumps.get(i, (i, False))
        exits = re.match(r"(@\S+ )?\s*EXIT", code[i]) is not None
        here = [bool(pattern.search(code[i])) for pattern in patterns]
        for work, before in ways.pop(i, {}).items():
            done = tuple(min(a + b, _ENOUGH) for a, b in zip(work, here, strict=True))
            way = _Way(before.length + 1 if before else 1, i, before)
            targets = [target] if target == goal or target > i else []
            if not always and not code[i].startswith(("EXIT", "RET")):
                targets.append(i + 1)
            onward = [found if to == goal else ways.setdefault(to, {}) for to in targets]
            for known in (*onward, found) if exits and goal is None else onward:
                other = known.get(done)
                if other is None or way.length < other.length:
                    known[done] = way
    executed: list[str] = []
    last = max(found.items(), default=((), None))[1]
    while last:
        executed.append(code[last.last])
        last = last.before
    return executed[::-1]


def _waits(executed: list[str]) -> bool:
    pending: set[str] = set()
    last = max((i for i, c in enumerate(executed) if _LOAD.search(c)), default=-1)
    for c in executed[: last + 1]:
        load = _ANY_LOAD.search(c)
        used = set(re.findall(r"\bR\d+", c[load.end() :] if load else c))
        if used & pending:
            return True
        if load:
            registers = 4 if ".128" in load["kind"] else 2 if ".64" in load["kind"] else 1
            pending |= {f"R{int(load['first']) + i}" for i in range(registers)}
    return False
