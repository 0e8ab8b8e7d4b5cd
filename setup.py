"""Builds the native kernels, bagua_syncbn._C. All else is in pyproject.toml.

Tools decide what is built, never a GPU, since build machines have none; a GPU decides for which cards. No CUDA call is
made.

================================  ==================================================================================
BAGUA_SYNCBN_BUILD=python         no native kernels: the ops run in plain torch
BAGUA_SYNCBN_BUILD=cpu            CPU kernels; needs Linux, torch's headers and a C++17 compiler
BAGUA_SYNCBN_BUILD=cuda           CUDA kernels too; needs nvcc besides
unset                             the last of these for which the tools are there and there are sources
================================  ==================================================================================

================================  ==================================================================================
BAGUA_SYNCBN_CUDA_ARCHS="80;90"   machine code for cards of these compute capabilities, and PTX for later ones
BAGUA_SYNCBN_CUDA_ARCHS=all       of 75, 80, 86, 90, 100 and 120 those that nvcc knows, as ``make wheel`` has it
unset                             the cards that nvidia-smi shows, if nvcc knows one of them; else all
================================  ==================================================================================

Further variables: CXX, NVCC (or CUDA_HOME, which comes before PATH), and BAGUA_SYNCBN_CXXFLAGS, which come last. The
first line that is printed says what is built, for which cards, and how long that takes. The decision and its reason are
recorded in bagua_syncbn/build_info.json, which ``python -m bagua_syncbn.info`` prints.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
KINDS = ("python", "cpu", "cuda")
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")
CUDA_ARCHS = "75;80;86;90;100;120"
# Of one core of a virtual AMD EPYC machine: for the CPU kernels, and for the CUDA kernels of one card, or its PTX.
SECONDS = {"cpu": 110, "cuda": 40}
# LibTorch's stable ABI as of 2.10, and CPython's as of 3.10: one binary for these and all that come after.
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030a0000"]
# Without contraction to fused multiply-adds all instruction sets give the same bits.
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi"]
# Nothing here reads errno, for which a square root has to be a call.
CXX_FLAGS += ["-fno-math-errno"]
# False alarms in GCC's own intrinsics headers (its bug 105593), under a name that clang does not know.
CXX_FLAGS += ["-Wno-unknown-warning-option", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
NVCC_FLAGS = ["-std=c++17", "-O3", "--cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden"]


def find_torch() -> Path | None:
    """The torch of the environment that is installed into, also from pip's isolated build environment."""
    candidates = {sysconfig.get_path(key) for key in ("platlib", "purelib")}
    return next((path for root in candidates if (path := Path(root, "torch")).joinpath("include").is_dir()), None)


def find_tools() -> dict[str, str | None]:
    nvccs = [f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"]
    nvccs = [os.environ["NVCC"]] if "NVCC" in os.environ else nvccs
    nvcc = next((path for name in nvccs if (path := shutil.which(name))), None)
    compilers = [compiler_of(os.environ["CXX"])] if "CXX" in os.environ else ["g++", "clang++"]
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    torch, linux = find_torch(), sys.platform if sys.platform == "linux" else None
    return {"Linux": linux, "torch": None if torch is None else str(torch), "compiler": compiler, "nvcc": nvcc}


def compiler_of(command: str) -> str:
    """The compiler in the value of CXX, which may begin with a launcher, as in "ccache g++ -m64"."""
    words = shlex.split(command)
    return next((word for word in words if Path(word).name not in LAUNCHERS), "")


def decide(tools: dict[str, str | None]) -> tuple[str, str]:
    """Returns the kind of build and the reason for it."""
    # Elsewhere flags and linking are others, and a compiler is often not the one that torch was built with.
    needs = {"python": (), "cpu": ("Linux", "torch", "compiler"), "cuda": ("Linux", "torch", "compiler", "nvcc")}
    missing = {kind: [name for name in needs[kind] if tools[name] is None] for kind in KINDS}
    if not list(ROOT.glob("csrc/cuda/*.cu")):
        missing["cuda"].append("CUDA sources")
    forced = os.environ.get("BAGUA_SYNCBN_BUILD")
    if forced is None:
        kind = next(kind for kind in reversed(KINDS) if not missing[kind])
        further = next((missing[other] for other in KINDS if missing[other]), [])
        return kind, f"found without {' and '.join(further)}" if further else "found all tools"
    if forced not in KINDS:
        raise SystemExit(f"BAGUA_SYNCBN_BUILD: expected one of {', '.join(KINDS)}, got {forced!r}")
    if missing[forced]:
        raise SystemExit(f"BAGUA_SYNCBN_BUILD={forced}: expected to find {', '.join(missing[forced])}, got none")
    return forced, f"BAGUA_SYNCBN_BUILD={forced}"


def version_of(tool: str | None) -> str | None:
    """The line of ``tool --version`` that holds the version."""
    if tool is None:
        return None
    lines = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout.splitlines()
    return next((line for line in lines if "release" in line), lines[0] if lines else tool)


def archs_seen() -> list[str]:
    """The compute capabilities of the cards of this machine, as in 90."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted({major + minor for major, minor in re.findall(r"^(\d+)\.(\d)$", printed, re.MULTILINE)}, key=int)


def choose_archs(nvcc: str) -> list[str]:
    """The compute capabilities that there is machine code for."""
    chosen = os.environ.get("BAGUA_SYNCBN_CUDA_ARCHS")
    if chosen and chosen != "all":
        return chosen.split(";")
    codes = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    all_archs, seen = CUDA_ARCHS.split(";"), [] if chosen == "all" else archs_seen()
    known_seen, known = ([arch for arch in archs if f"sm_{arch}" in codes] for archs in (seen, all_archs))
    return known_seen or known or all_archs


def announcement() -> str:
    """What is built, why, for which cards, and about how long it takes."""
    archs = INFO["build_cuda_archs"]
    seconds = {"python": 0, "cpu": SECONDS["cpu"], "cuda": SECONDS["cpu"] + SECONDS["cuda"] * (len(archs) + 1)}[KIND]
    cards = f"; for compute capability {', '.join(archs)} and PTX for later ones" if archs else ""
    cores = os.cpu_count() or 1
    duration = f"; about {max(1, round(seconds / cores / 60))} min on {cores} cores" if seconds else ""
    return f"bagua_syncbn: {KIND} build: {REASON}{cards}{duration}"


def nvcc_flags(archs: list[str], version: str) -> list[str]:
    """The flags of nvcc, for machine code of ``archs`` and code that drivers compile for other cards.

    That is PTX of compute_90: PTX of a newer card leaves out those between. Before CUDA 13, libraries compressed for
    size do not load on all of its drivers.
    """
    ptx = min(archs[-1], "90", key=lambda arch: int(arch.rstrip("af")))
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    compressed = [] if re.search(r"release 1[0-2]\.", version) else ["-compress-mode=size"]
    return [*NVCC_FLAGS, *codes, f"-gencode=arch=compute_{ptx},code=compute_{ptx}", *compressed]


class BuildKernels(build_ext):
    """Compiles the sources of the extension side by side, .cpp by the C++ compiler and .cu by nvcc, and links them."""

    def build_extension(self, ext: Extension) -> None:
        torch, cxx = Path(TOOLS["torch"]), shlex.split(os.environ.get("CXX", TOOLS["compiler"]))
        includes = [f"-isystem{torch / 'include'}", f"-I{sysconfig.get_path('include')}"]
        extra = shlex.split(os.environ.get("BAGUA_SYNCBN_CXXFLAGS", ""))
        newest = max(path.stat().st_mtime for path in ROOT.glob("csrc/**/*.*"))

        def compile(source: str) -> str:
            if source.endswith(".cu"):
                command = [TOOLS["nvcc"], *nvcc_flags(INFO["build_cuda_archs"], INFO["build_nvcc"])]
            else:
                kernels = ["-DBAGUA_SYNCBN_CUDA"] if KIND == "cuda" else []
                command = [*cxx, *CXX_FLAGS, *STABLE_ABI, *kernels, *includes, *extra]
            # Kept by what it is made with, for the next installation or wheel from this folder.
            made_with = hashlib.sha256(json.dumps([INFO, command]).encode()).hexdigest()[:12]
            target = ROOT / "build" / "objects" / made_with / f"{source}.o"
            if not target.exists() or target.stat().st_mtime < newest:
                target.parent.mkdir(parents=True, exist_ok=True)
                self.spawn([*command, "-c", source, "-o", str(target)])
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile, ext.sources))
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        linker = [*cxx, *extra]
        if KIND == "cuda":  # nvcc knows where its static runtime is
            host = f"-ccbin={TOOLS['compiler']}"
            linker = [TOOLS["nvcc"], "--cudart=static", host, *(f"-Xcompiler={flag}" for flag in extra)]
        self.spawn([*linker, "-shared", *objects, f"-L{torch / 'lib'}", "-ltorch_cpu", "-o", str(library)])


class BuildPackage(build_py):
    """Copies the Python files and records the decision beside them."""

    def run(self) -> None:
        super().run()
        package = Path(ROOT if self.editable_mode else self.build_lib, "bagua_syncbn")
        package.joinpath("build_info.json").write_text(json.dumps(INFO, indent=2) + "\n")
        if self.editable_mode and KIND == "python":  # the library of an earlier build would be loaded still
            for library in package.glob("_C.*.so"):
                library.unlink()


TOOLS = find_tools()
KIND, REASON = decide(TOOLS)
torch_version = Path(TOOLS["torch"], "version.py").read_text() if TOOLS["torch"] else ""
INFO = {
    "build": KIND,
    "build_reason": REASON,
    "build_torch": next((line.split("'")[1] for line in torch_version.splitlines() if "__version__ =" in line), None),
    "build_compiler": version_of(TOOLS["compiler"]) if KIND != "python" else None,
    "build_nvcc": version_of(TOOLS["nvcc"]) if KIND == "cuda" else None,
    "build_cuda_archs": choose_archs(TOOLS["nvcc"]) if KIND == "cuda" else [],
}
print(announcement(), flush=True)

# What takes longest to compile comes first: at the end, a core would wait for it.
patterns = ["csrc/cpu/loops/*.cpp", "csrc/*.cpp", "csrc/cpu/*.cpp", "csrc/exchange/*.cpp"] if KIND != "python" else []
patterns += ["csrc/cuda/*.cu", "csrc/cuda/torch/*.cpp"] if KIND == "cuda" else []
sources = [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
setup(
    ext_modules=[Extension("bagua_syncbn._C", sources, py_limited_api=True)] if sources else [],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if sources else {},
)
