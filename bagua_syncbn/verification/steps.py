"""Steps of copies of a model in float64: on the ranks, and in one process."""

import copy
import ctypes
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..checks import is_distributed
from ..communicators import LOCAL
from ..conversion import convert_sync_batchnorm
from ..sync import tell_peers
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals import pytree

Loss = Callable[[Any, Any], Tensor]

_T = TypeVar("_T")


@dataclass
class Step:
    """Results of one step of a copy."""

    outputs: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := vars(model).get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def copied(model: nn.Module, alone: bool = False, values: dict[str, Tensor] | None = None) -> nn.Module:
    """Returns a copy of ``model`` in float64.

    Args:
        alone: whether its layers synchronize with no other rank.
        values: of parameters and buffers, in place of those of ``model``.
    """
    try:
        model = copy.deepcopy(model)
    except Exception as error:
        raise RuntimeError(
            f"model: expected one that copy.deepcopy can copy, got {type(error).__name__}: {error}; by_layer=True "
            "copies one layer at a time"
        ) from error
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            if name in (values or {}):
                tensor.copy_(values[name])  # type: ignore[index]
    for layer in list(model.modules()) if alone else []:
        if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
            convert_sync_batchnorm(layer, LOCAL)
    return model.double()


def called(module: nn.Module, name: str) -> str:
    """Returns what to call ``module``, by its class and its name in the model."""
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def run(model: nn.Module, batch: Any, loss: Loss, weight: float = 1.0) -> Step:
    """Makes a step of ``model``, whose loss is multiplied by ``weight``."""
    outputs: list[Tensor] = []
    handle = model.register_forward_hook(lambda _, args, output: outputs.extend(_tensors_in(output)))
    with torch.inference_mode(False), torch.enable_grad():
        value = loss_of(model, batch, loss) * weight
        value.backward()
    handle.remove()
    if not weight:
        value = torch.zeros_like(value)  # the mean of nothing is NaN
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Step([output.detach() for output in outputs], value.detach(), gradients, dict(model.named_buffers()))


def loss_of(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """Returns ``loss(model, batch)``.

    Raises:
        TypeError: it is no scalar tensor.
    """
    value = loss(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"size {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss: expected a function of the model and a batch that returns a scalar tensor, got {got}")
    return value


def _tensors_in(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def try_out(model: nn.Module, batch: Any, loss: Loss) -> None:
    """Calls ``loss`` with synchronized layers that return their input, so that no rank waits for one that raises.

    Raises:
        ValueError: ``loss`` calls no part of the model that it is given.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))]
    calls: list[None] = []
    with ExitStack() as stack:
        for part in model.modules():
            handle = part.register_forward_pre_hook(lambda *_: calls.append(None))
            stack.callback(handle.remove)
        for layer in layers:
            vars(layer)["forward"] = _same
            stack.callback(vars(layer).pop, "forward")
        loss_of(model, batch, loss)
    if not calls:
        raise ValueError("loss: expected a function that calls the model that it is given, got one that does not")


def _same(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def telling_peers(model: nn.Module, do: Callable[[], _T]) -> _T:
    """Returns ``do()``. If it raises, ranks that wait for this one in a layer of ``model`` raise too."""
    try:
        return do()
    except Exception as error:
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):
                tell_peers(layer._group_spec, layer, error)  # the first of each group
        raise


def modes(model: nn.Module) -> dict[str, Any]:
    """Returns the training mode of each module, by name."""
    return {f"mode of module {name!r}": module.training for name, module in model.named_modules()}


def sizes(model: nn.Module) -> dict[str, Any]:
    """Returns dtype and size of each tensor, by name."""
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors_of(model).items()}


def digests(model: nn.Module) -> dict[str, str]:
    """Returns a hash of the values of each tensor, by name."""
    return {name: digest(tensor) for name, tensor in tensors_of(model).items()}


def digest(tensor: Tensor) -> str:
    """Returns a hash of the values of ``tensor``."""
    own: Any = tensor.detach()
    values = (own.to_local() if is_distributed(own) else own).cpu().contiguous()
    size = values.numel() * values.element_size()
    return (
        hashlib.sha1((ctypes.c_char * size).from_address(values.data_ptr()), usedforsecurity=False).hexdigest()
        if size
        else ""
    )


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context after which random states, and the modes, buffers and hooks of ``model`` are as before."""
    devices = {tensor.device for tensor in tensors_of(model).values()}
    cuda = [device for device in devices if device.type == "cuda"]
    own = {module: (dict(module._buffers), module.training) for module in model.modules()}
    values = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    numpy = sys.modules.get("numpy.random")  # absent where nothing draws from it
    states = random.getstate(), numpy and numpy.get_state()
    compiler = sys.modules.get("torch._dynamo")  # absent where nothing is compiled
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(cuda))
        if compiler is not None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.set_state(states[1])
            for module, (buffers, training) in own.items():
                module._buffers.clear()
                module._buffers.update(buffers)
                module.training = training
            with torch.no_grad():
                for buffer, before in values.items():
                    if digest(buffer) != digest(before):
                        buffer.copy_(before)
