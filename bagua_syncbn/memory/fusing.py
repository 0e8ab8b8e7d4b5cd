"""Fusion of layers with subsequent activations in an ``nn.Sequential``."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from .._names import name_of
from .._ops.activations import MODULES, activation_of
from .._ops.options import unlike_torch
from .._torch.modules import check_before_folding
from .._warnings import warn
from ..conversion.convert import undo_hooks
from ..conversion.models import check_module
from ..sync_batchnorm import SyncBatchNorm

_Module = TypeVar("_Module", bound=nn.Module)

# Excludes sigmoid: it is not 0 at 0, so with zero_masked, values at masked positions would change.
_ACTIVATIONS: list[Any] = [cls for cls in MODULES if cls is not nn.Sigmoid]
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class FusedActivation(nn.Identity):
    """Pass-through that replaces an activation fused into the layer.

    It holds references to layer and activation, but not as children, so that names and state dict do not change.
    """

    layer: SyncBatchNorm
    activation: nn.Module

    def __init__(self, layer: SyncBatchNorm, activation: nn.Module) -> None:
        super().__init__()
        self.train(activation.training)
        layer.fused_activation = activation
        vars(self).update(layer=layer, activation=activation)

    def extra_repr(self) -> str:
        return f"{self.activation}"


def fuse_activations(module: _Module) -> _Module:
    """Lets synchronized layers compute the subsequent activation in a :class:`torch.nn.Sequential`.

    Layer and activation become one pass over memory, which stores only the layer's input for the backward pass;
    `In-Place Activated BatchNorm (Rota Bulò, Porzi and Kontschieder, 2018) <https://arxiv.org/abs/1712.02616>`__ stores
    only the output. Outputs are equal up to rounding of the intermediate value.

    A layer is fused if the next module in a container with the forward of :class:`torch.nn.Sequential` is a supported
    torch activation, except a sigmoid; :class:`torch.nn.Identity`, and dropout with ``p=0``, may be in between. A
    pass-through replaces the activation in the container, so names and state dict stay the same. Copies and files keep
    the fusion.

    Layers in several places of ``module``, layers with a custom forward, and modules with hooks or compiled with
    ``compile()`` are skipped. If an activation's class has a patched ``forward``, the patch is ignored. Call this on
    the finished model: code that calls a fused layer outside its container includes the activation.

    Args:
        module: the whole model, converted by :func:`convert_sync_batchnorm`. Ranks may fuse different layers, unless
            second derivatives are taken: messages would be in a different order.

    Returns:
        ``module``, the same object. :func:`revert_sync_batchnorm` restores the activations.

    Raises:
        TypeError: ``module`` is not a module.

    Warns if no layer can be fused.

    Example::

        >>> model = bagua_syncbn.fuse_activations(bagua_syncbn.convert_sync_batchnorm(model))
        >>> print(bagua_syncbn.conversion_report(model))
    """
    check_module(module)
    pairs = list(_pairs_in(module))
    for layer, activation, container, key in pairs:
        container._modules[key] = FusedActivation(layer, activation)
    if not pairs and not any(isinstance(part, FusedActivation) for part in module.modules()):
        warn("fuse_activations: found no synchronized layer followed by an activation in an nn.Sequential")
    return module


def _unfuse(module: nn.Module) -> None:
    for container in module.modules():
        for key, part in container._modules.items():
            if isinstance(part, FusedActivation):
                container._modules[key] = part.activation.train(part.training)
                if part.layer.fused_activation == activation_of(part.activation):  # the user has not changed it
                    del part.layer.fused_activation


undo_hooks.append(_unfuse)


def _pairs_in(model: nn.Module) -> Iterator[tuple[SyncBatchNorm, nn.Module, nn.Module, str]]:
    """Yields each layer that can be fused, the activation, their container, and the activation's name in it."""
    places = Counter(child for part in model.modules() for child in part._modules.values())
    for container in model.modules():
        cls: Any = type(container)
        if not isinstance(container, nn.Sequential) or "forward" in vars(container):
            continue
        if (cls.forward, cls.__iter__) != (nn.Sequential.forward, nn.Sequential.__iter__):
            continue
        keys, modules = list(container._modules), list(container._modules.values())
        for at, layer in enumerate(modules):
            if not isinstance(layer, SyncBatchNorm) or type(layer).forward is not SyncBatchNorm.forward:
                continue
            between = _up_to_activation(modules[at + 1 :])
            if not between or layer.fused_activation is not None or places[layer] > 1:
                continue
            if all(map(_is_plain, [layer, *between])):
                yield layer, between[-1], container, keys[at + len(between)]


def _up_to_activation(modules: list[Any]) -> list[nn.Module]:
    """Returns ``modules`` up to the first activation if the modules before it are no-ops; otherwise []."""
    for at, module in enumerate(modules):
        if type(module) in _ACTIVATIONS:
            return modules[: at + 1]
        if type(module) is not nn.Identity and not (type(module) in _DROPOUTS and module.p == 0):
            break
    return []


def _is_plain(module: nn.Module) -> bool:
    """Returns whether calling ``module`` runs only the forward of its class, without hooks."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return not any(hooks) and module._compiled_call_impl is None and "forward" not in vars(module)


def _refuse_to_fold(layer: Any) -> None:
    """Raises ValueError if folding ``layer`` into weights would lose an option."""
    for name, value in unlike_torch(layer).items() if isinstance(layer, SyncBatchNorm) else ():
        raise ValueError(
            f"bn: cannot fold {name_of(layer)} with {name}={value!r}; call revert_sync_batchnorm on the model first, "
            'see "Folding" in docs/conversion.md'
        )


check_before_folding(_refuse_to_fold)
