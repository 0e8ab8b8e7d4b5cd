"""The step, read top to bottom: stats, gather, merge, normalize. And back: sums, reduce, gradient."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import Communicator
from ..sync import CallSite, tell_peers
from ..torch_internals import apply_of, is_transformed, is_transforming, unseen_by_selective_checkpointing
from .checkpointing import is_repetition, result_of_call
from .differentiable import differentiable_backward, differentiable_batch_norm
from .epilogue import Epilogue
from .exchange import AnyExchange, Exchange, exchange_of
from .fused import fused_batch_norm
from .outputs import note_output


def synchronized_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: ops.MergeOptions,
    communicator: Communicator,
    layer: nn.Module | None,
    epilogue: Epilogue | None,
    masking: ops.Masking | None = None,
) -> Tensor:
    """Training of :func:`~bagua_syncbn.sync_batch_norm` over the ranks of ``communicator``."""
    if is_transforming():
        if is_repetition():
            refusal = RuntimeError(
                "sync_batch_norm: expected no torch.func and no forward-mode differentiation through a forward that "
                "activation checkpointing repeats; take the checkpoint away"
            )
            tell_peers(communicator, layer, refusal)
            raise refusal
        exchange = exchange_of(layer, input, options, communicator, masking)
        return differentiable_batch_norm(input, weight, bias, options, exchange, epilogue=epilogue)
    exchange = exchange_of(layer, input, options, communicator, masking)
    if torch.compiler.is_compiling():  # it plans by itself what to fuse, and what to repeat in backward
        merged = exchange.statistics(input.detach(), options)
        output: Tensor = _SyncBatchNormByGiven.apply(input, weight, bias, *merged, exchange)
        return output if epilogue is None else epilogue.after(output)
    try:
        exchange, merged = result_of_call(layer, lambda: _gather(exchange, input, options))
    except RuntimeError as error:
        tell_peers(communicator, layer, error)
        raise
    if epilogue is None:
        output = _SyncBatchNormByGiven.apply(input, weight, bias, *merged, exchange)
    else:
        output = fused_batch_norm(input, weight, bias, epilogue, merged, exchange)
    note_output(output, layer, input, weight, bias, *merged[:2], epilogue, exchange.zeroed)
    return output


def _gather(exchange: AnyExchange, input: Tensor, options: ops.MergeOptions) -> tuple[AnyExchange, ops.MergedStats]:
    with torch.no_grad(), unseen_by_selective_checkpointing():
        return exchange, exchange.statistics(input, options)


def plain_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: ops.MergeOptions,
    site: CallSite,
    layer: nn.Module,
) -> Tensor:
    """The same where :func:`is_plain`, of a call that was found right before: in as little Python as it takes.

    No tensor may be what a transform has left over.
    """
    try:
        output: Tensor = _apply(input, weight, bias, options, Exchange(site))
    except RuntimeError as error:
        tell_peers(site.communicator, layer, error)
        raise
    return output


# Of what takes no gradient. More than there are arguments are not looked at.
_NONE = (None,) * 5


class _Step(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        ctx.recipe = None  # whoever saves the output has come before
        input, weight, mean, invstd, count, clamped = ctx.saved_tensors
        needs = ctx.needs_input_grad
        exchange: AnyExchange = ctx.exchange
        if torch.is_grad_enabled() or is_transformed(grad_output):  # create_graph=True, is_grads_batched=True
            merged = mean, invstd, count, clamped
            bias = torch.zeros_like(mean, requires_grad=True)  # of which nothing depends on the value
            grads = differentiable_backward(grad_output, input, weight, bias, merged, exchange, (*needs[:3], False))
            return *grads[:3], *_NONE
        if exchange.lays_out and grad_output.stride() != input.stride():
            grad_output = ops.laid_out_as(input, grad_output)
        # Whether the input needs a gradient is a property of the model, the same on every rank; what a rank's batch
        # holds is not, so nothing else decides whether to communicate.
        fingerprint = exchange.fingerprint() if needs[0] else None
        if exchange.zeroed is None:
            sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
                grad_output, input, mean, invstd, weight, fingerprint
            )
        else:
            sums, grad_weight, grad_bias = ops.batch_norm_masked_backward_reduce(
                grad_output, input, mean, invstd, weight, exchange.zeroed, fingerprint
            )
        grad_input = None
        if needs[0]:
            sums = exchange.all_reduce(sums)
            if clamped is not None:
                ops.clear_clamped(sums, clamped)
            grad_input = exchange.backward_elemt(grad_output, input, weight, mean, invstd, sums, count)
        return grad_input, grad_weight if needs[1] else None, grad_bias if needs[2] else None, *_NONE


class _SyncBatchNormByGiven(_Step):
    """By statistics that were gathered before."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        count: Tensor,
        clamped: Tensor | None,
        exchange: AnyExchange,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, invstd, count, clamped)
        ctx.exchange = exchange
        zeroed = exchange.zeroed
        output: Tensor
        if zeroed is None:
            output = exchange.elementwise.batch_norm_elemt(input, weight, bias, mean, invstd)
        else:
            output = exchange.elementwise.batch_norm_masked_elemt(input, weight, bias, mean, invstd, zeroed)
        return output


class _SyncBatchNorm(_Step):
    """From the gathering on: what autograd is given costs time, each thing."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        options: ops.MergeOptions,
        exchange: Exchange,
    ) -> Tensor:
        mean, invstd, count, clamped = exchange.statistics(input, options)
        ctx.save_for_backward(input, weight, mean, invstd, count, clamped)
        ctx.exchange = exchange
        output: Tensor = ops.batch_norm_elemt(input, weight, bias, mean, invstd)
        return output


_apply = apply_of(_SyncBatchNorm)
