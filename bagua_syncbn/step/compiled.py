"""Refusal of second derivatives through compiled code.

Compiled code runs the backward of an autograd function without gradients, so ``backend="eager"`` would silently leave
second derivatives out. That backend calls a node of the graph as it is written. Other backends refuse second
derivatives themselves, trace through the node and find nothing to compute.
"""

from typing import Any

import torch
from torch import Tensor

from ..torch_internals.autograd import untraced


def refuse_second_derivatives(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns ``tensors``, whose gradients under ``create_graph=True`` raise when they are differentiated."""
    _allow_in_graph()
    return _identity(*tensors)


def _identity(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return _Refusing.apply(*tensors)  # type: ignore[no-any-return]


@untraced
def _allow_in_graph() -> None:
    """Makes ``_identity`` one node of the graph."""
    torch.compiler.allow_in_graph(_identity)  # not at import, because it imports the compiler


class _Refusing(torch.autograd.Function):
    """Identity with gradients that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor if tensor is None else tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grads
        return tuple(grad if grad is None else _Refused.apply(grad.detach().requires_grad_()) for grad in grads)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise RuntimeError(
            "sync_batch_norm: compiled code has no second derivatives; call the model without torch.compile if its "
            "loss contains a gradient (create_graph=True)"
        )
