"""Compiles and loads the CUDA ops for the CPU, with ``tests/ops/emulator`` instead of the CUDA runtime.

``emulator/context.cpp`` replaces only the device and the stream. Under AddressSanitizer (``make sanitize``), the
library is compiled with sanitizers.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch

from bagua_syncbn._ops.definition import SCHEMAS

ROOT = Path(__file__).parents[2]
CSRC, EMULATOR = ROOT / "csrc", ROOT / "tests" / "ops" / "emulator"
FLAGS = ("-std=c++17", "-Og", "-fPIC", "-fno-strict-aliasing", "-w", "-DBAGUA_SYNCBN_EMULATOR")
# The kinds of undefined behavior that a kernel can cause. Checks for all kinds would take 1.5 times as long to compile.
UNDEFINED = "alignment,bounds,integer-divide-by-zero,shift,signed-integer-overflow"
ALIGNED = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")  # a GPU also traps on misaligned vectors
SANITIZED = ("-g1", f"-fsanitize=address,{UNDEFINED}", "-fno-sanitize-recover=all")


def find_headers() -> Path | None:
    """Returns the include directory of the CUDA toolkit. The emulator needs only its headers."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    found = (Path(home, "include") for home in homes if home)
    return next((path for path in found if path.joinpath("cuda_fp16.h").exists()), None)


def build_library(headers: Path) -> Path:
    """Returns the library in build/tests, compiled once per sources, flags and versions."""
    sanitized = SANITIZED if "libasan" in os.environ.get("LD_PRELOAD", "") else ALIGNED
    flags = ["g++", *FLAGS, *sanitized]
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(f"{version} {torch.__version__} {headers} {flags}".encode())
    for path in sorted(path for tree in (CSRC, EMULATOR) for path in tree.rglob("*.*")):
        digest.update(path.name.encode() + path.read_bytes())
    folder = ROOT / "build" / "tests" / digest.hexdigest()[:20]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "emulated.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
        if not library.exists():
            _compile(flags, headers, folder).replace(library)
    return library


def _compile(flags: list[str], headers: Path, folder: Path) -> Path:
    including = [*flags, f"-I{EMULATOR}", "-isystem", str(headers)]
    precompiled = folder / "precompiled.h.gch"
    command = [*including, "-x", "c++-header", str(EMULATOR / "precompiled.h"), "-o", str(precompiled)]
    subprocess.run(command, check=True)
    kernels = [*including, "-include", str(precompiled.with_suffix("")), f"-I{CSRC / 'cuda'}"]
    stable = ["-DTORCH_TARGET_VERSION=0x020a000000000000", f"-isystem{Path(torch.__file__).parent / 'include'}"]
    bindings = [*flags, *stable]
    files = dict.fromkeys((CSRC / "cuda").glob("*.cu"), kernels)
    files[EMULATOR / "emulator.cpp"] = kernels
    files |= dict.fromkeys((CSRC / "cuda" / "torch" / "register.cpp", EMULATOR / "context.cpp"), bindings)

    def compile(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        subprocess.run([*files[source], "-x", "c++", "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile, files))
    library = folder / "unfinished.so"
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lpthread"]
    subprocess.run([*flags, "-shared", *objects, *libraries, "-o", str(library)], check=True)
    return library


def load_library(path: Path) -> SimpleNamespace:
    """Returns the loaded library.

    ``ops`` has torch.ops.bagua_syncbn_emulated by name, ``native`` all functions. ``launches()`` returns the names of
    the kernels launched since its last call, followed by " in parts" if several blocks share a channel.
    """
    definitions = torch.library.Library("bagua_syncbn_emulated", "DEF")
    for schema in SCHEMAS.values():
        definitions.define(schema)
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    library.forget_launches.restype, library.last_offset.restype = ctypes.c_char_p, ctypes.c_int64
    ops = SimpleNamespace(**{name: getattr(torch.ops.bagua_syncbn_emulated, name).default for name in SCHEMAS})

    def launches() -> list[str]:
        lines = library.forget_launches().decode().splitlines()
        names = [re.sub(r".*kKernel\)[^=]*= ([^;]*);.*\]", r"\1", line) for line in lines]
        return [re.sub(r"bagua_syncbn::cuda::|{anonymous}::|\(anonymous namespace\)::", "", name) for name in names]

    return SimpleNamespace(ops=ops, native=library, launches=launches, kept=definitions)
