"""Section gpu: on a CUDA device, ops compared with a copy and ATen's kernels, a layer with torch's SyncBatchNorm.

Ops are timed on the device, layers on host and device. Workloads have enough inputs that each is evicted from the
device's cache before its next turn. On CPU (for testing this file), only our ops run.
"""

import itertools
import math
import tempfile
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules._functions import SyncBatchNorm

import bagua_syncbn
from bagua_syncbn import ops

from ..batches import Shape, layouts, make_batch
from ..one_rank import OneRankGroup
from ..recorded import Case, Results, of_section, shape_of, table
from ..timing import Function, Workload, host_seconds, time_workload
from .ops import MOVED, copy_ratios

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


def make_ops(inputs: list[tuple[Tensor, Tensor]], with_atens: bool) -> Workload:
    """Returns our five ops, a copy of the input, and ATen's five kernels, called as in torch.nn.SyncBatchNorm."""
    x, dy = inputs[0]
    weight, bias = torch.randn(2, x.size(1), device=x.device).unbind()
    running, batches = (torch.zeros_like(bias), torch.ones_like(bias)), torch.tensor(0, device=x.device)
    packed = ops.batch_norm_stats(x)[None]
    mean, invstd, count = ops.batch_norm_gather_stats(packed, None, None, None, _MOMENTUM, _EPS)
    sums = ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight)[0]
    factors, wide, narrow, parts = (mean, invstd, weight), count.view(1).float(), count.view(1).int(), sums.chunk(2)
    gather, copy = torch.batch_norm_gather_stats_with_counts, torch.empty_like(x)
    calls: dict[str, Any] = {
        "copy": lambda x, dy: copy.copy_(x),
        "stats": lambda x, dy: ops.batch_norm_stats(x),
        "gather_stats": lambda x, dy: ops.batch_norm_gather_stats(packed, *running, batches, _MOMENTUM, _EPS),
        "elemt": lambda x, dy: ops.batch_norm_elemt(x, weight, bias, mean, invstd),
        "backward_reduce": lambda x, dy: ops.batch_norm_backward_reduce(dy, x, *factors),
        "backward_elemt": lambda x, dy: ops.batch_norm_backward_elemt(dy, x, weight, mean, invstd, sums, count),
    }
    if with_atens:
        calls |= {
            "aten stats": lambda x, dy: torch.batch_norm_stats(x, _EPS),
            "aten gather_stats": lambda x, dy: gather(x, mean[None], invstd[None], *running, _MOMENTUM, _EPS, wide),
            "aten elemt": lambda x, dy: torch.batch_norm_elemt(x, weight, bias, mean, invstd, _EPS),
            "aten backward_reduce": lambda x, dy: torch.batch_norm_backward_reduce(dy, x, *factors, True, True, True),
            "aten backward_elemt": lambda x, dy: torch.batch_norm_backward_elemt(dy, x, *factors, *parts, narrow),
        }
    following = itertools.cycle(inputs)
    return {name: lambda call=call: call(*next(following)) for name, call in calls.items()}


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
    name = str(dtype).removeprefix("torch.")
    return {"shape": shape, "layout": layout, "dtype": name, **measured, "layers": layers["microseconds"]}


def _together(case: Case, side: str) -> float:
    return sum(median(case["microseconds"][f"{side}{op}"]) for op in (*MOVED, "gather_stats"))


def gpu_table(results: Results) -> str:
    """Time ratios: ops to copying the bytes that they must move, our ops to ATen's, our step to torch's."""

    def row(case: Case) -> list[str]:
        shown = [median(copy_ratios(case, op)) for op in MOVED]
        if "aten stats" in case["microseconds"]:
            layer, torchs = (median(case["layers"][name]) for name in ("layer", "torch layer"))
            shown += [_together(case, "") / _together(case, "aten "), layer / torchs]
        size = math.prod(case["shape"]) * getattr(torch, case["dtype"]).itemsize
        rate = 2 * size / median(case["microseconds"]["copy"]) / 1e3
        cells = [f"{value:.2f}" for value in shown] + [""] * (len(MOVED) + 2 - len(shown))
        return [shape_of(case), case["layout"], case["dtype"], *cells, f"{rate:.4g}"]

    header = ["input", "layout", "dtype", *MOVED, "ops / ATen's", "step / torch's", "copy, GB/s"]
    return table(header, map(row, of_section(results, "gpu")))


TABLES = {"gpu": gpu_table}
