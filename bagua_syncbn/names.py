"""Names of layers and of the models that they are in, for messages."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class ConvertedModel:
    """Identity of a converted model, shared by its synchronized layers; each copy of the model has another one."""

    def __init__(self, name: str) -> None:
        self.name = name  # name of the model's class


class Origin(NamedTuple):
    """Place of a layer in a converted model, for messages."""

    name: str  # the layer's first name in the model
    model: ConvertedModel


def origin_of(layer: nn.Module | None) -> Origin | None:
    """Returns the place that conversion gave ``layer``; None for other modules."""
    state = getattr(layer, "_sync_state", None)
    return None if state is None else state.origin


def kind_of(layer: nn.Module | None) -> str:
    """Returns the class of the model that a layer is in, or that of a layer by itself."""
    origin = origin_of(layer)
    kind = type(layer).__name__ if origin is None else origin.model.name
    return "sync_batch_norm" if layer is None else kind


def name_of(module: nn.Module | None, name: str | None = None) -> str:
    """Returns the class of ``module`` and its ``name`` in the model, for messages.

    Without ``name`` it takes the one that conversion gave a layer; None stands for a call without a layer.
    """
    origin = origin_of(module)
    if name is None and origin is not None:
        name = origin.name
    if name is None:
        return kind_of(module)
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__
