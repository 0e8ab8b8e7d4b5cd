"""A CUDA device that is not there: CPU tensors that bear a mark, so that what is written for a GPU can be rehearsed.

While ``with on_card(...)`` is on, "cuda" is memory of the CPU too, but marked: marked tensors say that they are on
``cuda:0``, and an op that is given one beside another that is not marked raises as torch does. The five ops go to the
emulated CUDA kernels, and ATen's five to their stand-ins. Streams do all work at once and in order; they have handles
and ids, which ``workspace.cpp`` sees. A graph remembers what was dispatched during capture, undoes it, and does it at
each replay. What would make the host wait raises where it is forbidden. The profiler's trace is made of what was
dispatched: a launch for each op of ATen and each of ours.

None of this is a run on a GPU: nothing runs at the same time as anything else, NCCL is gloo, the profiler and the clock
are made up. What is rehearsed is Python, and the kernels for their values.
"""

import ctypes
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import aten
import counts
import shapes
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

CARD = torch.device("cuda", 0)
FACTORIES = ("arange", "empty", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
# Ops of ATen after which a device has nothing to do, beside views.
FREE = {"empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "new_empty_strided", "resize_"}
FREE |= {"_has_compatible_shallow_copy_type"}
COPIES = {"_local_scalar_dense", "clone", "copy_"}
# Ops of ATen that take tensors here and there.
MIXING = {"copy_", "_has_compatible_shallow_copy_type"}
# Ops of ATen whose result the host waits for.
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero"}
PROPERTIES = SimpleNamespace(
    name="none", major=9, minor=0, multi_processor_count=132, L2_cache_size=2**16, total_memory=2**36
)

_device_of, _to = torch.Tensor.device, torch.Tensor.to


def marked(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "on_card", False)


def mark(tensor: Tensor, on: bool = True) -> Tensor:
    tensor.untyped_storage().on_card = on
    return tensor


def is_card(device: Any) -> bool:
    return device == 0 if isinstance(device, int) else device is not None and torch.device(device).type == "cuda"


def tensors_in(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@contextmanager
def below_autograd() -> Iterator[None]:
    """Where dispatched ops are when the card sees them: nothing is differentiated or seen any more."""
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        yield


class Stream:
    """Has the handle of a stream and an id that no other one has."""

    _ids = itertools.count(1)

    def __init__(self, cuda_stream: int | None = None, device: Any = None) -> None:
        self.id = next(self._ids)
        self.cuda_stream = 16 * self.id if cuda_stream is None else cuda_stream
        self.device = CARD

    def wait_stream(self, stream: "Stream") -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: "Event") -> None:
        assert isinstance(event, Event)

    def synchronize(self) -> None:
        card().wait("cudaStreamSynchronize")


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._timed = enable_timing
        self._at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._at = time.perf_counter() + card().slept

    def query(self) -> bool:
        assert self._at is not None
        return False

    def synchronize(self) -> None:
        assert self._at is not None

    def elapsed_time(self, end: "Event") -> float:
        assert self._timed
        assert end._timed
        assert self._at is not None
        assert end._at is not None
        return (end._at - self._at) * 1e3


class Graph:
    """What was dispatched during a capture, with the tensors that it came to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def replay(self) -> None:
        assert self.calls, "nothing was captured"
        with below_autograd(), card().on_stream(card().stream, capturing=True):
            for function, args, kwargs, before in self.calls:
                after = function(*args, **kwargs)
                for target, source in zip(tensors_in(before), tensors_in(after), strict=True):
                    if target.untyped_storage()._cdata != source.untyped_storage()._cdata:
                        target.copy_(source)


class Move(torch.autograd.Function):
    """Between the host and the card, with gradients the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_card: bool, non_blocking: bool) -> Tensor:
        ctx.came_from = marked(tensor)
        if not (non_blocking and to_card):
            card().wait("cudaStreamSynchronize")
        with _disable_current_modes():
            return mark(tensor.clone(), to_card)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(CARD if ctx.came_from else "cpu"), None, None


_running = threading.Lock()


def one_at_a_time(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The emulator has one device, whatever thread asks."""

    def call(*args: Any) -> Any:
        with _running:
            return kernel(*args)

    return call


class Card(TorchDispatchMode):
    """What is dispatched while the card is there."""

    def __init__(self, kernels: Any, emulate_stream: Callable[[int, int, bool], None]) -> None:
        super().__init__()
        self.kernels = {f"bagua_syncbn::{name}": one_at_a_time(kernel) for name, kernel in vars(kernels).items()}
        self.kernels |= {f"aten::batch_norm_{name}": getattr(aten.StandIn, f"batch_norm_{name}")
                         for name in (*shapes.OPS, "gather_stats_with_counts") if name != "gather_stats"}  # fmt: skip
        self.emulate_stream = emulate_stream
        self.stream = Stream(0)
        self.graph: Graph | None = None
        self.undo: list[tuple[Tensor, Tensor]] = []
        self.events: list[dict[str, Any]] = []
        self.may_wait = True
        self.slept = 0.0  # seconds that the device did nothing in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        namespace, short = name.split("::")
        given = tensors_in(args, kwargs)
        here = any(map(marked, given))
        apart = here and not all(marked(t) or (t.dim() == 0 and namespace == "aten") for t in given)
        if apart and short not in MIXING:
            raise RuntimeError(f"Expected all tensors to be on the same device, got cuda:0 and cpu, in {name}")
        if here and (short in WAITS or (apart and short == "copy_" and args[2:] != (True,))):
            self.wait("cudaStreamSynchronize")
        run = self.kernels.get(name, func) if here else func
        if here and self.graph is not None:
            self.undo += [(t, t.clone()) for t in self._written(func, args, kwargs)]
        result = run(*args, **kwargs)
        if here:
            lying = {t.untyped_storage()._cdata for t in given}
            for tensor in tensors_in(result):
                if tensor.untyped_storage()._cdata not in lying:
                    mark(tensor)
            self._launched(func, namespace, short)
            if self.graph is not None:
                self.graph.calls.append((run, args, kwargs, result))
        return result

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that an op writes to. Schemas of collectives do not say."""
        if func._schema.name.startswith("c10d::"):
            return tensors_in(args, kwargs)
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        return tensors_in([named.get(name) for name in written])

    def _launched(self, func: Any, namespace: str, short: str) -> None:
        if namespace == "c10d":
            self.happened("cpu_op", f"c10d::{short}")
            return
        if func.is_view or short in FREE:
            return
        self.happened("cuda_runtime", "cudaLaunchKernel")
        self.happened("gpu_memcpy" if short in COPIES else "kernel", short)

    def happened(self, category: str, name: str) -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": len(self.events), "dur": 0})

    def wait(self, name: str) -> None:
        if self.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        if not self.may_wait:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.happened("cuda_runtime", name)

    @contextmanager
    def on_stream(self, stream: Stream, capturing: bool = False) -> Iterator[None]:
        before, self.stream = self.stream, stream
        self.emulate_stream(stream.cuda_stream, stream.id, capturing)
        try:
            yield
        finally:
            self.stream = before
            self.emulate_stream(before.cuda_stream, before.id, False)

    @contextmanager
    def capture(self, graph: Graph, stream: Stream | None = None, capture_error_mode: str = "global") -> Iterator[None]:
        self.graph = graph
        try:
            with self.on_stream(stream or Stream(), capturing=True):
                yield
        finally:
            self.graph = None
            with below_autograd():
                while self.undo:
                    target, value = self.undo.pop()
                    target.copy_(value)


_cards: list[Card] = []


def card() -> Card:
    return _cards[-1]


class Profile:
    """Of torch's profiler: a trace of what was dispatched, in Chrome's format."""

    def __init__(self, activities: Any) -> None:
        pass

    def __enter__(self) -> "Profile":
        card().events = []
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(json.dumps({"traceEvents": card().events}))

    @staticmethod
    @contextmanager
    def range(name: str) -> Iterator[None]:
        card().happened("user_annotation", name)
        event = card().events[-1]
        yield
        event["dur"] = len(card().events) - event["ts"] - 0.5


class Runtime:
    """Of torch.cuda.cudart(): streams by their handles. A new one has that of the last that was destroyed."""

    free = [2**20]  # noqa: RUF012

    def cudaStreamCreate(self, address: int) -> int:  # noqa: N802
        ctypes.c_void_p.from_address(address).value = self.free.pop()
        return 0

    def cudaStreamDestroy(self, handle: int) -> int:  # noqa: N802
        self.free.append(handle)
        return 0


def to(self: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    options = {} if memory_format is None else {"memory_format": memory_format}
    result = _to(self, self.dtype if dtype is None else dtype, **options)
    if device is not None and is_card(device) != marked(self):
        return Move.apply(result, is_card(device), non_blocking)
    return result.clone() if copy and result is self else result


def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
    return self.to(CARD, non_blocking=non_blocking)


def to_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(self: Tensor, **options: Any) -> Any:
        if marked(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return original(self, **options)

    return numpy


def factory(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if not is_card(device):
            return original(*args, **kwargs, device=device)
        result = mark(original(*args, **kwargs, device="cpu"))
        card()._launched(torch.ops.aten.ones.default, "aten", original.__name__)
        return result

    return make


def init_process_group(original: Callable[..., None]) -> Callable[..., None]:
    def init(backend: str, device_id: Any = None, **kwargs: Any) -> None:
        assert (backend == "nccl") == (device_id is not None)
        assert device_id is None or device_id == CARD
        original("gloo", **kwargs)

    return init


def scatter(tensor: Tensor, devices: list[int], chunk_sizes: Any, dim: int, streams: Any) -> list[Tensor]:
    assert devices == [0]
    return [tensor.cuda()]


def gather(tensors: list[Tensor], dim: int, destination: int) -> Tensor:
    (tensor,) = tensors
    return tensor.to("cpu" if destination == -1 else CARD)


class OnDevice:
    """Of torch.cuda.device: other threads enter it before they compute, and see the card from then on."""

    def __init__(self, device: Any) -> None:
        assert is_card(device) or device == 0

    def __enter__(self) -> None:
        card().__enter__()

    def __exit__(self, *exception: Any) -> None:
        card().__exit__(*exception)


@contextmanager
def on_card(kernels: Any, emulate_stream: Callable[[int, int, bool], None]) -> Iterator[Card]:
    """Args:
    kernels: has the five ops for CPU tensors, by name.
    emulate_stream: is told the handle and the id of the current stream, and whether it is being captured.
    """
    here = Card(kernels, emulate_stream)

    def set_sync_debug_mode(mode: str) -> None:
        here.may_wait = mode == "default"

    def sleep(cycles: int) -> None:
        assert isinstance(cycles, int)
        here.slept += cycles / 1e9

    of_tensors = {
        "device": property(lambda self: CARD if marked(self) else _device_of.__get__(self)),
        "is_cuda": property(marked),
        "to": to,
        "cuda": cuda,
        "cpu": lambda self: self.to("cpu"),
        "numpy": to_numpy(torch.Tensor.numpy),
        "pin_memory": lambda self: self,
        "record_stream": lambda self, stream: None,
    }
    of_cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": OnDevice,
        "get_device_properties": lambda device: PROPERTIES,
        "synchronize": lambda device=None: None,
        "Stream": Stream,
        "ExternalStream": Stream,
        "stream": here.on_stream,
        "current_stream": lambda device=None: here.stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": here.capture,
        "is_current_stream_capturing": lambda: here.graph is not None,
        "set_sync_debug_mode": set_sync_debug_mode,
        "_sleep": sleep,
        "cudart": Runtime,
    }
    _cards.append(here)
    with (
        patch.multiple(torch.Tensor, **of_tensors),
        patch.multiple(torch.cuda, **of_cuda),
        patch.multiple(torch, **{name: factory(getattr(torch, name)) for name in FACTORIES}),
        patch.multiple(counts, profile=Profile, record_function=Profile.range),
        patch.object(torch._C, "_scatter", scatter, create=True),
        patch.object(torch._C, "_gather", gather, create=True),
        patch.object(dist, "init_process_group", init_process_group(dist.init_process_group)),
        here,
    ):
        here.emulate_stream(here.stream.cuda_stream, here.stream.id, False)
        yield here
    _cards.pop()
