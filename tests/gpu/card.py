"""A CUDA device that is not there: CPU tensors that bear a mark, so that what is written for a GPU can be rehearsed.

While ``with on_card(...)`` is on, marked tensors say that they are on ``cuda:0``, and an op that is given one beside
another that is not marked raises as torch does. The five ops go to the emulated CUDA kernels, and ATen's five to their
stand-ins. The profiler's trace is made of what was dispatched. Streams and graphs are not there.
"""

import json
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from dispatched import reads_on_host
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.gpu import aten, counts, shapes

CARD = torch.device("cuda", 0)
FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
# Ops of ATen after which a device has nothing to do, beside views, and those that take tensors here and there.
FREE = {"empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "_has_compatible_shallow_copy_type"}
MIXING = {"copy_", "_has_compatible_shallow_copy_type"}

_device_of, _to = torch.Tensor.device, torch.Tensor.to


def marked(tensor):
    return getattr(tensor.untyped_storage(), "on_card", False)


def mark(tensor, on=True):
    tensor.untyped_storage().on_card = on
    return tensor


def pinned(tensor):
    return getattr(tensor.untyped_storage(), "pinned", False)


def is_card(device):
    return device is not None and torch.device(device).type == "cuda"


def tensors_in(*values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def query(self):
        assert self.at
        return False

    synchronize = query

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class Card(TorchDispatchMode):
    def __init__(self, kernels):
        super().__init__()
        self.kernels = {f"bagua_syncbn::{name}": kernel for name, kernel in vars(kernels).items()}
        names = [name for name in shapes.OPS if name != "gather_stats"] + ["gather_stats_with_counts"]
        self.kernels |= {f"aten::batch_norm_{name}": getattr(aten.StandIn, f"batch_norm_{name}") for name in names}
        self.events, self.may_wait = [], True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, short, given = func._schema.name, func._schema.name.split("::")[1], tensors_in(args, kwargs)
        if not any(map(marked, given)):
            return func(*args, **kwargs)
        apart = not all(marked(t) or pinned(t) or (t.dim() == 0 and name.startswith("aten")) for t in given)
        if apart and short not in MIXING:
            raise RuntimeError(f"Expected all tensors to be on the same device, got cuda:0 and cpu, in {name}")
        if reads_on_host(func, args, kwargs) or (apart and short == "copy_" and args[2:] != (True,)):
            self.wait()
        result = self.kernels.get(name, func)(*args, **kwargs)
        lying = {t.untyped_storage()._cdata for t in given}
        for tensor in tensors_in(result):
            if tensor.untyped_storage()._cdata not in lying:
                mark(tensor)
        if name.startswith("c10d::"):
            self.happened("cpu_op", name)
        elif not func.is_view and short not in FREE:
            self.happened("cuda_runtime", "cudaLaunchKernel")
            self.happened("gpu_memcpy" if short in ("_local_scalar_dense", "clone", "copy_") else "kernel", short)
        return result

    def happened(self, category, name):
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": len(self.events), "dur": 0})

    def wait(self):
        if not self.may_wait:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.happened("cuda_runtime", "cudaStreamSynchronize")

    @contextmanager
    def profile(self, activities):
        self.events = []
        yield SimpleNamespace(
            export_chrome_trace=lambda path: Path(path).write_text(json.dumps({"traceEvents": self.events}))
        )

    @contextmanager
    def record_function(self, name):
        self.happened("user_annotation", name)
        event = self.events[-1]
        yield
        event["dur"] = len(self.events) - event["ts"] - 0.5


@contextmanager
def on_card(kernels):
    """``kernels`` has the five ops for CPU tensors, by name."""
    here = Card(kernels)

    def to(self, *args, copy=False, **kwargs):
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        options = {} if memory_format is None else {"memory_format": memory_format}
        result = _to(self, self.dtype if dtype is None else dtype, **options)
        if device is None or is_card(device) == marked(self):
            return result.clone() if copy and result is self else result
        if not (non_blocking and is_card(device)):
            here.wait()
        with _disable_current_modes():
            return mark(result.detach().clone(), is_card(device))

    def factory(original):
        def make(*args, device=None, pin_memory=False, **kwargs):
            if not is_card(device):
                result = original(*args, **kwargs, device=device)
                result.untyped_storage().pinned = pin_memory
                return result
            here.happened("kernel", original.__name__)
            return mark(original(*args, **kwargs, device="cpu"))

        return make

    join = dist.init_process_group
    of_tensors = {
        "device": property(lambda self: CARD if marked(self) else _device_of.__get__(self)),
        "is_cuda": property(marked),
        "is_cpu": property(lambda self: not marked(self)),
        "to": to,
        "cuda": lambda self, non_blocking=False: self.to(CARD, non_blocking=non_blocking),
        "cpu": lambda self: self.to("cpu"),
    }
    of_cuda = {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=2**16),
        "synchronize": lambda: None,
        "Event": Event,
        "set_sync_debug_mode": lambda mode: setattr(here, "may_wait", mode == "default"),
        "_sleep": lambda cycles: None,
    }
    with (
        patch.multiple(torch.Tensor, **of_tensors),
        patch.multiple(torch.cuda, **of_cuda),
        patch.multiple(torch, **{name: factory(getattr(torch, name)) for name in FACTORIES}),
        patch.multiple(counts, profile=here.profile, record_function=here.record_function),
        patch.object(dist, "init_process_group", lambda backend, device_id=None, **rest: join("gloo", **rest)),
        here,
    ):
        yield here
