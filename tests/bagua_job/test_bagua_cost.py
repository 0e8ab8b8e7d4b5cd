"""What a layer costs beside Bagua's own, counted in one harness; docs/bagua.md has the table."""

import gc
import re
import weakref
from contextlib import contextmanager
from pathlib import Path

import bagua.torch_api.contrib.sync_batchnorm as theirs
import torch
import torch.distributed as dist
from streams import timeline

import bagua_syncbn
import bagua_syncbn.contrib

CHANNELS = 64
PAGE = Path(__file__).resolve().parents[2] / "docs" / "bagua.md"


@contextmanager
def cuda_functions_of_torch():
    """Those that Bagua's layer calls exist for CUDA only: the same in plain torch, and copies that are counted.

    A tensor is on the device if it came from one of these functions or was copied to it.
    """
    on_device = set()
    originals = {}

    def place(tensor):
        on_device.add(tensor.untyped_storage().data_ptr())
        return tensor

    def stats(input, eps):
        var, mean = torch.var_mean(input, (0, 2, 3), correction=0)
        return place(mean), place((var + eps).rsqrt())

    def gather(input, means, invstds, running_mean, running_var, momentum, eps, counts):
        weights = (counts / counts.sum()).view(-1, 1)
        mean = (means * weights).sum(0)
        var = ((invstds**-2 - eps + (means - mean) ** 2) * weights).sum(0)
        return mean, (var + eps).rsqrt()

    def shaped(tensor):
        return tensor.view(1, -1, 1, 1)

    def elemt(input, weight, bias, mean, invstd, eps):
        return (input - shaped(mean)) * shaped(invstd * weight) + shaped(bias)

    def backward_reduce(grad, input, mean, invstd, weight, *needs):
        sum_dy, sum_dy_xmu = grad.sum((0, 2, 3)), (grad * (input - shaped(mean))).sum((0, 2, 3))
        return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()

    def backward_elemt(grad, input, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
        total = counts.sum()
        projected = (input - shaped(mean)) * shaped(invstd**2 * sum_dy_xmu / total)
        return (grad - shaped(sum_dy / total) - projected) * shaped(invstd * weight)

    def cpu(tensor):
        timeline.copies.append("to the host")
        return tensor

    def cuda(tensor):
        if tensor.untyped_storage().data_ptr() not in on_device:
            timeline.copies.append("to the device")
        return place(tensor)

    stand_ins = {
        (torch, "batch_norm_stats"): stats,
        (torch, "batch_norm_gather_stats_with_counts"): gather,
        (torch, "batch_norm_elemt"): elemt,
        (torch, "batch_norm_backward_reduce"): backward_reduce,
        (torch, "batch_norm_backward_elemt"): backward_elemt,
        (torch.Tensor, "cpu"): cpu,
        (torch.Tensor, "cuda"): cuda,
    }
    for (owner, name), stand_in in stand_ins.items():
        originals[owner, name] = getattr(owner, name)
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def forward_of_baguas(layer, input):
    # Its forward begins with a check that the input is on a GPU.
    arguments = layer.running_mean, layer.running_var, layer.eps, layer.momentum
    return theirs._SyncBatchNorm.apply(input, layer.weight, layer.bias, *arguments)


def count(ours):
    """One step of one layer, after two that make what is made once and agree on what ranks send."""
    torch.manual_seed(dist.get_rank())
    layer = bagua_syncbn.SyncBatchNorm2d(CHANNELS)
    forward = layer if ours else lambda input: forward_of_baguas(layer, input)
    kept = []
    to_bagua_tensor = torch.Tensor.to_bagua_tensor

    def noted(tensor, *args):
        view = to_bagua_tensor(tensor, *args)
        kept.append(weakref.ref(view))
        return view

    with cuda_functions_of_torch():
        torch.Tensor.to_bagua_tensor = noted
        try:
            for _ in range(3):
                input = torch.randn(4, CHANNELS, 3, 3).requires_grad_()
                grad_output = torch.randn(4, CHANNELS, 3, 3)
                gc.collect()
                kept.clear()
                timeline.clear()
                output = forward(input)
                rows = [summary()]
                timeline.clear()
                output.backward(grad_output)
                rows.append(summary())
        finally:
            torch.Tensor.to_bagua_tensor = to_bagua_tensor
    result = output.detach(), input.grad, input.detach(), grad_output
    del output
    gc.collect()
    return rows, sum(view() is not None for view in kept), result


def summary():
    return {
        "Collectives": len(timeline.collectives),
        "Bytes that a rank sends": sum(sent_bytes(*collective) for collective in timeline.collectives),
        "Waits of the host for a stream": len(timeline.host_waits),
        "Copies to the host": timeline.copies.count("to the host"),
        "Copies to the device": timeline.copies.count("to the device"),
    }


def sent_bytes(what, stream, numel, dtype):
    size = numel * (8 if dtype.endswith("64") else 4)
    return size // dist.get_world_size() if what == "allgather" else size


def table_of_the_page():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) / ([^|]+) \| ([^|]+) / ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: tuple(map(int, cells)) for name, *cells in rows}


def test_the_table_of_costs(pool):
    ours, theirs_ = pool.run(count, 2, True)[0], pool.run(count, 2, False)[0]
    measured = {}
    for name in ours[0][0]:
        measured[name] = tuple(row[name] for rows in (ours[0], theirs_[0]) for row in rows)
    assert measured == table_of_the_page()
    kept = re.search(r"Tensors that stay allocated after the step \| (\d+) \| (\d+) \|", PAGE.read_text())
    assert (ours[1], theirs_[1]) == tuple(map(int, kept.groups()))


def test_both_compute_the_same(pool):
    """So that what is counted is the same work: the stand-ins for torch's functions are right."""
    for first, second in zip(pool.run(count, 2, True), pool.run(count, 2, False), strict=True):
        for actual, expected in zip(first[2], second[2], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
