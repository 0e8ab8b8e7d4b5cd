"""The CUDA kernels on the CPU: builds ``tests/ops/emulator`` with the kernel sources, and calls the ops in it."""

import ctypes
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

from bagua_syncbn.ops import accumulate_dtype, schemas

CSRC, EMULATOR = ROOT / "csrc", ROOT / "tests" / "ops" / "emulator"
KERNELS = ("stats", "gather_stats", "elemt", "backward_reduce", "backward_elemt", "zeros")
KERNELS += ("act_elemt", "act_backward_reduce", "act_backward_elemt")
KERNELS += ("masked_stats", "masked_elemt", "masked_backward_reduce", "masked_backward_elemt")
# Of those for undefined behaviour the ones that a kernel can run into: all of them take half as long again to compile.
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
CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
NO_BUFFER = (None, 0)
FEW_DTYPES = (torch.float32, torch.bfloat16)
LEFT_OUT = "left out of this build"


def find_headers() -> Path | None:
    """The include directory of the CUDA toolkit, of which only headers are needed."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    found = (Path(home, "include") for home in homes if home)
    return next((path for path in found if path.joinpath("cuda_fp16.h").exists()), None)


def compile_object(source: Path, csrc: Path, headers: Path) -> Path:
    """Compiles a file of the server. ``csrc`` is the tree that it includes from, which a test may have changed."""
    includes = [f"-I{EMULATOR}", f"-I{csrc / 'cuda'}", "-isystem", str(headers)]
    command = ["g++", *FLAGS, *includes, "-x", "c++", "-include", str(EMULATOR / "emulator.h"), "-c"]
    return compile_once(command, source, [csrc, EMULATOR])


def keep_dtypes(csrc: Path, *kept: str) -> None:
    """What is compiled from ``csrc``, a copy, has kernels of these dtypes alone: it takes less time."""
    values = csrc / "cuda" / "values.cuh"
    text, dispatched = values.read_text(), "return body(Stored());"
    assert dispatched in text
    chosen = " || ".join(f"std::is_same_v<Stored, {dtype}>" for dtype in kept)
    values.write_text(text.replace(dispatched, f'if constexpr ({chosen}) {dispatched} else return "{LEFT_OUT}";'))


def sources(directory: Path, all_dtypes: bool = False) -> list[Path]:
    """The kernels, with masks and activations of :data:`FEW_DTYPES` unless all are asked for; and the server."""
    few = directory / "few_dtypes"
    if not all_dtypes:
        shutil.copytree(CSRC, few)
        keep_dtypes(few, "float", "__nv_bfloat16")
    trees = {name: CSRC if all_dtypes or not name.startswith(("act_", "masked_")) else few for name in KERNELS}
    own = [EMULATOR / f"{name}.cpp" for name in ("emulator", "server")]
    return [*(tree / "cuda" / f"{name}.cu" for name, tree in trees.items()), *own]


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
    # First, so that what headers define is taken from there by the others too.
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
    plain = [f"-I{EMULATOR}", f"-I{cuda}", "-isystem", str(headers), "-include", str(EMULATOR / "emulator.h")]
    sources = {cuda / f"{name}.cu": plain for name in KERNELS}
    sources[EMULATOR / "emulator.cpp"] = plain
    bindings = (cuda / "torch" / "register.cpp", cuda / "torch" / "workspace.cpp", EMULATOR / "context.cpp")
    sources |= {path: [*stable, f"-DTORCH={torch.__version__}"] for path in bindings}

    def compile(source: Path) -> Path:
        return compile_once([*flags, *sources[source], "-x", "c++", "-c"], source, [CSRC, EMULATOR])

    with ThreadPoolExecutor(2) as pool:
        objects = list(map(str, pool.map(compile, sources)))
    library = directory / "emulated.so"
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lpthread"]
    subprocess.run(["g++", "-shared", *objects, *libraries, "-o", str(library)], check=True)
    return library


class Library(NamedTuple):
    """What :func:`build_library` has built, loaded.

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
    for schema in schemas.SCHEMAS:
        _definitions[-1].define(schema)
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    emulate_stream, emulate_support = library.emulate_stream, library.emulate_support
    emulate_stream.argtypes = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_bool
    emulate_support.argtypes = (ctypes.c_int32,)
    emulate_stream.restype = emulate_support.restype = None
    names = [schema.partition("(")[0] for schema in schemas.SCHEMAS]
    ops = SimpleNamespace(**{name: getattr(torch.ops.bagua_syncbn_emulated, name).default for name in names})
    return Library(path, ops, emulate_stream, emulate_support)


class EmulationError(AssertionError):
    """A thread did what it must not, or a sanitizer ended the program."""


class EmulatedOps:
    """The ops with CUDA kernels, of the signatures in ``bagua_syncbn.ops``, for CPU tensors in one of the two layouts.

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

    def _header(self, op: int, input: Tensor) -> list[int]:
        batch, channels = input.shape[:2]
        inner = input.numel() // (batch * channels)
        planar = input.is_contiguous() and inner > 1
        assert planar or memory(input).numel() == input.numel()
        return [op, CODES[input.dtype], int(not planar), batch, channels, inner, self.seed]

    def batch_norm_stats(self, input: Tensor, words: Sequence[int] = ()) -> Tensor:
        packed = poisoned(2 * input.size(1) + 2 + len(words), accumulate_dtype(input.dtype))
        self._call([*self._header(0, input), *words], [], [(input, self.offset), (packed, 0)])
        return packed

    def batch_norm_gather_stats(
        self,
        gathered: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        momentum: float | None,
        eps: float,
        words: int = 0,
        skip_nonfinite: bool = False,
        fault: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels = (gathered.size(1) - 2 - words) // 2
        averages = running_mean is not None and momentum is None
        header = [1, CODES[gathered.dtype], 0, 0, channels, 0, self.seed, gathered.size(0), int(averages)]
        header += [words, int(skip_nonfinite)]
        mean, invstd = poisoned(channels, gathered.dtype), poisoned(channels, gathered.dtype)
        count = torch.tensor(-1)
        tensors = (gathered, mean, invstd, count, running_mean, running_var, num_batches_tracked, fault)
        self._call(header, [momentum or 0.0, eps], [(tensor, 0) for tensor in tensors])
        return mean, invstd, count

    def batch_norm_elemt(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
    ) -> Tensor:
        output = torch.empty_like(input).fill_(torch.nan)
        factors = [(tensor, 0) for tensor in (mean, invstd, weight, bias)]
        self._call(self._header(2, input), [], [(input, self.offset), (output, self.offset), *factors])
        return output

    def batch_norm_backward_reduce(
        self,
        grad_output: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        words: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels, accumulate = input.size(1), accumulate_dtype(input.dtype)
        sums = poisoned(2 * channels + len(words), accumulate)
        grads = [poisoned(channels, accumulate if weight is None else weight.dtype) for _ in range(2)]
        tensors = [(tensor, 0) for tensor in (mean, invstd, sums, *grads)]
        self._call([*self._header(3, input), *words], [], [self._grad(grad_output), (input, self.offset), *tensors])
        return sums, grads[0], grads[1]

    def batch_norm_backward_elemt(
        self,
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        sums: Tensor,
        count: Tensor,
        ranks: int = 1,
        call: int = 0,
        fault: Tensor | None = None,
    ) -> Tensor:
        grad_input = torch.empty_like(input).fill_(torch.nan)
        factors = [(tensor, 0) for tensor in (mean, invstd, weight, sums, count, fault)]
        values = [self._grad(grad_output), (input, self.offset), (grad_input, self.offset)]
        self._call([*self._header(4, input), sums.numel() - 2 * input.size(1), ranks, call], [], [*values, *factors])
        return grad_input

    def batch_norm_act_elemt(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        residual: Tensor | None,
        activation: int,
        parameter: float,
    ) -> Tensor:
        output = torch.empty_like(input).fill_(torch.nan)
        values = [(input, self.offset), self._grad(residual), (output, self.offset)]
        factors = [(tensor, 0) for tensor in (mean, invstd, weight, bias)]
        self._call([*self._header(5, input), activation], [parameter], [*values, *factors])
        return output

    def batch_norm_act_backward_reduce(
        self,
        grad_output: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: int,
        parameter: float,
        words: Sequence[int] = (),
        with_grad: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels, accumulate = input.size(1), accumulate_dtype(input.dtype)
        sums = poisoned(2 * channels + len(words), accumulate)
        grads = [poisoned(channels, accumulate if weight is None else weight.dtype) for _ in range(2)]
        grad = torch.empty_like(input).fill_(torch.nan) if with_grad else None
        values = [self._grad(grad_output), (input, self.offset), self._grad(residual), (grad, self.offset)]
        tensors = [(tensor, 0) for tensor in (mean, invstd, weight, bias, sums, *grads)]
        self._call([*self._header(6, input), activation, *words], [parameter], [*values, *tensors])
        return sums, grads[0], grads[1], input.new_empty(0) if grad is None else grad

    def batch_norm_act_backward_elemt(
        self,
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        sums: Tensor,
        count: Tensor,
        bias: Tensor | None,
        activation: int,
        parameter: float,
        ranks: int = 1,
        call: int = 0,
        fault: Tensor | None = None,
    ) -> Tensor:
        grad_input = torch.empty_like(input).fill_(torch.nan)
        factors = [(tensor, 0) for tensor in (mean, invstd, weight, sums, count, fault, bias)]
        values = [self._grad(grad_output), (input, self.offset), (grad_input, self.offset)]
        header = [*self._header(7, input), sums.numel() - 2 * input.size(1), ranks, call, activation]
        self._call(header, [parameter], [*values, *factors])
        return grad_input

    def _masked_header(self, op: int, input: Tensor, mask: Tensor) -> list[int]:
        return [*self._header(op, input), int(mask.dtype != torch.bool), input.size(-1)]

    def batch_norm_masked_stats(self, input: Tensor, mask: Tensor, words: Sequence[int] = ()) -> Tensor:
        packed = poisoned(2 * input.size(1) + 2 + len(words), accumulate_dtype(input.dtype))
        buffers = [(input, self.offset), (mask, 0), (packed, 0)]
        self._call([*self._masked_header(8, input, mask), *words], [], buffers)
        return packed

    def batch_norm_masked_elemt(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, mask: Tensor
    ) -> Tensor:
        output = torch.empty_like(input).fill_(torch.nan)
        rest = [(tensor, 0) for tensor in (mask, mean, invstd, weight, bias)]
        self._call(self._masked_header(9, input, mask), [], [(input, self.offset), (output, self.offset), *rest])
        return output

    def batch_norm_masked_backward_reduce(
        self,
        grad_output: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        mask: Tensor,
        words: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels, accumulate = input.size(1), accumulate_dtype(input.dtype)
        sums = poisoned(2 * channels + len(words), accumulate)
        grads = [poisoned(channels, accumulate if weight is None else weight.dtype) for _ in range(2)]
        rest = [(tensor, 0) for tensor in (mask, mean, invstd, sums, *grads)]
        values = [self._grad(grad_output), (input, self.offset)]
        self._call([*self._masked_header(10, input, mask), *words], [], [*values, *rest])
        return sums, grads[0], grads[1]

    def batch_norm_masked_backward_elemt(
        self,
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        sums: Tensor,
        count: Tensor,
        mask: Tensor,
        ranks: int = 1,
        call: int = 0,
        fault: Tensor | None = None,
        zeroes: bool = False,
    ) -> Tensor:
        grad_input = torch.empty_like(input).fill_(torch.nan)
        rest = [(tensor, 0) for tensor in (mask, mean, invstd, weight, sums, count, fault)]
        values = [self._grad(grad_output), (input, self.offset), (grad_input, self.offset)]
        words = sums.numel() - 2 * input.size(1)
        self._call([*self._masked_header(11, input, mask), int(zeroes), words, ranks, call], [], [*values, *rest])
        return grad_input

    def _grad(self, grad_output: Tensor | None) -> tuple[Tensor | None, int]:
        return grad_output, self.offset if self.grad_offset is None else self.grad_offset


def poisoned(size: int, dtype: torch.dtype) -> Tensor:
    return torch.full((size,), torch.nan, dtype=dtype)


def memory(tensor: Tensor) -> Tensor:
    """The values of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
