"""Symbolic tracing by torch.fx, where layers are nodes of the graph."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

__all__ = ["Proxy", "as_one_node"]


def as_one_node(layer: nn.Module, proxy: Proxy, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns what a tracer returns for a layer of torch: one node that calls ``layer``, with ``proxy`` among ``args``.

    Tracers see by the name of its module which layers are torch's, and enter all others. In these there is nothing to
    be traced: they branch on the input, and what they call depends on the job.

    Raises:
        TraceError: ``layer`` itself is what is traced.
    """
    tracer: Any = proxy.tracer
    path = tracer.path_of_module(layer)
    if not path:
        raise TraceError(f"{type(layer).__name__} is one node of a graph, and none of its own; trace a model of it")
    node: Tensor = tracer.create_proxy("call_module", path, tuple(args), dict(kwargs))
    return node
