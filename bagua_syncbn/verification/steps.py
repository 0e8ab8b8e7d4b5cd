"""Steps of copies of a model in float64: on the ranks, and in one process."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..communicators import LOCAL
from ..conversion import convert_sync_batchnorm
from ..sync import tell_peers
from ..sync_batchnorm import SyncBatchNorm
from .ranks import tensors_in

Loss = Callable[[Any, Any], Tensor]

_T = TypeVar("_T")


class Step(NamedTuple):
    """Results of one step of a copy."""

    outputs: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel and torch.compile."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return model if inner is None else unwrapped(inner)


def copied(model: nn.Module, values: dict[str, Tensor], alone: bool) -> nn.Module:
    """Returns a copy of ``model`` in float64.

    Args:
        values: of parameters and buffers, in place of those of ``model``.
        alone: whether its layers synchronize with no other rank.
    """
    try:
        model = copy.deepcopy(model)
    except Exception as error:
        raise RuntimeError(
            f"model: expected one that copy.deepcopy can copy, got {type(error).__name__}: {error}; by_layer=True "
            "copies one layer at a time"
        ) from error
    tensors = tensors_of(model)
    for name, value in values.items():
        tensors[name].detach().copy_(value)
    for layer in list(model.modules()) if alone else []:
        if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
            convert_sync_batchnorm(layer, LOCAL)
    return model.double()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def called(module: nn.Module, name: str) -> str:
    """Returns what to call ``module``, by its class and its name in the model."""
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__


def run(model: nn.Module, batch: Any, loss: Loss, weight: float = 1.0) -> Step:
    """Makes a step of ``model``, whose loss is multiplied by ``weight``."""
    outputs: list[Tensor] = []
    model.register_forward_hook(lambda _, args, output: outputs.extend(tensors_in(output)))
    with torch.enable_grad():
        value = loss_of(model, batch, loss) * weight
        value.backward()
    if not weight:
        value = torch.zeros_like(value)  # the mean of nothing is NaN
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Step(outputs, value.detach(), gradients, dict(model.named_buffers()))


def loss_of(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """Returns ``loss(model, batch)``; raises TypeError if it is no scalar tensor."""
    value = loss(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"size {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss: expected a function of the model and a batch that returns a scalar tensor, got {got}")
    return value


def try_out(model: nn.Module, batch: Any, loss: Loss) -> None:
    """Calls ``loss`` with synchronized layers that return their input, so that no rank waits for one that raises.

    Raises:
        ValueError: ``loss`` calls no part of the model that it is given.
    """
    calls: list[None] = []
    with ExitStack() as stack:
        for part in model.modules():
            stack.callback(part.register_forward_pre_hook(lambda *_: calls.append(None)).remove)
            if isinstance(part, (SyncBatchNorm, nn.SyncBatchNorm)):
                vars(part)["forward"] = lambda input, *_, **__: input
                stack.callback(vars(part).pop, "forward")
        loss_of(model, batch, loss)
    if not calls:
        raise ValueError("loss: expected a function that calls the model that it is given, got one that does not")


def telling_peers(model: nn.Module, do: Callable[[], _T]) -> _T:
    """Returns ``do()``. If it raises, ranks that wait for this one in a layer of ``model`` raise too."""
    try:
        return do()
    except Exception as error:
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):
                tell_peers(layer._group_spec, layer, error)  # the first of each group
        raise


def random_modules(model: nn.Module, batch: Any, loss: Loss) -> list[str]:
    """Returns the modules without children that give other outputs in a second call with the same inputs."""
    found: list[str] = []
    names = {module: called(module, name) for name, module in model.named_modules() if not list(module.children())}

    def call_again(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        again = tensors_in(module.forward(*args, **kwargs))
        if names[module] not in found and not all(map(torch.equal, tensors_in(output), again)):
            found.append(names[module])

    for module in names:
        module.register_forward_hook(call_again, with_kwargs=True)
    run(model, batch, loss)
    return found
