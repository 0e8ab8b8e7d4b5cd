"""All forms of activation checkpointing, as functions that take a function and its input."""

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from bagua_syncbn import Repeatable, masked
from bagua_syncbn.communicators import LOCAL
from tests.helpers.options import OTHER, attributes


def _save_what(policy, ctx, op, *args, **kwargs):
    saves = {torch.ops.aten.addmm.default, torch.ops.aten.tanh.default, torch.ops.aten.sin.default}
    # The messages of compiled code.
    saves |= {torch.ops._c10d_functional.all_gather_into_tensor.default, torch.ops.bagua_syncbn.exchange.default}
    return CheckpointPolicy.MUST_SAVE if policy == "all" or op in saves else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(policy):
    contexts = partial(create_selective_checkpoint_contexts, partial(_save_what, policy))
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _nested(function, input, outer_is_reentrant, inner_is_reentrant):
    inner = partial(checkpoint, function, use_reentrant=inner_is_reentrant)
    return checkpoint(inner, input, use_reentrant=outer_is_reentrant)


def _without_early_stop(function, input):
    with set_checkpoint_early_stop(False), save_on_cpu():
        return checkpoint(function, input, use_reentrant=False, determinism_check="none", preserve_rng_state=False)


class _KeptCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _, function, *args):
        ctx.function = function
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return ctx.function(*args)

    @staticmethod
    def backward(ctx, grad_output):
        args = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*args)
        torch.autograd.backward(output, grad_output)
        return None, None, *(tensor.grad for tensor in args)


def kept_checkpoint(function, *args):
    """Recomputes a function in backward, like packages with a custom checkpoint."""
    return _KeptCheckpoint.apply(torch.tensor([], requires_grad=True), function, *args)


def plainly(function, *args):
    return function(*args)


def _own(function, input):
    return kept_checkpoint(Repeatable()(function), input)


CHECKPOINTS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "without early stop": _without_early_stop,
    "nested": partial(_nested, outer_is_reentrant=False, inner_is_reentrant=False),
    "nested in reentrant": partial(_nested, outer_is_reentrant=True, inner_is_reentrant=False),
    "reentrant, nested": partial(_nested, outer_is_reentrant=False, inner_is_reentrant=True),
    "selective, some": _selective("some"),
    "selective, all": _selective("all"),
    "own": _own,  # an unknown package
}


@contextmanager
def changed(layer):
    """Context manager that changes options, mode, mask, statistics and ranks of ``layer``."""
    options = OTHER._asdict() | {"momentum": None, "eps": 3.0, "activation": "sigmoid", "process_group": LOCAL}
    layer.train(not layer.training)
    layer.running_mean.add_(3)
    layer.running_var.mul_(7)
    mask = torch.ones(1, 1, 9, dtype=torch.bool)  # fits no input
    with pytest.MonkeyPatch.context() as patch, masked(layer, mask):
        for name, value in attributes(options).items():
            patch.setattr(layer, name, value)
        yield
    layer.running_mean.sub_(3)
    layer.running_var.div_(7)
    layer.train(not layer.training)


def _changed_before_backward(checkpoint, layer, call):
    def run(input, **given):
        output = checkpoint(partial(call, **given), input)
        changes = ExitStack()
        changes.enter_context(changed(layer))
        input.register_hook(lambda grad: changes.close())  # at the end of backward
        return output

    return run


# Functions that take a layer and a call of it, and return the call inside a checkpoint.
CHECKPOINTED = {name: partial(_changed_before_backward, checkpoint) for name, checkpoint in CHECKPOINTS.items()}
