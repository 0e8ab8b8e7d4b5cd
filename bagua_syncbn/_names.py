"""Names of layers and models, for messages."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from torch import nn


class Origin(NamedTuple):
    """Name and model of a converted layer. Plain data, which files contain."""

    name: str  # the layer's first name in the model
    model: OrderedDict[str, str]  # {"name": class name}; its identity is the model's, and each copy has another


class ConvertedModel(OrderedDict[str, str]):
    """The model in files of 0.1."""

    def __setstate__(self, state: Any) -> None:
        self.update(state)


def origin_of(layer: nn.Module | None) -> Origin | None:
    """Returns the place that conversion recorded for ``layer``; None for other modules."""
    state = getattr(layer, "_sync_state", None)
    return None if state is None else state.origin


def kind_of(layer: nn.Module | None) -> str:
    """Returns the class name of the layer's model, or of the layer itself outside of models."""
    origin = origin_of(layer)
    return name_of(layer, "") if origin is None else origin.model["name"]


def name_of(module: nn.Module | None, name: str | None = None) -> str:
    """Describes ``module`` by its class name and ``name``, which defaults to the name recorded at conversion."""
    if module is None:
        return "sync_batch_norm"
    origin = origin_of(module)
    if name is None and origin is not None:
        name = origin.name
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__
