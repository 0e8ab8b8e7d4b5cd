"""Symbolic tracing by torch.fx: a synchronized layer becomes one node of the graph, as torch's own layers do."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

__all__ = ["Proxy", "as_one_node"]


def as_one_node(layer: nn.Module, proxy: Proxy, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns what a tracer returns for a layer of torch: one node that calls ``layer``, with ``proxy`` among ``args``.

    A tracer makes one node of a layer whose module's name begins with ``torch.nn``, and looks into any other layer.
    Synchronized layers cannot be looked into: they branch on the input, and what they call depends on the job.

    Raises:
        TraceError: ``layer`` itself is what is traced.
    """
    tracer: Any = proxy.tracer
    path = tracer.path_of_module(layer)
    if not path:
        raise TraceError(f"{type(layer).__name__} is one node of a graph; trace a model that contains it")
    node: Tensor = tracer.create_proxy("call_module", path, tuple(args), dict(kwargs))
    return node
