"""Replicas of models in one process: building, running and comparing them."""

import time

import pytest
import torch
from torch import nn

from bagua_syncbn.data_parallel import DataParallelWithCallback, SynchronizedBatchNorm1d, replicas
from tests.helpers.steps import draw, step
from tests.helpers.tolerances import assert_close

GPU_PLACES = ("one GPU", "several GPUs")
PLACES = ["cpu", *(pytest.param(place, marks=pytest.mark.gpu) for place in GPU_PLACES)]
DIMENSIONS = {
    nn.BatchNorm1d: (nn.Conv1d, (2,)),
    nn.BatchNorm2d: (nn.Conv2d, (2, 3)),
    nn.BatchNorm3d: (nn.Conv3d, (2, 3, 2)),
}
# Seconds for a test that must not hang: far below replicas.TIMEOUT.
PROMPTLY = 20


def parallel(model, place, count):
    """Returns ``model`` with ``count`` replicas, on the first replica's device."""
    if place == "several GPUs" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    device = "cpu" if place == "cpu" else "cuda:0"
    devices = list(range(count)) if place == "several GPUs" else [device] * count
    return DataParallelWithCallback(model.to(device), devices)


def dimensions_of(batch_norm):
    """Returns the convolution class and the sizes of positions that go with ``batch_norm``."""
    return next(found for cls, found in DIMENSIONS.items() if issubclass(batch_norm, cls))


def build(batch_norm, **options):
    """Returns a model with normalization in nested containers, between layers that mix channels."""
    convolution, _ = dimensions_of(batch_norm)
    model = nn.Sequential(
        batch_norm(3, **options),
        nn.Sequential(convolution(3, 5, 1), nn.Sequential(batch_norm(5, **options), nn.Tanh())),
        convolution(5, 2, 1),
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():  # initial values of 1 and 0 would hide mistakes
            parameter.copy_(torch.randn_like(parameter))
    return model


def inputs_of(batch_norm, samples, step=0):
    """Returns a batch with channel variances from far below to far above an eps of 1e-3."""
    _, positions = dimensions_of(batch_norm)
    scale = torch.tensor([1e-3, 1e-1, 2.0], dtype=torch.float64).view(-1, *[1] * len(positions))
    return draw(samples, 3, *positions, seed=step) * scale + torch.arange(3, dtype=torch.float64).view(scale.shape)


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
    """Runs a test's ``script`` in each replica, with two synchronized layers."""

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
