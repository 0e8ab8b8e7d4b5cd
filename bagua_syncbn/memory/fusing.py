"""Fusion of layers with the activations that follow them in an ``nn.Sequential``.

The layer gets the activation as its ``fused_activation``, and a pass-through takes the activation's place in the
container.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from torch import nn

from ..conversion.hooks import report_notes, undo_hooks
from ..models import check_module
from ..names import name_of
from ..ops.activations import MODULES, Activation
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals.modules import check_before_folding

_Module = TypeVar("_Module", bound=nn.Module)

# Methods as they were at import. Modules of classes that were patched later are left alone.
_CALL = nn.Module.__call__
_SEQUENTIAL = nn.Sequential.__call__, nn.Sequential.forward, nn.Sequential.__iter__
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# All but the sigmoid, which is not 0 at 0: after a layer with zero_masked it gives other values than within it.
_ACTIVATIONS: list[Any] = [cls for cls in MODULES if cls is not nn.Sigmoid]
_FORWARDS: dict[type[nn.Module], Any] = {cls: cls.forward for cls in (*_ACTIVATIONS, nn.Identity, *_DROPOUTS)}
_LAYER = SyncBatchNorm.forward


class FusedActivation(nn.Identity):
    """Pass-through in the place of an activation that a layer computes.

    It holds both, but not as children, so that names and state dict are as with the activation.
    """

    layer: SyncBatchNorm
    activation: nn.Module
    given: Activation
    """The layer's ``fused_activation``."""

    def __init__(self, layer: SyncBatchNorm, activation: nn.Module) -> None:
        super().__init__()
        self.train(activation.training)
        layer.fused_activation = activation
        vars(self).update(layer=layer, activation=activation, given=layer.fused_activation)

    def extra_repr(self) -> str:
        return f"{self.activation}"


class Pair(NamedTuple):
    """A layer and the activation that follows it in a container."""

    layer: SyncBatchNorm
    activation: nn.Module
    container: nn.Module
    key: str
    """Name of the activation in the container."""
    name: str
    """Name of the activation in the model."""
    obstacle: str | None
    """Why the two are not fused; None if they can be."""


def fuse_activations(module: _Module) -> _Module:
    """Makes synchronized layers compute the activations that follow them in a :class:`torch.nn.Sequential`.

    Layer and activation become one pass over memory, which stores only the input of the layer for the backward pass;
    `In-Place Activated BatchNorm (Rota Bulò, Porzi and Kontschieder, 2018) <https://arxiv.org/abs/1712.02616>`__ stores
    only the output. Outputs stay the same up to the rounding of the value between the two.

    A layer is fused if the next module in a container whose forward is that of :class:`torch.nn.Sequential` is a torch
    module for an activation that layers can compute, but no sigmoid; :class:`torch.nn.Identity`, and dropout with
    ``p=0``, may stand between. The activation becomes the layer's ``fused_activation``, and a pass-through takes its
    place in the container, so names and state dict stay. Copies and files keep both.

    Layers that are in several places of ``module``, layers with a forward of their own, and modules that have hooks or
    were compiled with ``compile()`` are left alone; :func:`conversion_report` names them. From this call on, code that
    calls a fused layer outside of its container gets the activation too, and modules that take the place of one of the
    two do not know of the other: call this on the finished model.

    Args:
        module: the whole model, converted by :func:`convert_sync_batchnorm`. Ranks may fuse different layers, but not
            if second derivatives are taken: their messages would come in another order.

    Returns:
        ``module``, the same object. :func:`revert_sync_batchnorm` puts the activations back.

    Raises:
        TypeError: ``module`` is no module.

    A warning says if there is nothing to fuse. An activation elsewhere can be given to the layer (``activation``), or
    use :func:`recompute_outputs`, which stores neither output.

    Example::

        >>> model = bagua_syncbn.fuse_activations(bagua_syncbn.convert_sync_batchnorm(model))
        >>> print(bagua_syncbn.conversion_report(model))
    """
    check_module(module)
    pairs = [pair for pair in pairs_in(module) if pair.obstacle is None]
    for layer, activation, container, key, *_ in pairs:
        container._modules[key] = FusedActivation(layer, activation)
    if not pairs and not any(isinstance(part, FusedActivation) for part in module.modules()):
        warnings.warn(
            "fuse_activations: found no synchronized layer with an activation next to it in an nn.Sequential; "
            "conversion_report tells more",
            stacklevel=2,
        )
    return module


@undo_hooks.register
def _unfuse(module: nn.Module) -> Callable[[], None]:
    """Undoes :func:`fuse_activations`."""
    places = [
        (container, key, part)
        for container in module.modules()
        for key, part in container._modules.items()
        if isinstance(part, FusedActivation)
    ]
    undone = {part for _, _, part in places if part.layer.fused_activation == part.given}
    for container, key, part in places:
        part.activation.training = part.training
        container._modules[key] = part.activation
    for part in undone:
        del part.layer.fused_activation

    def restore() -> None:
        for container, key, part in places:
            container._modules[key] = part
        for part in undone:
            part.layer.fused_activation = part.given

    return restore


@report_notes.register
def _notes(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name, part in model.named_modules():
        if isinstance(part, FusedActivation):
            yield part.layer, f"computes {name_of(part.activation, name)}"
    for pair in pairs_in(model):
        obstacle = "" if pair.obstacle is None else f": {pair.obstacle}"
        yield pair.layer, f"{name_of(pair.activation, pair.name)} is not fused{obstacle}"


def pairs_in(model: nn.Module) -> Iterator[Pair]:
    """Yields layers of ``model`` that an activation follows in an ``nn.Sequential``, none of them fused."""
    places = Counter(child for part in model.modules() for child in part._modules.values())
    for name, container in model.named_modules():
        cls = type(container)
        if not isinstance(container, nn.Sequential) or "forward" in vars(container):
            continue
        if (cls.__call__, cls.forward, cls.__iter__) != _SEQUENTIAL:
            continue
        keys, modules = list(container._modules), list(container._modules.values())
        for at, layer in enumerate(modules):
            between = _up_to_activation(modules[at + 1 :]) if isinstance(layer, SyncBatchNorm) else []
            if between and _forward_of(layer) is _LAYER and layer.fused_activation is None:
                key = keys[at + len(between)]
                plain = all(map(_is_called_plainly, [layer, *between]))
                obstacle = None if plain else "one of the two has hooks or was compiled"
                if places[layer] > 1:
                    obstacle = "the layer is in several places"
                yield Pair(layer, between[-1], container, key, f"{name}.{key}".lstrip("."), obstacle)


def _forward_of(layer: nn.Module) -> Any:
    """Returns the forward of the class of ``layer``, without recompute_outputs."""
    return vars(type(layer)).get("_recomputed_class", type(layer)).forward


def _up_to_activation(modules: list[Any]) -> list[nn.Module]:
    """Returns ``modules`` up to the first activation, if only modules that do nothing are before it, else none."""
    for at, module in enumerate(modules):
        if type(module) in _ACTIVATIONS:
            return modules[: at + 1]
        if type(module) is not nn.Identity and not (type(module) in _DROPOUTS and module.p == 0):
            break
    return []


def _is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of ``module`` is just a call of the forward that its class had at import."""
    cls = type(module)
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    is_changed = any(hooks) or module._compiled_call_impl is not None or "forward" in vars(module)
    return not is_changed and (cls.__call__, cls.forward) == (_CALL, _FORWARDS.get(cls, _LAYER))


def _refuse_to_fold(layer: Any) -> None:
    """Raises ValueError if weights with ``layer`` folded in would lack its activation or its ``eps_mode``."""
    if not isinstance(layer, SyncBatchNorm):
        return
    has = "eps_mode='clamp'" if layer.eps_mode == "clamp" else f"the activation {layer.fused_activation}"
    if layer.eps_mode == "clamp" or layer.fused_activation is not None:
        raise ValueError(
            f"bn: expected a layer that only scales and shifts in evaluation, got {name_of(layer)} with {has}; call "
            'revert_sync_batchnorm on the model first, see "Folding" in docs/conversion.md'
        )


check_before_folding(_refuse_to_fold)
