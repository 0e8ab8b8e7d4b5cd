"""Builds, runs and compares replicas of models in one process."""

import time
from unittest.mock import patch

import pytest
import torch
from torch import nn

from bagua_syncbn.data_parallel import DataParallelWithCallback, SynchronizedBatchNorm1d, replicas
from tests.helpers.steps import draw, step

GPU_PLACES = ("one GPU", "several GPUs")
PLACES = ["cpu", *(pytest.param(place, marks=pytest.mark.gpu) for place in GPU_PLACES)]
# Seconds that replicas wait for each other in tests of errors.
PROMPTLY = 10


def parallel(model, place, count):
    """Returns ``model`` with ``count`` replicas, on the first replica's device."""
    if place == "several GPUs" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    device = "cpu" if place == "cpu" else "cuda:0"
    devices = list(range(count)) if place == "several GPUs" else [device] * count
    return DataParallelWithCallback(model.to(device), devices)


def build(batch_norm=nn.BatchNorm2d, **options):
    """Returns a model with normalization in nested containers, between layers that mix channels."""
    model = nn.Sequential(
        batch_norm(3, **options),
        nn.Sequential(nn.Conv2d(3, 5, 1), nn.Sequential(batch_norm(5, **options), nn.Tanh())),
        nn.Conv2d(5, 2, 1),
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():  # initial values of 1 and 0 would hide mistakes
            parameter.copy_(torch.randn_like(parameter))
    return model


def draw_step(samples, step=0):
    """Returns input and output gradient of :func:`build`; input variances are far below to far above an eps of 1e-3."""
    scale = torch.tensor([1e-3, 1e-1, 2.0], dtype=torch.float64).view(3, 1, 1)
    mean = torch.arange(3, dtype=torch.float64).view(3, 1, 1)
    return draw(samples, 3, 2, 3, seed=step) * scale + mean, draw(samples, 2, 2, 3, seed=step + 100)


def run(model, batch, grad_output):
    """Runs one step; returns all results by name, on the CPU."""
    return {name.removeprefix("module."): value.cpu() for name, value in step(model, batch, grad_output).items()}


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
    """Calls ``function``. Fails if a replica waits in vain: after seconds, instead of half an hour."""
    start = time.monotonic()
    try:
        with patch.object(replicas, "TIMEOUT", PROMPTLY):
            return function(*args)
    finally:
        assert time.monotonic() - start < PROMPTLY
