"""Runs of a model that leave it, and the generators of random numbers, as they were."""

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import is_distributed


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context after which the modes and buffers of ``model``, and random states, are as before.

    Compiled models run as they are written within it, because compiled code passes over new hooks.
    """
    cuda = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cuda"}
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    numpy = sys.modules.get("numpy.random")  # absent where nothing draws from it
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(cuda))
        stack.callback(random.setstate, random.getstate())
        if numpy is not None:
            stack.callback(numpy.set_state, numpy.get_state())
        if "torch._dynamo" in sys.modules:  # absent where nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            for module, training, buffers in modules:
                module.training = training
                module._buffers.clear()
                module._buffers.update(buffers)
            for buffer, before in values:
                if digest(buffer) != digest(before):  # a write would fail the backward of an earlier call
                    buffer.detach().copy_(before)


def digest(tensor: Tensor) -> str:
    """Returns a hash of the values of ``tensor``, or of its part on this rank."""
    own: Any = tensor.detach()
    values = (own.to_local() if is_distributed(own) else own).cpu().contiguous()
    size = values.numel() * values.element_size()
    data = (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
