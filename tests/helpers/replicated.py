"""Models in replicas of one process: made, run, and compared with another."""

import time

import pytest
import torch
from torch import nn

from bagua_syncbn.data_parallel import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    replicas,
)
from tests.helpers.steps import step
from tests.helpers.tolerances import assert_close

GPU_PLACES = ("one GPU", "several GPUs")
PLACES = ["cpu", *(pytest.param(place, marks=pytest.mark.gpu) for place in GPU_PLACES)]
PAIRS = {
    SynchronizedBatchNorm1d: nn.BatchNorm1d,
    SynchronizedBatchNorm2d: nn.BatchNorm2d,
    SynchronizedBatchNorm3d: nn.BatchNorm3d,
}
# Seconds within which a test that must not hang ends: far below replicas.TIMEOUT, far above what it takes.
PROMPTLY = 20


def parallel(model, place, count):
    """Returns ``model`` in ``count`` replicas, on the device of the first of them."""
    if place == "several GPUs" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    device = "cpu" if place == "cpu" else "cuda:0"
    return DataParallelWithCallback(
        model.to(device), list(range(count)) if place == "several GPUs" else [device] * count
    )


def build(batch_norm, **options):
    """Returns a model with normalization in nested containers, between layers that mix channels."""
    cls = PAIRS.get(batch_norm, batch_norm)
    width = {nn.BatchNorm1d: nn.Conv1d, nn.BatchNorm2d: nn.Conv2d, nn.BatchNorm3d: nn.Conv3d}[cls]
    model = nn.Sequential(
        batch_norm(3, **options),
        nn.Sequential(width(3, 5, 1), nn.Sequential(batch_norm(5, **options), nn.Tanh())),
        width(5, 2, 1),
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():  # 1 and 0, as normalization layers begin, hide mistakes
            parameter.copy_(torch.randn_like(parameter))
    return model


def inputs_of(batch_norm, samples, step=0):
    """Returns a batch whose channels have variances from far below to far above the eps of 1e-3 that goes with it."""
    generator = torch.Generator().manual_seed(step)
    dimensions = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[PAIRS.get(batch_norm, batch_norm)]
    batch = torch.randn(samples, 3, *(2, 3, 2)[:dimensions], generator=generator, dtype=torch.float64)
    scale = torch.tensor([1e-3, 1e-1, 2.0], dtype=torch.float64).view(-1, *[1] * dimensions)
    return batch * scale + torch.arange(3, dtype=torch.float64).view(scale.shape)


def run(model, batch, grad_output):
    """Runs one step; returns all results by name, on the CPU."""
    return {name.removeprefix("module."): value.cpu() for name, value in step(model, batch, grad_output).items()}


def check_equal(actual, expected, where=""):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("num_batches_tracked"):
            assert actual[name] == value
        else:
            assert_close(actual[name], value, f"{name}{where}")


class Steps(nn.Module):
    """Does in each replica what the test says, with two synchronized layers."""

    def __init__(self, script):
        super().__init__()
        self.early, self.late = SynchronizedBatchNorm1d(2), SynchronizedBatchNorm1d(2)
        self.script = script
        self.freed = []

    def __data_parallel_replicate__(self, ctx, copy_id):
        self.copy_id = copy_id

    def forward(self, *args):
        try:
            return self.script(self, self.copy_id, *args)
        except replicas.ReplicaError as error:
            self.freed.append(error)
            raise


def promptly(function, *args):
    start = time.monotonic()
    try:
        return function(*args)
    finally:
        assert time.monotonic() - start < PROMPTLY
