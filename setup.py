"""Builds the native kernels, bagua_syncbn._C. Everything else is in pyproject.toml.

The tools that are there decide what is built, and no GPU does unless it is asked for: build machines have none.
docs/building.md has the environment variables. The first line printed says what is built, why, and for which cards;
bagua_syncbn/build_info.json records it.
"""

import json
import os
import re
import shlex
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
CUDA_ARCHS = "75;80;86;90;100;120"
# LibTorch's stable ABI as of 2.10, and CPython's as of 3.10: one binary for these and all that come after. A
# free-threaded CPython has none: the binary is for that version alone.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", *["-DPy_LIMITED_API=0x030a0000"] * LIMITED]
# Without contraction to fused multiply-adds, all instruction sets give the same bits.
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi"]
# Nothing here reads errno, for which a square root has to be a call.
CXX_FLAGS += ["-fno-math-errno"]
# False alarms in GCC's own intrinsics headers (its bug 105593), under a name that clang does not know.
CXX_FLAGS += ["-Wno-unknown-warning-option", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
NVCC_FLAGS = ["-std=c++17", "-O3", "--cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden"]


def printed(command: list[str]) -> list[str]:
    """Returns the lines that ``command`` prints, none if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def find_tool(variable: str, *names: str) -> tuple[list[str], str | None]:
    """Returns the command in an environment variable, or the first of ``names`` that runs, and its version."""
    for name in [os.environ[variable]] if variable in os.environ else names:
        lines = printed([*shlex.split(name), "--version"])
        if lines:
            return shlex.split(name), next((line for line in lines if "release" in line), lines[0])
    return [], None


def find_torch() -> Path | None:
    """Returns the torch of the environment that is installed into, also from pip's isolated build environment."""
    candidates = {sysconfig.get_path(key) for key in ("platlib", "purelib")}
    return next((path for root in candidates if (path := Path(root, "torch")).joinpath("include").is_dir()), None)


def choose_archs() -> list[str]:
    """Returns the compute capabilities to make machine code for, as in 90."""
    chosen, every = os.environ.get("BAGUA_SYNCBN_CUDA_ARCHS", ""), CUDA_ARCHS.split(";")
    if chosen not in ("", "all", "native"):
        return chosen.split(";")
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    lines = printed(query) if chosen != "all" else []
    seen = sorted({line.replace(".", "") for line in lines if re.fullmatch(r"\d+\.\d", line)}, key=int)
    if chosen == "native" and not seen:
        return []
    codes = " ".join(printed([*NVCC, "--list-gpu-code"])).split()
    seen, known = ([arch for arch in archs if f"sm_{arch}" in codes] for archs in (seen, every))
    return seen or known or every


def decide() -> tuple[str, str, list[str]]:
    """Returns the kind of build, the reason for it, and what a more complete build lacks."""
    # Elsewhere flags and linking are others, and a compiler is often not the one that torch was built with.
    for_cpu = {"torch": TORCH, "compiler": CXX} if LINUX else {"Linux": None}
    # ROCm's torch calls AMD's cards "cuda", and would give their tensors to our kernels. ATen's kernels serve them.
    for_cuda = {"CUDA, since torch is built for ROCm": not HIP, "nvcc": NVCC, "a card": ARCHS}
    needs = {"python": {}, "cpu": for_cpu, "cuda": for_cpu | for_cuda}
    missing = {kind: [name for name, found in needs[kind].items() if not found] for kind in KINDS}
    forced = os.environ.get("BAGUA_SYNCBN_BUILD")
    if forced is None:
        kind = next(kind for kind in reversed(KINDS) if not missing[kind])
        further = next((missing[other] for other in KINDS if missing[other]), [])
        return kind, f"found without {' and '.join(further)}" if further else "found all tools", further
    if forced not in KINDS:
        raise SystemExit(f"BAGUA_SYNCBN_BUILD: expected one of {', '.join(KINDS)}, got {forced!r}")
    if missing[forced]:
        raise SystemExit(f"BAGUA_SYNCBN_BUILD={forced}: expected to find {', '.join(missing[forced])}, got none")
    return forced, f"BAGUA_SYNCBN_BUILD={forced}", []


def nvcc_flags() -> list[str]:
    """Returns flags for machine code of ``ARCHS``, and for code that drivers compile for other cards.

    The latter is PTX of compute_90: PTX of a newer card leaves out those between. Before CUDA 13, libraries compressed
    for size do not load on all of its drivers.
    """
    ptx = min(ARCHS[-1], "90", key=lambda arch: int(arch.rstrip("af")))
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    compressed = [] if re.search(r"release 1[0-2]\.", NVCC_VERSION) else ["-compress-mode=size"]
    return [*NVCC_FLAGS, *codes, f"-gencode=arch=compute_{ptx},code=compute_{ptx}", *compressed]


class BuildKernels(build_ext):
    """Compiles the sources of the extension side by side, .cpp by the C++ compiler and .cu by nvcc, and links them."""

    def build_extension(self, ext: Extension) -> None:
        extra = shlex.split(os.environ.get("BAGUA_SYNCBN_CXXFLAGS", ""))  # after all others, as for sanitizers
        cpp = [*CXX, *CXX_FLAGS, *STABLE_ABI, *["-DBAGUA_SYNCBN_CUDA"] * (KIND == "cuda")]
        cpp += [f"-isystem{TORCH / 'include'}", f"-I{sysconfig.get_path('include')}", *extra]
        cuda, linker = [], [*CXX, *extra]
        if KIND == "cuda":  # nvcc knows where its static runtime is
            cuda, linker = [*NVCC, *nvcc_flags()], [*NVCC, "--cudart=static", *(f"-Xcompiler={flag}" for flag in extra)]

        def compile(source: str) -> str:
            target = Path(self.build_temp, f"{source}.o")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.spawn([*(cuda if source.endswith(".cu") else cpp), "-c", source, "-o", str(target)])
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile, ext.sources))
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        self.spawn([*linker, "-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", str(library)])


class BuildPackage(build_py):
    """Copies the Python files and records the decision beside them."""

    def run(self) -> None:
        super().run()
        package = Path(ROOT if self.editable_mode else self.build_lib, "bagua_syncbn")
        package.joinpath("build_info.json").write_text(json.dumps(INFO, indent=2) + "\n")
        if self.editable_mode and KIND == "python":  # the library of an earlier build would be loaded still
            for library in package.glob("_C.*.so"):
                library.unlink()


LINUX, TORCH = sys.platform == "linux", find_torch()
torch_version = TORCH.joinpath("version.py").read_text() if TORCH else ""
HIP = re.search(r"^hip\b.*'", torch_version, re.MULTILINE)
# Only on Linux: without Xcode, macOS answers the call of a compiler by a window.
CXX, CXX_VERSION = find_tool("CXX", "g++", "clang++") if LINUX else ([], None)
nvccs = f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"
NVCC, NVCC_VERSION = find_tool("NVCC", *nvccs) if LINUX else ([], None)
ARCHS = choose_archs()
KIND, REASON, LACKS = decide()
INFO = {
    "build": KIND,
    "build_reason": REASON,
    "build_lacks": LACKS,
    "build_torch": next(iter(re.findall("__version__ = '(.*)'", torch_version)), None),
    "build_compiler": CXX_VERSION if KIND != "python" else None,
    "build_nvcc": NVCC_VERSION if KIND == "cuda" else None,
    "build_cuda_archs": ARCHS if KIND == "cuda" else [],
}
cards = f"; for compute capability {', '.join(ARCHS)} and PTX for later ones" if KIND == "cuda" else ""
print(f"bagua_syncbn: {KIND} build: {REASON}{cards}", flush=True)

# Sources that take longest to compile come first: at the end, a core would wait for them.
patterns = ["csrc/cpu/loops/*.cpp", "csrc/*.cpp", "csrc/cpu/*.cpp", "csrc/exchange/*.cpp"] if KIND != "python" else []
patterns += ["csrc/cuda/*.cu", "csrc/cuda/torch/*.cpp"] if KIND == "cuda" else []
sources = [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
setup(
    ext_modules=[Extension("bagua_syncbn._C", sources, py_limited_api=LIMITED)] if sources else [],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if sources and LIMITED else {},
)
