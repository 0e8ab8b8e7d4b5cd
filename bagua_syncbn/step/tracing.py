"""Symbolic tracing by torch.fx: a synchronized layer becomes one node of the graph, as torch's own layers do."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy


def as_one_node(layer: nn.Module, proxy: Proxy, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns one graph node that calls ``layer``, as a tracer makes it for torch's layers; ``proxy`` is in ``args``.

    A tracer makes one node of a layer whose module's name begins with ``torch.nn``, and traces into any other layer.
    Synchronized layers cannot be traced into: they branch on the input, and their calls depend on the job.
    """
    tracer: Any = proxy.tracer
    node: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(layer), tuple(args), dict(kwargs))
    return node
