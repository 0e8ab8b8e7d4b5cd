"""Bagua's own layer. It runs in Bagua jobs, and those on GPUs only; this has not been run on one.

The job becomes a Bagua job when this peer is looked for; our layer talks through Bagua from then on, as it does for its
users. Bagua's collectives do not pass torch's dispatcher: they are not among those that are counted.
"""

import torch
from bagua import torch_api
from bagua.torch_api.communication import is_initialized
from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm
from torch import nn


def make(channels: int, dimensions: int) -> nn.Module:
    if not torch.cuda.is_available():
        raise RuntimeError("expected a CUDA device, got none")
    if not is_initialized():
        torch_api.init_process_group()  # reads what jobs.launch has put into the environment
    layer: nn.Module = SyncBatchNorm(channels)
    return layer
