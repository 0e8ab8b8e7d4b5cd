"""Dry runs: run a model, then restore its state and the random states."""

import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._errors import restored
from .._groups import LOCAL, spec_of
from .._step.checks import check_callable
from .._torch.modules import defined_in
from ..sync_batchnorm import SyncBatchNorm
from .models import check_module

# Module attributes that are restored. forward_sync_buffers is torch 2.13's name of broadcast_buffers.
_STATE = "training", "_sync_state", "broadcast_buffers", "forward_sync_buffers"


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores modes and buffers of ``model``, the random states of the CPU and its GPUs, and the grad mode on exit.

    Compiled models run eagerly inside the context, because compiled code ignores new hooks.
    """
    cuda = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cuda"}
    parts = list(model.modules())
    states = [{name: vars(part)[name] for name in _STATE if name in vars(part)} for part in parts]
    # TorchScript cannot exchange buffers.
    fixed = {buffer for part in parts if isinstance(part, torch.jit.ScriptModule) for buffer in part.buffers()}
    saved = [(part, dict(part._buffers)) for part in parts if not isinstance(part, torch.jit.ScriptModule)]
    copies = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    python_state, get_numpy_state = random.getstate(), defined_in("numpy.random", "get_state")
    numpy_state = get_numpy_state() if get_numpy_state else None
    stance: Any = nullcontext()
    has_grad = torch.is_grad_enabled()

    def restore() -> None:
        for part, state in zip(parts, states, strict=True):
            vars(part).update(state)
            for name in set(_STATE).difference(state):
                vars(part).pop(name, None)
        for part, buffers in saved:
            part._buffers.update(buffers)
            for name in part._buffers.keys() - buffers.keys():
                part._buffers.pop(name, None)
        for buffer in fixed:
            buffer.detach().copy_(copies[buffer])
        random.setstate(python_state)
        if numpy_state is not None:
            defined_in("numpy.random", "set_state")(numpy_state)
        torch.set_grad_enabled(has_grad)
        stance.__exit__(None, None, None)

    with torch.random.fork_rng(cuda), restored(restore):
        if "torch._dynamo" in sys.modules:  # else, nothing is compiled
            stance = torch.compiler.set_stance("force_eager")
        # Writes to the buffers themselves would break the backward of earlier calls.
        for part, buffers in saved:
            part._buffers.update((name, copies[buffer]) for name, buffer in buffers.items() if buffer is not None)
        yield


@contextmanager
def dry_run(model: nn.Module, training: Collection[nn.Module] = ()) -> Iterator[None]:
    """Runs ``model`` without gradients or communication inside the context; restores its state on exit.

    Modules in ``training`` run in training mode, all other modules in evaluation mode.
    """
    local = spec_of(LOCAL)
    with unchanged(model):
        torch.set_grad_enabled(False)
        for part in model.modules():
            vars(part)["training"] = part in training  # train() and eval() have side effects in some modules
            if isinstance(part, DistributedDataParallel):
                part.broadcast_buffers = False
            if isinstance(part, SyncBatchNorm):
                vars(part)["_sync_state"] = replace(part._sync_state, group=local, steps={})
        yield


def batch_loop(module: nn.Module, batches: Iterable[Any], forward: Any, device: Any) -> Callable[[], None]:
    """Checks the arguments and returns a function that calls ``forward`` with each batch.

    If ``forward`` is None, it calls ``module`` with each batch, or with the first item of the batch.

    Raises:
        TypeError: ``module`` is not a module, ``batches`` not an iterable of batches, ``forward`` not callable with
            a batch, or ``device`` not a device.
        ValueError: ``device`` is given together with ``forward``.
    """
    check_module(module)
    check_callable("forward", forward, "batch")
    if forward is not None and device is not None:
        raise ValueError(f"device: expected None with forward, which gets unchanged batches; got {device!r}")
    if not isinstance(device, (torch.device, str, int, type(None))):
        raise TypeError(f"device: expected a torch.device, its name or number, or None, got {type(device).__name__}")
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor):
        raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}")

    def call(batch: Any) -> Any:
        input = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
        if not isinstance(input, Tensor):
            raise TypeError(
                "batches: expected tensors, or lists or tuples that begin with a tensor, got a batch of type "
                f"{type(batch).__name__}; for other batches, pass forward"
            )
        return module(input if device is None else input.to(device))

    remaining = iter(batches)  # may raise; callers communicate later

    def run() -> None:
        for batch in remaining:
            (forward or call)(batch)

    return run
