"""Runs of a model that leave it, and the generators of random numbers, as they were."""

import ctypes
import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..checks import check_callable, is_distributed
from ..groups import LOCAL, spec_of
from ..sync_batchnorm import SyncBatchNorm
from .accumulation import Accumulation
from .attaching import replace_attached

# Attributes of modules that are as before after a run; the last is what torch calls broadcast_buffers from 2.13 on.
_STATE = "training", "_frozen", "_group_spec", "_attached", "_known", "broadcast_buffers", "forward_sync_buffers"


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context after which the modes and buffers of ``model``, and random states, are as before.

    Compiled models run as they are written within it, because compiled code passes over new hooks.
    """
    cuda = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cuda"}
    states = [
        (vars(part), {name: vars(part)[name] for name in _STATE if name in vars(part)}) for part in model.modules()
    ]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
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
            for state, state_before in states:
                for name in _STATE:
                    state.pop(name, None)
                state.update(state_before)
            for own, own_before in buffers:
                own.clear()
                own.update(own_before)
            for buffer, before in values:
                if digest(buffer) != digest(before):  # a write would fail the backward of an earlier call
                    buffer.detach().copy_(before)


def observe(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    see: Callable[[str, Any, Any, Any], None],
    batches: Iterable[Any],
    forward: Callable[[Any], Any],
    training: bool,
) -> None:
    """Runs ``forward`` on ``batches`` without gradients, and leaves ``model`` unchanged.

    Calls ``see`` with name, module, args and kwargs before each call of one of ``layers``, which are in ``training`` or
    not. All other modules are in evaluation, and nothing communicates.
    """
    alone, training_layers = spec_of(LOCAL), set(layers.values()) if training else set()
    with unchanged(model), torch.no_grad(), ExitStack() as hooks:
        for part in model.modules():
            vars(part)["training"] = part in training_layers  # not by train() or eval(), in which some modules do more
            if isinstance(part, DistributedDataParallel):
                part.broadcast_buffers = False
            if isinstance(part, SyncBatchNorm):
                part._group_spec = alone
                replace_attached(part, Accumulation, None)
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(partial(see, name), with_kwargs=True).remove)
        for batch in batches:
            forward(batch)


def forward_of(module: nn.Module, forward: object, device: Any) -> Callable[[Any], Any]:
    """Returns ``forward``; if it is None, a call of ``module`` with a batch, or with the first item of one.

    Raises:
        TypeError: ``forward`` is not callable.
        ValueError: ``device`` is given together with ``forward``.
    """
    check_callable("forward", forward, "a function of a batch")
    if forward is not None and device is not None:
        raise ValueError("device: expected None together with forward, which gets the batches as they come")
    if callable(forward):
        return forward

    def run(batch: Any) -> Any:
        input = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
        if not isinstance(input, Tensor):
            raise TypeError(
                "batches: expected tensors, or lists or tuples that begin with one, got a batch of "
                f"{type(batch).__name__}; give forward"
            )
        return module(input if device is None else input.to(device))

    return run


def digest(tensor: Tensor) -> str:
    """Returns a hash of the values of ``tensor``, or of its part on this rank."""
    own: Any = tensor.detach()
    values = (own.to_local() if is_distributed(own) else own).cpu().contiguous()
    size = values.numel() * values.element_size()
    data = (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
