"""Fusion of layers with subsequent activations in an ``nn.Sequential``."""

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from torch import nn

from ..conversion.hooks import report_notes, undo_hooks
from ..models import check_module
from ..names import name_of
from ..ops.activations import MODULES, activation_of
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals.modules import check_before_folding

_Module = TypeVar("_Module", bound=nn.Module)

# Excludes sigmoid: it is not 0 at 0, so with zero_masked, values at masked positions would change.
_ACTIVATIONS: list[Any] = [cls for cls in MODULES if cls is not nn.Sigmoid]
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Methods at import. Modules of classes that were patched later are skipped.
_METHODS: dict[Any, Any] = {
    cls: (cls.__call__, cls.forward) for cls in (SyncBatchNorm, *_ACTIVATIONS, nn.Identity, *_DROPOUTS)
}
_SEQUENTIAL = nn.Sequential.__call__, nn.Sequential.forward, nn.Sequential.__iter__


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


class Pair(NamedTuple):
    """A layer and the activation that follows it in a container."""

    layer: SyncBatchNorm
    activation: nn.Module
    container: nn.Module
    key: str  # name of the activation in the container
    name: str  # name of the activation in the model
    obstacle: str  # why the two cannot be fused; empty if they can


def fuse_activations(module: _Module) -> _Module:
    """Lets synchronized layers compute the subsequent activation in a :class:`torch.nn.Sequential`.

    Layer and activation become one pass over memory, which stores only the layer's input for the backward pass;
    `In-Place Activated BatchNorm (Rota Bulò, Porzi and Kontschieder, 2018) <https://arxiv.org/abs/1712.02616>`__ stores
    only the output. Outputs are equal up to rounding of the intermediate value.

    A layer is fused if the next module in a container with the forward of :class:`torch.nn.Sequential` is a supported
    torch activation, except a sigmoid; :class:`torch.nn.Identity`, and dropout with ``p=0``, may be in between. A
    pass-through replaces the activation in the container, so names and state dict stay the same. Copies and files keep
    both.

    Layers in several places of ``module``, layers with a custom forward, and modules with hooks or compiled with
    ``compile()`` are skipped; :func:`conversion_report` lists them. Call this on the finished model: code that calls a
    fused layer outside its container includes the activation.

    Args:
        module: the whole model, converted by :func:`convert_sync_batchnorm`. Ranks may fuse different layers, unless
            second derivatives are taken: messages would be in a different order.

    Returns:
        ``module``, the same object. :func:`revert_sync_batchnorm` restores the activations.

    Raises:
        TypeError: ``module`` is not a module.

    It warns if no layer can be fused.

    Example::

        >>> model = bagua_syncbn.fuse_activations(bagua_syncbn.convert_sync_batchnorm(model))
        >>> print(bagua_syncbn.conversion_report(model))
    """
    check_module(module)
    pairs = [pair for pair in pairs_in(module) if not pair.obstacle]
    for layer, activation, container, key, *_ in pairs:
        container._modules[key] = FusedActivation(layer, activation)
    if not pairs and not any(isinstance(part, FusedActivation) for part in module.modules()):
        warnings.warn(
            "fuse_activations: found no synchronized layer followed by an activation in an nn.Sequential; "
            "conversion_report lists the layers",
            stacklevel=2,
        )
    return module


@undo_hooks.register
def _unfuse(module: nn.Module) -> None:
    for container in module.modules():
        for key, part in container._modules.items():
            if isinstance(part, FusedActivation):
                container._modules[key] = part.activation.train(part.training)
                if part.layer.fused_activation == activation_of(part.activation):  # not set since
                    del part.layer.fused_activation


@report_notes.register
def _notes(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name, part in model.named_modules():
        if isinstance(part, FusedActivation):
            yield part.layer, f"computes {name_of(part.activation, name)}"
    for pair in pairs_in(model):
        obstacle = pair.obstacle and f": {pair.obstacle}"
        yield pair.layer, f"{name_of(pair.activation, pair.name)} is not fused{obstacle}"


def pairs_in(model: nn.Module) -> Iterator[Pair]:
    """Yields the layers of ``model`` that are followed by an activation in an ``nn.Sequential`` and are not fused."""
    places = Counter(child for part in model.modules() for child in part._modules.values())
    for name, container in model.named_modules():
        cls: Any = type(container)
        if not isinstance(container, nn.Sequential) or "forward" in vars(container):
            continue
        if (cls.__call__, cls.forward, cls.__iter__) != _SEQUENTIAL:
            continue
        keys, modules = list(container._modules), list(container._modules.values())
        for at, layer in enumerate(modules):
            between = _up_to_activation(modules[at + 1 :]) if isinstance(layer, SyncBatchNorm) else []
            if between and type(layer).forward is SyncBatchNorm.forward and layer.fused_activation is None:
                key, obstacle = keys[at + len(between)], ""
                if places[layer] > 1:
                    obstacle = "the layer is in several places"
                elif not all(map(_is_plain, [layer, *between])):
                    obstacle = "hooks or compile() on the layer or the activation"
                yield Pair(layer, between[-1], container, key, f"{name}.{key}".lstrip("."), obstacle)


def _up_to_activation(modules: list[Any]) -> list[nn.Module]:
    """Returns ``modules`` up to the first activation if the modules before it are no-ops; otherwise, none."""
    for at, module in enumerate(modules):
        if type(module) in _ACTIVATIONS:
            return modules[: at + 1]
        if type(module) is not nn.Identity and not (type(module) in _DROPOUTS and module.p == 0):
            break
    return []


def _is_plain(module: nn.Module) -> bool:
    """Returns whether a call of ``module`` only calls the forward that its class had at import."""
    cls: Any = type(module)
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    is_changed = any(hooks) or module._compiled_call_impl is not None or "forward" in vars(module)
    methods = _METHODS[SyncBatchNorm if isinstance(module, SyncBatchNorm) else cls]
    return not is_changed and (cls.__call__, cls.forward) == methods


def _refuse_to_fold(layer: Any) -> None:
    """Raises ValueError if folding ``layer`` into weights would lose its activation or its ``eps_mode``."""
    if isinstance(layer, SyncBatchNorm) and (layer.eps_mode == "clamp" or layer.fused_activation is not None):
        has = "eps_mode='clamp'" if layer.eps_mode == "clamp" else f"the activation {layer.fused_activation}"
        raise ValueError(
            f"bn: cannot fold {name_of(layer)} with {has}; call revert_sync_batchnorm on the model first, see "
            '"Folding" in docs/conversion.md'
        )


check_before_folding(_refuse_to_fold)
