"""The CUDA kernels on the CPU: builds ``tests/ops/emulator`` with the kernel sources, and calls the ops in it."""

import ctypes
import inspect
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from compiled import ROOT, compile_once
from torch import Tensor

from bagua_syncbn.ops import DTYPES, accumulate_dtype, reference
from bagua_syncbn.ops.definition import SCHEMAS
from bagua_syncbn.ops.words import parts_of, words_in, words_of_row

CSRC, EMULATOR = ROOT / "csrc", ROOT / "tests" / "ops" / "emulator"
KERNELS = ("stats", "masked_stats", "gather_stats", "elemt", "backward_reduce", "backward_elemt", "zeros")
# Checks for undefined behaviour that a kernel can run into: all of them take half as long again to compile.
SANITIZERS = (
    "-fsanitize=address,alignment,bounds,integer-divide-by-zero,shift,signed-integer-overflow",
    "-fno-sanitize-recover=all",
)
FLAGS = ("-std=c++17", "-g1", "-Og", *SANITIZERS, "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror")
# nvcc takes these; what GCC 12 says of swapcontext is about setjmp.
FLAGS += (
    "-Wno-unknown-pragmas",
    "-Wno-clobbered",
    "-Wno-maybe-uninitialized",
    "-Wno-unused-parameter",
    "-DBAGUA_SYNCBN_EMULATOR",
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NO_BUFFER = (None, 0)
LEFT_OUT = "left out of this build"


def find_headers() -> Path | None:
    """The include directory of the CUDA toolkit, of which only headers are needed."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    found = (Path(home, "include") for home in homes if home)
    return next((path for path in found if path.joinpath("cuda_fp16.h").exists()), None)


def compile_object(source: Path, csrc: Path, headers: Path) -> Path:
    """Compiles a file of the server. ``csrc`` is the tree that it includes from, which a test may have changed."""
    command = [*include_emulator(["g++", *FLAGS], headers), f"-I{csrc / 'cuda'}", "-x", "c++", "-c"]
    return compile_once(command, source, [csrc, EMULATOR])


def include_emulator(command: Sequence[str], headers: Path) -> list[str]:
    """Makes the command include precompiled.h before all else."""
    command = [*command, f"-I{EMULATOR}", "-isystem", str(headers)]
    precompiled = compile_once([*command, "-x", "c++-header"], EMULATOR / "precompiled.h", [EMULATOR])
    return [*command, "-include", str(precompiled.with_suffix(""))]


def keep_dtypes(csrc: Path, *kept: str) -> None:
    """Leaves kernels of these dtypes alone in ``csrc``, a copy: compiling it takes less time."""
    values = csrc / "cuda" / "values.cuh"
    text, dispatched = values.read_text(), "return body(Stored());"
    assert dispatched in text
    chosen = " || ".join(f"std::is_same_v<Stored, {dtype}>" for dtype in kept)
    values.write_text(text.replace(dispatched, f'if constexpr ({chosen}) {dispatched} else return "{LEFT_OUT}";'))


def sources(directory: Path, all_dtypes: bool = False) -> list[Path]:
    """The server and the kernels; unless all dtypes are asked for, without those of float16."""
    tree = CSRC
    if not all_dtypes:
        tree = directory / "most_dtypes"
        shutil.copytree(CSRC, tree)
        keep_dtypes(tree, "float", "__nv_bfloat16", "double")
    own = [EMULATOR / f"{name}.cpp" for name in ("emulator", "server")]
    return [*(tree / "cuda" / f"{name}.cu" for name in KERNELS), *own]


def compile_all(paths: Iterable[Path], headers: Path) -> list[Path]:
    with ThreadPoolExecutor(2) as pool:
        trees = ((path, CSRC if path.parent == EMULATOR else path.parents[1]) for path in paths)
        return list(pool.map(lambda given: compile_object(*given, headers), trees))


def build(directory: Path, headers: Path, all_dtypes: bool = False) -> Path:
    """Builds the server in ``directory``, from the kernels of the project."""
    return link(directory, compile_all(sources(directory, all_dtypes), headers))


def build_changed(directory: Path, headers: Path, changed: Path) -> Path:
    """Builds it with ``changed``, one of the kernels in a copy of csrc, and all else as it is."""
    rest = [path for path in sources(directory) if path.name != changed.name]
    # First: of functions that several objects define, the linker takes those of the first object.
    return link(directory, compile_all([changed, *rest], headers))


def link(directory: Path, objects: Iterable[Path]) -> Path:
    program = directory / "server"
    subprocess.run(["g++", *SANITIZERS, *map(str, objects), "-o", str(program)], check=True)
    return program


def build_library(directory: Path, headers: Path) -> Path:
    """Builds a library of the CUDA ops as torch calls them, register.cpp and all, for CPU tensors.

    Only what asks for a device and a stream is replaced, by ``emulator/context.cpp``. Not under sanitizers, which would
    have to be loaded before Python.
    """
    cuda = CSRC / "cuda"
    flags = ["g++", "-std=c++17", "-Og", "-fPIC", "-fno-strict-aliasing", "-w", "-DBAGUA_SYNCBN_EMULATOR"]
    stable = ["-DTORCH_TARGET_VERSION=0x020a000000000000", f"-isystem{Path(torch.__file__).parent / 'include'}"]
    plain = [*include_emulator(flags, headers), f"-I{cuda}"]
    sources = {cuda / f"{name}.cu": plain for name in KERNELS}
    sources[EMULATOR / "emulator.cpp"] = plain
    bindings = (cuda / "torch" / "register.cpp", cuda / "torch" / "workspace.cpp", EMULATOR / "context.cpp")
    sources |= {path: [*flags, *stable, f"-DTORCH={torch.__version__}"] for path in bindings}

    def compile(source: Path) -> Path:
        return compile_once([*sources[source], "-x", "c++", "-c"], source, [CSRC, EMULATOR])

    with ThreadPoolExecutor(2) as pool:
        objects = list(map(str, pool.map(compile, sources)))
    library = directory / "emulated.so"
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lpthread"]
    subprocess.run(["g++", "-shared", *objects, *libraries, "-o", str(library)], check=True)
    return library


class Library(NamedTuple):
    """The library of :func:`build_library`, loaded.

    Attributes:
        ops: all by name, which are torch.ops.bagua_syncbn_emulated.
        emulate_stream: sets handle and id of the stream, and whether a graph is captured on it.
        emulate_support: sets whether the kernels run on the device: 0, or what ``_C.cuda_support`` gives besides.
    """

    path: Path
    ops: SimpleNamespace
    emulate_stream: Callable[[int, int, bool], None]
    emulate_support: Callable[[int], None]


_definitions: list[torch.library.Library] = []  # they last as long as these objects


@cache
def load_library(path: Path) -> Library:
    _definitions.append(torch.library.Library("bagua_syncbn_emulated", "DEF"))
    for schema in SCHEMAS.values():
        _definitions[-1].define(schema)
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    emulate_stream, emulate_support = library.emulate_stream, library.emulate_support
    emulate_stream.argtypes = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_bool
    emulate_support.argtypes = (ctypes.c_int32,)
    emulate_stream.restype = emulate_support.restype = None
    ops = SimpleNamespace(**{name: getattr(torch.ops.bagua_syncbn_emulated, name).default for name in SCHEMAS})
    return Library(path, ops, emulate_stream, emulate_support)


# By op, in the order of their numbers in server.cpp: the integers behind those of every op, the buffers, and which of
# these are results, in the order in which they are returned.
SERVED = {
    "stats": ("is_lengths line activation words", "input mask packed", "packed"),
    "gather_stats": (
        "averages words skip_nonfinite",
        "gathered mean invstd count running_mean running_var num_batches_tracked fault",
        "mean invstd count",
    ),
    "elemt": ("is_lengths line activation", "input output mean invstd weight bias mask residual", "output"),
    "backward_reduce": (
        "is_lengths line activation words",
        "grad_output input grad mean invstd sums grad_weight grad_bias weight bias mask residual",
        "sums grad_weight grad_bias",
    ),
    "backward_elemt": (
        "is_lengths line activation said ranks call zeroes",
        "grad_output input grad_input mean invstd weight sums count fault bias mask",
        "grad_input",
    ),
    "backward_elemt_": (
        "is_lengths line activation said ranks call zeroes",
        "grad_output input grad_input mean invstd weight sums count fault bias mask",
        "",
    ),
}
# Buffers of the size of the input.
LIKE_INPUT = ("input", "grad_output", "residual", "output", "grad_input", "grad")


def channels_of(given: dict[str, Any]) -> int:
    if "gathered" in given:
        return int(given["gathered"].size(1) - 2 - words_in(given["gathered"])) // 2
    return int(given["input"].size(1))


def words_of(given: dict[str, Any]) -> list[int]:
    if "speaker" in given:
        return words_of_row(given["speaker"], given["call"])
    return parts_of(given["fingerprint"])


def make_number(name: str, given: dict[str, Any]) -> Any:
    """Returns what the server takes as ``name``; a list for words."""
    if name == "words":
        return words_in(given["gathered"]) if "gathered" in given else words_of(given)
    if name == "averages":
        return given["running_mean"] is not None and given["momentum"] is None
    if name == "said":  # how many words
        return given["sums"].numel() - 2 * channels_of(given)
    if name == "is_lengths":
        return given["mask"] is not None and given["mask"].dtype != torch.bool
    if name == "line":
        return given["input"].size(-1)
    return given.get(name, 0)


def make_result(name: str, given: dict[str, Any]) -> Tensor:
    """Returns where the server is to put ``name``, full of NaN."""
    channels, like = channels_of(given), given.get("input", given.get("gathered"))
    assert like is not None
    if name in LIKE_INPUT:
        return torch.empty_like(like).fill_(torch.nan)
    if name == "count":
        return torch.tensor(-1)
    sizes = {"packed": 2 * channels + 2, "sums": 2 * channels}
    words = len(words_of(given)) if name in sizes else 0
    weight = given.get("weight") if name.startswith("grad") else None
    dtype = accumulate_dtype(like.dtype) if weight is None else weight.dtype
    return torch.full((sizes.get(name, channels) + words,), torch.nan, dtype=dtype)


class EmulationError(AssertionError):
    """A thread did what it must not, or a sanitizer ended the program."""


class EmulatedOps:
    """The ops with CUDA kernels, for CPU tensors in one of the two layouts.

    Attributes:
        seed: of the order of threads and blocks; another for each call.
        offset: the input, and what has its size, begin so many values after a multiple of 16 bytes.
        grad_offset: the same for grad_output and residual.
        launches: kernels that the last op launched.
    """

    def __init__(self, program: Path) -> None:
        self.program = program
        self.process: Any = None
        self.seed = self.offset = self.launches = 0
        self.grad_offset: int | None = None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _read(self, size: int) -> bytes:
        data: bytes = self.process.stdout.read(size)
        if len(data) < size:
            report = self.process.stderr.read().decode()
            self.close()
            raise EmulationError(report)
        return data

    def _call(self, integers: list[int], doubles: list[float], buffers: list[tuple[Tensor | None, int]]) -> None:
        """Runs an op; what is in ``buffers`` is then what the op left there."""
        if self.process is None:
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
            self.process = subprocess.Popen([self.program], env=environment, **pipes)
        self.seed += 1
        counts = (len(integers), len(doubles), len(buffers))
        message = struct.pack(f"<3q{counts[0]}q{counts[1]}d", *counts, *integers, *doubles)
        for tensor, offset in buffers:
            if tensor is None:
                message += struct.pack("<3q", -1, 0, 0)
                continue
            size = tensor.numel() * tensor.element_size()
            message += struct.pack("<3q", size, offset * tensor.element_size(), CODES.get(tensor.dtype, -1))
            message += memory(tensor).view(torch.uint8).numpy().tobytes() if size else b""
        self.process.stdin.write(message)
        self.process.stdin.flush()
        (length,) = struct.unpack("<q", self._read(8))
        error = self._read(length).decode()
        (self.launches,) = struct.unpack("<q", self._read(8))
        for tensor, _ in buffers:
            if tensor is not None and tensor.numel():
                data = bytearray(self._read(tensor.numel() * tensor.element_size()))
                memory(tensor).copy_(torch.frombuffer(data, dtype=tensor.dtype))
        if error:
            self.close()  # threads have stopped halfway
            raise EmulationError(error)

    def _header(self, op: int, given: dict[str, Any]) -> list[int]:
        if "gathered" in given:
            gathered = given["gathered"]
            return [op, CODES[gathered.dtype], 0, 0, channels_of(given), 0, self.seed, gathered.size(0)]
        input = given["input"]
        batch, channels = input.shape[:2]
        inner = input.numel() // (batch * channels)
        planar = input.is_contiguous() and inner > 1
        assert planar or memory(input).numel() == input.numel()
        return [op, CODES[input.dtype], int(not planar), batch, channels, inner, self.seed]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns the op of this name with the signature of the reference."""
        op = name.removeprefix("batch_norm_")
        if op not in SERVED:
            raise AttributeError(name)
        signature = inspect.signature(getattr(reference, name.removesuffix("_")))

        def run(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return self._run(op, **bound.arguments)

        return run

    def _run(self, op: str, **given: Any) -> Any:
        numbers, names, returned = (text.split() for text in SERVED[op])
        results = {name: make_result(name, given) for name in returned}
        integers = self._header(list(SERVED).index(op), given)
        for name in numbers:
            value = make_number(name, given)
            integers += value if isinstance(value, list) else [int(value)]
        doubles = [given.get(name) or 0.0 for name in (("momentum", "eps") if "eps" in given else ("parameter",))]
        tensors = given | results
        self._call(integers, doubles, [(tensors.get(name), self._offset_of(name)) for name in names])
        return next(iter(results.values())) if len(results) == 1 else tuple(results.values())

    def _offset_of(self, name: str) -> int:
        if name in ("grad_output", "residual") and self.grad_offset is not None:
            return self.grad_offset
        return self.offset if name in LIKE_INPUT else 0


def memory(tensor: Tensor) -> Tensor:
    """The values of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
