"""Section gpu: on a CUDA device, ops compared with a copy and ATen's kernels, a layer with torch's SyncBatchNorm.

Ops are timed on the device, layers on host and device. Workloads have enough inputs that each is evicted from the
device's cache before its next turn. On CPU (for testing this file), only our ops run.
"""

import itertools
import math
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules._functions import SyncBatchNorm

import bagua_syncbn
from tests.helpers.one_rank import OneRankGroup

from ..batches import Shape, layouts, make_batch
from ..recorded import Case, Results, of_section, table_of_ratios
from ..timing import Function, Workload, host_seconds, time_workload
from .local import make_ops

# A detector (2), ResNet-50 (4), a 3-D U-Net, points, and an input of 1 GB in half precision.
SHAPES: tuple[Shape, ...] = (
    (8, 32, 320, 320),
    (8, 256, 40, 40),
    (8, 64, 112, 112),
    (8, 256, 56, 56),
    (8, 512, 14, 14),
    (8, 2048, 7, 7),
    (2, 64, 64, 64, 64),
    (100_000, 256),
    (4, 128, 1024, 1024),
)
DTYPES = (torch.float16, torch.float32, torch.bfloat16)
_EPS, _MOMENTUM = 1e-5, 0.1


def cases(job: dict[str, Any]) -> list[tuple[Shape, str, torch.dtype]]:
    shapes = job["shapes"] or SHAPES
    return [case for shape in shapes for case in itertools.product([shape], layouts(shape), DTYPES)]


def make_inputs(shape: Shape, layout: str, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs of x and dy, in total four times as large as the device's cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    pair = [make_batch(shape, layout).to(device, dtype) for _ in range(2)]
    count = math.ceil(max(1, min(256, 4 * cache / (pair[0].numel() * dtype.itemsize))))
    return [(pair[0].clone(), pair[1].clone()) for _ in range(count)]


def device_seconds(function: Function, calls: int) -> float:
    """Times calls on the device; the host enqueues them while the device waits for at least a millisecond."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def make_layers(inputs: list[tuple[Tensor, Tensor]], with_torchs: bool) -> Workload:
    """Returns steps of our layer and torch.nn.SyncBatchNorm's function on one rank, both with collectives."""
    device, channels = inputs[0][0].device, inputs[0][0].size(1)
    if not dist.is_initialized():
        store = f"file://{tempfile.mkdtemp()}/store"
        job = {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
        dist.init_process_group(init_method=store, rank=0, world_size=1, **job)
    layer = bagua_syncbn.SyncBatchNorm(channels, _EPS, _MOMENTUM, device=device, process_group=OneRankGroup())
    parameters, running = list(layer.parameters()), (layer.running_mean, layer.running_var)

    def torchs(x: Tensor) -> Any:
        layer.num_batches_tracked.add_(1)
        return SyncBatchNorm.apply(x, *parameters, *running, _EPS, _MOMENTUM, dist.group.WORLD, 1)

    following = itertools.cycle([(x.detach().requires_grad_(), dy) for x, dy in inputs])

    def step(forward: Any) -> None:
        x, dy = next(following)
        torch.autograd.grad(forward(x), (x, *parameters), dy)

    workload: Workload = {"layer": lambda: step(layer)}
    return workload | ({"torch layer": lambda: step(torchs)} if with_torchs else {})


def measure(shape: Shape, layout: str, dtype: torch.dtype, job: dict[str, Any]) -> Case:
    torch.set_num_threads(1)
    device, on_gpu = torch.device(job["device"]), job["device"] == "cuda"
    inputs = make_inputs(shape, layout, dtype, device)
    measured = time_workload(make_ops(inputs, on_gpu), job, device_seconds if on_gpu else host_seconds)
    layers = time_workload(make_layers(inputs, on_gpu), job)
    case = {"shape": shape, "layout": layout, "dtype": str(dtype).removeprefix("torch.")}
    return {**case, **measured, "layers": layers["microseconds"]}


def gpu_table(results: Results) -> str:
    """Time of each op on the device, relative to copying the input: median (minimum; quartiles)."""
    return table_of_ratios(of_section(results, "gpu"), "copy")


def gpu_layers_table(results: Results) -> str:
    """Time of our layer's step on host and device, relative to torch's: median (minimum; quartiles)."""
    measured = [case | {"microseconds": case["layers"]} for case in of_section(results, "gpu")]
    return table_of_ratios(measured, "torch layer")


TABLES = {"gpu": gpu_table, "gpu layers": gpu_layers_table}
