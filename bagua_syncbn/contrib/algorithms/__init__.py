"""Replaces ``bagua.torch_api.algorithms`` in code that also runs without Bagua."""

from importlib import import_module
from typing import Any

from .. import has_bagua
from . import gradient_allreduce

__all__ = ["gradient_allreduce"]

_NEED_BAGUA = "async_model_average", "bytegrad", "decentralized", "low_precision_decentralized", "q_adam"


def __getattr__(name: str) -> Any:
    if name not in _NEED_BAGUA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if has_bagua:
        return import_module(f"bagua.torch_api.algorithms.{name}")
    raise ImportError(f"the algorithm {name} needs Bagua, which is not installed; torch has only gradient_allreduce")
