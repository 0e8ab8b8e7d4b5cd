"""What the compiler makes of the CUDA kernels: registers and loops within what is recorded, nothing in local memory."""

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compiled import ROOT, compile_once

from benchmarks.gpu import machine_code

BUDGET = Path(__file__).with_name("registers.json")
LOOPS = Path(__file__).with_name("loops.json")  # what machine_code.Work has
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
# Blocks of 256 threads of which a multiprocessor with 65536 registers holds two still.
MOST_REGISTERS = 128
# Of machine code, for all kernels of a file. What W-fold inlining can do to it: 1.7 MB of elemt.cu once, 30000
# instructions in one kernel, where 500 do.
MOST_BYTES = 800_000

REPORT = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
TYPES = {"__half": "float16", "__nv_bfloat16": "bfloat16", "float": "float32", "double": "float64"}


def short_name(demangled):
    """``planar_stats float16 x 8`` for planar_stats<__half, 8, float>(...), and for stats<__half, 8, cuda::Planar>."""
    name, arguments = re.search(r"(\w+)<([^>]*)>", demangled).groups()
    dtype, *width = re.sub(r"\(\w+\)", "", arguments).split(", ")
    layout = re.search(r"::(Planar|Interleaved|Grouped)\b", arguments)
    if layout:
        name = f"{layout[1].lower()}_{name.removeprefix('interleaved_')}"
    return " ".join([name, TYPES[dtype], *(f"x {w}" for w in width[:1])])


def read_report(text):
    """The kernels that ptxas reports on, by short name."""
    names = re.findall(r"Compiling entry function '([^']+)'", text)
    demangled = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    short = dict(zip(names, map(short_name, demangled.splitlines()), strict=True))
    return {
        short[match["name"]]: {key: int(match[key]) for key in ("registers", "stack", "stores", "loads")}
        for match in REPORT.finditer(text)
    }


def compile_cubin(source):
    command = [NVCC, "-std=c++17", "-O3", "-arch=sm_90", "-Xptxas=-v", "-cubin"]
    return compile_once(command, source, [ROOT / "csrc"])


def report_on(cubin):
    report = cubin.with_suffix(".txt").read_text()
    assert "warning" not in report, report
    assert cubin.stat().st_size <= MOST_BYTES, f"{cubin.name}: too much machine code"
    return read_report(report)


@pytest.fixture(scope="module")
def compiled():
    """The machine code of each file, and the reports on all kernels. For sm_90."""
    if NVCC is None:
        pytest.skip("needs nvcc")
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(compile_cubin, SOURCES))
    return compiled, {name: report for cubin in compiled for name, report in report_on(cubin).items()}


@pytest.mark.slow
def test_registers_and_local_memory(compiled):
    """The budget is what CUDA 13.0 takes and a margin of 8, which other versions may need."""
    _, kernels = compiled
    in_memory = {name: report for name, report in kernels.items() if report["stack"] + report["stores"] > 0}
    assert in_memory == {}
    budget = json.loads(BUDGET.read_text())
    assert sorted(kernels) == sorted(budget), "kernels have come or gone: record their registers"
    over = {name: report["registers"] for name, report in kernels.items() if report["registers"] > budget[name] + 8}
    assert over == {}
    assert max(budget.values()) <= MOST_REGISTERS


@pytest.mark.slow
@pytest.mark.skipif(machine_code.find_nvdisasm() is None, reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm")
def test_loops(compiled):
    """No load of a batch waits for one before it, and instructions are at most a tenth more than recorded.

    Of kernels with an activation: of a short one.
    """
    cubins, _ = compiled
    mangled = {}
    for cubin in cubins:
        mangled |= machine_code.vector_kernels(cubin)
    names = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    kernels = dict(zip(map(short_name, names.splitlines()), mangled.values(), strict=True))
    assert [name for name, work in kernels.items() if work.waits] == []
    recorded = {name: machine_code.Work(*work) for name, work in json.loads(LOOPS.read_text()).items()}
    assert {name: work.loads for name, work in kernels.items()} == {name: work.loads for name, work in recorded.items()}
    for what in ("begin", "loop", "end", "again"):
        found = {name: (getattr(work, what), getattr(recorded[name], what)) for name, work in kernels.items()}
        assert {name: more for name, more in found.items() if more[0] > 1.1 * more[1] + 5} == {}, what


# A loop over two slots, of which each can be loaded in two ways: 8 instructions if at once.
LOOP = """
//--------------------- .text.kernel --------------------------
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   FADD R4, R4, R8 ;
        /*0020*/                   FADD R4, R4, R12 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   LDG.E.U16 R8, desc[UR4][R2.64] ;
        /*0050*/                   LDG.E.U16 R9, desc[UR4][R2.64+0x2] ;
        /*0060*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0070*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
.L_x_2:
        /*0080*/                   IADD3 R2, R2, R6, RZ ;
        /*0090*/               @P2 LDG.E.128.CONSTANT R12, desc[UR4][R2.64] ;
        /*00a0*/                   IADD3 R2, R2, R6, RZ ;
        /*00b0*/               @P1 BRA `(.L_x_0) ;
        /*00c0*/                   EXIT ;
"""


def test_a_loop_is_counted_without_its_slow_ways():
    assert machine_code.work_of(LOOP) == (1, 8, 2, 1, 0, False)
    assert machine_code.work_of(LOOP.replace("R2, R2, R6, RZ ;", "R2, R2, R10, RZ ;", 1)) == (1, 8, 2, 1, 0, True)
    first = ("LDG.E.U16 R3, desc[UR4][R6.64]", "FADD R5, R3, R3", "LDG.E.128 R8, desc[UR4][R2.64]")
    begin = " ;\n        /*0000*/  ".join(first)
    assert machine_code.work_of(LOOP.replace("MOV R1, c[0x0][0x28]", begin)) == (3, 8, 2, 1, 0, True)
    assert machine_code.work_of(LOOP.replace(".128", ".64")) is None
