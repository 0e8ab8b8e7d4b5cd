"""What the compiler makes of the CUDA kernels: registers within the recorded budget, nothing in local memory."""

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compiled import ROOT, compile_once

BUDGET = Path(__file__).with_name("registers.json")
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
# Blocks of 256 threads of which a multiprocessor with 65536 registers holds two still.
MOST_REGISTERS = 128
# Of machine code, for all kernels of a file. What W-fold inlining can do to it: 1.7 MB of elemt.cu once, 30000
# instructions in one kernel, where 500 do.
MOST_BYTES = 750_000

REPORT = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
TYPES = {"__half": "float16", "__nv_bfloat16": "bfloat16", "float": "float32", "double": "float64"}


def short_name(demangled):
    """``planar_stats float16 x 8`` for planar_stats<__half, 8, float>(...)."""
    name, arguments = re.search(r"(\w+)<([^>]*)>", demangled).groups()
    dtype, *width = re.sub(r"\(\w+\)", "", arguments).split(", ")
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


def compile_report(source):
    compiled = compile_once([NVCC, "-std=c++17", "-O3", "-arch=sm_90", "-Xptxas=-v", "-cubin"], source, [ROOT / "csrc"])
    report = compiled.with_suffix(".txt").read_text()
    assert "warning" not in report, report
    assert compiled.stat().st_size <= MOST_BYTES, f"{source.name}: too much machine code"
    return read_report(report)


def test_the_report_is_read():
    text = """
ptxas info    : Compiling entry function '_ZN1a6kernelIfLi4EEEvPKf' for 'sm_90'
ptxas info    : Function properties for _ZN1a6kernelIfLi4EEEvPKf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 296 bytes smem
"""
    assert read_report(text) == {"kernel float32 x 4": {"registers": 48, "stack": 8, "stores": 4, "loads": 12}}


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_registers_and_local_memory():
    """For sm_90. The budget is what CUDA 13.0 takes and a margin of 8, which other versions may need."""
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(compile_report, SOURCES)
    kernels = {name: report for reports_of_one in reports for name, report in reports_of_one.items()}
    in_memory = {name: report for name, report in kernels.items() if report["stack"] + report["stores"] > 0}
    assert in_memory == {}
    budget = json.loads(BUDGET.read_text())
    assert sorted(kernels) == sorted(budget), "kernels have come or gone: record their registers"
    over = {name: report["registers"] for name, report in kernels.items() if report["registers"] > budget[name] + 8}
    assert over == {}
    assert max(budget.values()) <= MOST_REGISTERS
