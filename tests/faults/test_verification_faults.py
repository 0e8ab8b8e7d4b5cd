"""An error on one rank in verify_synchronization is raised on all ranks, and the model is unchanged."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_syncbn import convert_sync_batchnorm, mean_over_ranks, sync_batch_norm, verify_synchronization
from tests.helpers.steps import unchanged


def loss(model, batch):
    return model(batch).square().mean()


def means_over_ranks(model, batch):
    return mean_over_ranks(mean_over_ranks(model(batch)) + model(batch))


def fails_between_means(model, batch):
    output = mean_over_ranks(model(batch))
    raise ArithmeticError(f"mean {output.item():.0f}")


def normalizes(model, batch):
    return sync_batch_norm(model(batch), None, None).square().mean()


def fails_before_function(model, batch):
    raise ArithmeticError(f"mean {model(batch).mean().item():.0f}")


def fail_in(number):
    """Makes call ``number`` and later calls of a model and its copies raise between the two layers."""
    calls = itertools.count(1)

    def fail(*_):
        if next(calls) >= number:
            raise ArithmeticError("between two layers")

    return lambda model: model[1].register_forward_hook(fail)


X = torch.randn(4, 3)
# The last rank's changed model, batch and loss, and the error on all ranks.
CASES = {
    "before the step": (fail_in(1), X, loss, "rank 1 in the step on this rank's batch: ArithmeticError: between two"),
    "one process": (fail_in(2), X, loss, "rank 1 in the step in one process: ArithmeticError: between two"),
    "ranks": (fail_in(3), X, loss, "rank 0 in the step on ranks: .* rank 1: ArithmeticError in SyncBatchNorm1d '0'"),
    "mean_over_ranks": (None, X, fails_between_means, "rank 1 in the step on this rank's batch: ArithmeticError: mean"),
    "sync_batch_norm": (None, X, fails_before_function, "rank 1 in the step on this rank's batch: ArithmeticError"),
    "channels": (None, torch.ones(4, 3, 1), loss, "Tensors must have same number of dimensions"),
    "unpicklable batch": (None, [lambda: 0], lambda model, _: loss(model, X), "rank 1 in the batch: .*ickl"),
    "evaluation": (nn.Module.eval, X, loss, "rank 1 in .*: ValueError: model: expected training mode, got evaluation"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_an_error_on_one_rank_is_raised_on_all(name):
    change, batch, other, error = CASES[name]
    group = dist.new_group(timeout=timedelta(seconds=20))  # ends the wait of a rank that hears of no error
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.Identity(), nn.BatchNorm1d(3)), group)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last and change is not None:
        change(model)
    peers = {fails_between_means: means_over_ranks, fails_before_function: normalizes}
    own_loss = other if is_last else peers.get(other, loss)
    with unchanged(model), pytest.raises((RuntimeError, ValueError), match=f"^(verify_synchronization: )?{error}"):
        verify_synchronization(model, batch if is_last else X, own_loss)
