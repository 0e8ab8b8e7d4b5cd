"""Builds the native kernels, bagua_syncbn._C, with the tools of this machine; it needs no GPU.

docs/building.md lists the environment variables. The first line of output names the kind of build and the reason;
build_info.json records both. Everything else is in pyproject.toml.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

if int(setuptools.__version__.split(".")[0]) < 77:  # pip checks it only in isolated builds
    raise SystemExit(f"setuptools: expected 77 or later, got {setuptools.__version__}; pip install 'setuptools>=77'")
ROOT = Path(__file__).resolve().parent
CUDA_ARCHS = ["75", "80", "86", "90", "100", "120"]
# LibTorch's stable ABI as of 2.10 and CPython's as of 3.10: one binary works with these and all later versions.
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030a0000"]
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]
# Without errno, which would turn each square root into a function call. Silences warnings about GCC's intrinsics
# headers (GCC bug 105593); clang does not know -Wmaybe-uninitialized.
CXX_FLAGS += ["-fno-math-errno", "-Wno-unknown-warning-option", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
NVCC_FLAGS = ["-std=c++17", "-O3", "--cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden"]


def run(command: list[str | Path], environment: dict[str, str] | None = None) -> tuple[list[str], str]:
    """Returns the lines that `command` prints and "", or [] and an error."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [], str(getattr(error, "stderr", None) or "").strip() or str(error)
    return done.stdout.splitlines(), ""


def find_tool(variable: str, *names: str) -> tuple[list[str], str | None]:
    """Returns the command in variable `variable`, else the first of `names` that runs or exists, and its version."""
    given = [os.environ[variable]] if os.environ.get(variable) else names
    commands = [command for command in map(shlex.split, given) if shutil.which(command[0])]
    printed = [(command, run([*command, "--version"])[0]) for command in commands]
    command, lines = max(printed, key=lambda each: bool(each[1]), default=([], []))
    return command, next((line for line in lines if "release" in line), lines[0] if lines else None)


def failing(tool: str, command: list[str | Path]) -> list[str]:
    """Returns a list with the error of `tool`, whose first line is a short reason; empty if `command` succeeds."""
    lines = run(command)[1].splitlines()
    errors = [line for line in lines if "error" in line] or lines
    return ["\n".join([f"{tool} ({errors[0]})", *lines])] if lines else []


def find_torch() -> Path | None:
    """Returns the folder of an installed torch. Any torch works: the library uses only the stable ABI.

    Isolated builds hide torch. pip does so with two environment variables. uv prepends a new environment to PATH, and
    may install into the checkout's .venv, which need not be on PATH.
    """
    if spec := find_spec("torch"):
        return Path(spec.origin).parent
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    code = "from importlib.util import find_spec; print(find_spec('torch').origin)"
    pythons = sys.executable, *(Path(folder, "python3") for folder in [*os.get_exec_path(), ROOT / ".venv" / "bin"])
    found = (line for python in pythons for line in run([python, "-c", code], outside)[0])
    return next((Path(line).parent for line in found), None)


def choose_archs() -> list[str]:
    """Returns the compute capabilities to compile for, such as "80" and "90a"."""
    variable = next(filter(os.environ.get, ("BAGUA_SYNCBN_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST")), "")
    chosen = os.environ.get(variable, "").lower()
    known = re.findall(r"sm_(\d+)", " ".join(run([*NVCC, "--list-gpu-code"])[0])) or CUDA_ARCHS
    if chosen in ("", "all", "native"):
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        here = {line.replace(".", "") for line in run(query)[0]} if chosen != "all" else set()
        if chosen == "native" and not here:
            return []
        return [arch for arch in known if arch in here] or [arch for arch in CUDA_ARCHS if arch in known]
    archs = {re.sub(r"^(sm_|compute_)|\.|\+ptx$", "", name) for name in re.split(r"[;,\s]+", chosen) if name}
    if refused := [arch for arch in archs if not re.fullmatch(f"({'|'.join(known)})[af]?", arch)]:
        raise SystemExit(
            f"{variable}: expected compute capabilities such as 80;90, 9.0 or sm_90a, of those that nvcc knows "
            f"({', '.join(known)}), got {', '.join(refused)}; set BAGUA_SYNCBN_CUDA_ARCHS, or for CPU kernels only "
            "BAGUA_SYNCBN_BUILD=cpu"
        )
    return sorted(archs, key=lambda arch: (int(arch.rstrip("af")), arch))


def unmet(name: str, oldest: tuple[int, int], version: str | None) -> list[str]:
    """Returns [] if `version` is at least `oldest`, else [requirement]. `version` is None if nothing was found."""
    found = re.search(r"(\d+)\.(\d+)", version or "")
    met = found and tuple(map(int, found.groups())) >= oldest
    return [] if met else [f"{name} {oldest[0]}.{oldest[1]} or later" + (f" (found {found[0]})" if found else "")]


def cpp_command() -> list[str]:
    """Returns the compiler with its flags; BAGUA_SYNCBN_CXXFLAGS is last, to override earlier flags."""
    # Without links, because a compiler cache compares paths.
    headers = [f"-isystem{(TORCH / 'include').resolve()}", f"-I{sysconfig.get_path('include')}"]
    return [*CXX, *CXX_FLAGS, *STABLE_ABI, *headers, *EXTRA_FLAGS]


def cuda_command() -> list[str]:
    """Returns nvcc with flags for machine code for ``ARCHS``, and for PTX that drivers compile for all newer GPUs."""
    ptx = min(90, int(ARCHS[-1].rstrip("af")))
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    return [*NVCC, *NVCC_FLAGS, *codes, f"-gencode=arch=compute_{ptx},code=compute_{ptx}"]


class BuildKernels(build_ext):
    """Compiles the sources in parallel, .cpp with the C++ compiler and .cu with nvcc, links them, and records them."""

    def run(self) -> None:
        super().run()
        package = Path(ROOT if self.inplace or self.editable_mode else self.build_lib, "bagua_syncbn")
        sources = runpy.run_path(str(ROOT / "bagua_syncbn" / "_sources.py"))["digest_of"](ROOT)
        package.joinpath("build_info.json").write_text(json.dumps({**INFO, "build_sources": sources}, indent=2) + "\n")

    def build_extension(self, ext: setuptools.Extension) -> None:
        cpp, cuda, linker = cpp_command(), [], [*CXX, *EXTRA_FLAGS]
        if KIND == "cuda":  # links with nvcc, which finds its static runtime
            cuda, linker = cuda_command(), [*NVCC, "--cudart=static", *(f"-Xcompiler={flag}" for flag in EXTRA_FLAGS)]

        done = count(1)

        def compile(source: str) -> str:
            target = Path(self.build_temp, f"{source}.o")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.spawn([*(cuda if source.endswith(".cu") else cpp), "-c", source, "-o", str(target)])
            print(f"bagua_syncbn: compiled {next(done)} of {len(ext.sources)}\n", end="", flush=True)
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile, ext.sources))
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        self.spawn([*linker, "-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", str(library)])


class BuildPackage(build_py):
    """Copies the Python files, and records the kind of build."""

    def run(self) -> None:
        package = Path(ROOT if self.editable_mode else self.build_lib, "bagua_syncbn").resolve()
        if package.parent != ROOT:  # an earlier build, perhaps with modules that were deleted since
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        package.joinpath("build_info.json").write_text(json.dumps(INFO, indent=2) + "\n")


EXTRA_FLAGS = shlex.split(os.environ.get("BAGUA_SYNCBN_CXXFLAGS", ""))
LINUX, FORCED = sys.platform == "linux", os.environ.get("BAGUA_SYNCBN_BUILD") or None
TORCH = find_torch() if LINUX else None
version = runpy.run_path(str(TORCH / "version.py")) if TORCH else {}
# Only on Linux: on macOS without Xcode, calling the compiler opens a dialog.
CXX, CXX_VERSION = find_tool("CXX", "g++", "clang++") if LINUX else ([], None)
nvccs = f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"
NVCC, NVCC_VERSION = find_tool("NVCC", *nvccs) if LINUX and FORCED in (None, "cuda") else ([], None)
# With a CPU build of torch, CUDA kernels are useful only on other machines. ROCm's torch would pass AMD tensors, which
# it calls "cuda", to these kernels.
elsewhere = FORCED == "cuda" or os.environ.get("BAGUA_SYNCBN_CUDA_ARCHS", "native") not in ("", "native")
usable = version.get("cuda") or (elsewhere and not version.get("hip"))
# Other systems need different flags, and often do not have the compiler that torch was built with.
for_cpu = [*unmet("torch", (2, 10), version.get("__version__")), *["compiler"] * (not CXX)] if LINUX else ["Linux"]
# Free-threaded CPython has no stable ABI.
for_cpu += ["Python with the GIL"] * bool(LINUX and sysconfig.get_config_var("Py_GIL_DISABLED"))
if not for_cpu and FORCED != "python":
    oldest = "working compiler for C++17, GCC 11 or clang 13 or later"  # the oldest that were tried
    for_cpu = failing(oldest, [*cpp_command(), "-fsyntax-only", "csrc/module.cpp"])
for_cuda = [*for_cpu, *["torch for CUDA"] * (not usable), *unmet("nvcc", (12, 4), NVCC_VERSION)]
if not for_cuda:  # preprocesses only: nvcc refuses headers of compilers that it does not support
    for_cuda = failing("working nvcc", [*NVCC, *NVCC_FLAGS, "-E", "csrc/cuda/stats.cu"])
ARCHS = [] if for_cuda else choose_archs()  # without CUDA kernels, TORCH_CUDA_ARCH_LIST is for other packages
LACKS = {"python": [], "cpu": for_cpu, "cuda": for_cuda or ["GPU"] * (not ARCHS)}
if FORCED not in (None, *LACKS):
    raise SystemExit(f"BAGUA_SYNCBN_BUILD: expected one of {', '.join(LACKS)}, got {FORCED!r}")
KIND = FORCED or next(kind for kind in reversed(LACKS) if not LACKS[kind])
if missing := LACKS[KIND]:
    hint = "; if torch is installed, activate its environment or pass --no-build-isolation" * (LINUX and not TORCH)
    needed = f"BAGUA_SYNCBN_BUILD={KIND} needs {' and '.join(missing)}"
    raise SystemExit(f"{needed}\nBAGUA_SYNCBN_BUILD=python needs no tools{hint}")
lacks = [lack.splitlines()[0] for lack in next(filter(None, LACKS.values()), [])]
REASON = f"BAGUA_SYNCBN_BUILD={KIND}" if FORCED else f"no {' and no '.join(lacks)}" if lacks else "found all tools"
INFO = {
    "build": KIND,
    "build_reason": REASON,
    "build_torch": version.get("__version__"),
    "build_compiler": CXX_VERSION if KIND != "python" else None,
    "build_nvcc": NVCC_VERSION if KIND == "cuda" else None,
    "build_cuda_archs": ARCHS if KIND == "cuda" else [],
}
cards = f"; for compute capability {', '.join(ARCHS)} and PTX for later ones" if KIND == "cuda" else ""
print(f"bagua_syncbn: {KIND} build: {REASON}{cards}", flush=True)

# Starts with the slowest sources, so that none of them is left to compile alone at the end.
patterns = ["csrc/cpu/loops/*.cpp", "csrc/*.cpp", "csrc/cpu/*.cpp", "csrc/exchange/*.cpp"] if KIND != "python" else []
patterns += ["csrc/cuda/*.cu", "csrc/cuda/torch/*.cpp"] if KIND == "cuda" else []
sources = [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
setuptools.setup(
    ext_modules=[setuptools.Extension("bagua_syncbn._C", sources, py_limited_api=True)] if sources else [],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
    # Raises on free-threaded Python, which gets no sources.
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if sources else {},
)
