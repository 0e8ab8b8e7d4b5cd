"""The machine code of the CUDA kernels: registers and loops within what is recorded, nothing in local memory."""

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compiled import ROOT, compile_once
from emulated import find_headers

from bagua_syncbn.ops import DTYPES
from benchmarks.gpu import cache, machine_code

BUDGET = Path(__file__).with_name("registers.json")
LOOPS = Path(__file__).with_name("loops.json")  # what machine_code.Work has
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
# Blocks of 256 threads of which a multiprocessor with 65536 registers holds two still.
MOST_REGISTERS = 128
# Machine code for sm_90, for each kernel of a file. W-fold inlining can make 30000 instructions of one kernel, where
# 500 do.
MOST_BYTES = 50_000
# Bytes of local memory at most of kernels that have any: a few registers, on some cards.
SPILLS = {
    (80, "planar_elemt bfloat16 x 8"): 8,
    (120, "interleaved_stats bfloat16 x 8"): 8,
}
# In rare kernels a load of the residual is waited for before the last load of a batch.
WAITS = {
    "planar_act_elemt float64 x 2",
    "planar_masked_act_elemt float64 x 2",
    "planar_act_backward_reduce float64 x 2",
}

REPORT = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
# The names in torch of the types in CUDA.
STORED = re.findall(r"^  DO\(.* (\w+)\)", (ROOT / "csrc" / "dtypes.h").read_text(encoding="ascii"), re.MULTILINE)
TYPES = {stored: str(dtype).removeprefix("torch.") for stored, dtype in zip(STORED, DTYPES, strict=True)}


def short_name(demangled):
    """``planar_stats float16 x 8`` for planar_stats<__half, 8, float>(...).

    And ``planar_masked_act_elemt float16 x 8`` for elemt<__half, 8, Planar, Masked, Activated<__half>, float>(...).
    """
    name, arguments = re.search(r"(\w+)<(.*)>\(", demangled).groups()
    dtype, *width = re.sub(r"\(\w+\)", "", arguments).split(", ")
    layout = re.search(r"::(Planar|Interleaved|Grouped)\b", arguments)
    policies = [short for policy, short in (("::Masked", "masked"), ("::Activated", "act")) if policy in arguments]
    name = "_".join([*([layout[1].lower()] if layout else []), *policies, name])
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


def compile_cubins(arch):
    def compile(source):
        command = [NVCC, "-std=c++17", "-O3", f"-arch=sm_{arch}", "-Xptxas=-v", "-cubin"]
        return compile_once(command, source, [ROOT / "csrc"])

    if NVCC is None:
        pytest.skip("needs nvcc")
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile, SOURCES))


def report_on(cubin):
    report = cubin.with_suffix(".txt").read_text()
    assert "warning" not in report, report
    return read_report(report)


def in_memory(kernels):
    """The bytes that each of them keeps in local memory, where there are any."""
    bytes_of = {name: max(report["stack"], report["stores"]) for name, report in kernels.items()}
    return {name: found for name, found in bytes_of.items() if found}


@pytest.fixture(scope="module")
def compiled():
    """The machine code of each file, and the reports on all kernels. For sm_90."""
    compiled = compile_cubins(90)
    reports = {cubin: report_on(cubin) for cubin in compiled}
    sizes = {cubin.name: cubin.stat().st_size / max(1, len(reports[cubin])) for cubin in compiled}
    assert {name: size for name, size in sizes.items() if size > MOST_BYTES} == {}
    return compiled, {name: report for found in reports.values() for name, report in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 100, 120])
def test_no_kernel_spills_registers_on_other_cards(arch):
    spilled = {}
    for cubin in compile_cubins(arch):
        spilled |= in_memory(report_on(cubin))
    assert {name: found for name, found in spilled.items() if found > SPILLS.get((arch, name), 0)} == {}


@pytest.mark.slow
def test_no_kernel_takes_more_registers_than_recorded_or_spills_them(compiled):
    """The budget is what CUDA 13.0 takes and a margin of 8, which other versions may need."""
    _, kernels = compiled
    assert in_memory(kernels) == {}
    budget = json.loads(BUDGET.read_text())
    assert sorted(kernels) == sorted(budget), "kernels have come or gone: record their registers"
    over = {name: report["registers"] for name, report in kernels.items() if report["registers"] > budget[name] + 8}
    assert over == {}
    assert max(budget.values()) <= MOST_REGISTERS


@pytest.mark.slow
@pytest.mark.skipif(machine_code.find_nvdisasm() is None, reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm")
def test_no_load_waits_for_another_and_no_loop_grows(compiled):
    """No load of a batch waits for one before it, and instructions are at most a tenth more than recorded.

    Of kernels with an activation: of a short one.
    """
    cubins, _ = compiled
    mangled = {}
    for cubin in cubins:
        mangled |= machine_code.vector_kernels(cubin)
    names = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    kernels = dict(zip(map(short_name, names.splitlines()), mangled.values(), strict=True))
    assert {name for name, work in kernels.items() if work.waits} <= WAITS
    recorded = {name: machine_code.Work(*work) for name, work in json.loads(LOOPS.read_text()).items()}
    assert {name: work.loads for name, work in kernels.items()} == {name: work.loads for name, work in recorded.items()}
    for what in ("begin", "loop", "end", "again"):
        found = {name: (getattr(work, what), getattr(recorded[name], what)) for name, work in kernels.items()}
        assert {name: more for name, more in found.items() if more[0] > 1.1 * more[1] + 5} == {}, what


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or find_headers() is None, reason="needs g++ and CUDA's headers")
def test_the_second_pass_begins_with_what_the_cache_keeps_of_the_first(tmp_path):
    """In a simulation, of tensors from half to twice as large as the cache."""
    passes = [
        cache.Passes(shape, interleaved, backward)
        for shape in ((32, 512, 784), (32, 256, 3136), (64, 256, 3136))
        for interleaved in (False, True)
        for backward in (False, True)
    ]
    found = cache.simulate(cache.compile_simulation(tmp_path, find_headers()), passes)
    assert {each: hits for each, hits in zip(passes, found, strict=True) if hits[0] < hits[1] - 5} == {}


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
