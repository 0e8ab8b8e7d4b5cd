"""Ranks that raise alone, or all, within verify_synchronization: all raise, at once, and the model is as before."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_syncbn import convert_sync_batchnorm, verify_synchronization


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.raises_from_call, self.leaves_out_last = torch.inf, False
        self.calls = []  # of all copies

    def __deepcopy__(self, memo):
        copied = Model()
        copied.load_state_dict(self.state_dict())
        copied.raises_from_call, copied.calls = self.raises_from_call, self.calls
        for name in ("first", "last"):
            setattr(copied, name, convert_sync_batchnorm(getattr(copied, name), getattr(self, name).process_group))
        return copied

    def forward(self, input):
        output = self.first(input)
        self.calls.append(None)
        if len(self.calls) >= self.raises_from_call:
            raise ArithmeticError("between two layers")
        return output if self.leaves_out_last else self.last(output)


def loss(model, batch):
    return model(batch).square().mean()


def wrong_loss(model, batch):
    return model(batch)


def leave_out_last(model):
    model.leaves_out_last = True


def raises_at(call):
    return lambda model: setattr(model, "raises_from_call", call)


# On the last rank: what is done to the model, its batch, its loss; and what all are told.
ALONE = {
    "the first call": (raises_at(1), None, loss, "rank 1 in a trial of the loss: ArithmeticError: between two"),
    "one process": (raises_at(2), None, loss, "rank 1 in the step in one process: ArithmeticError: between two"),
    "the step": (raises_at(3), None, loss, "rank 1 in the step on ranks: ArithmeticError: between two"),
    "the loss": (
        None,
        None,
        wrong_loss,
        "rank 1 in .*: TypeError: loss: expected .* returns a scalar tensor, got size",
    ),
    "its channels": (
        None,
        torch.ones(4, 3, 1),
        loss,
        "batch: expected tensors of ranks that differ in their first dimen",
    ),
    "no batch": (
        None,
        None,
        None,
        "rank 1 in .*: TypeError: loss: expected a function of the model and a batch, got NoneType",
    ),
    "a batch that cannot be sent": (
        None,
        [lambda: 0],
        lambda model, batch: loss(model, torch.ones(4, 3)),
        "rank 1 in .*: .*ickl",
    ),
    "evaluation": (
        nn.Module.eval,
        None,
        loss,
        "rank 1 in .*: ValueError: model: expected training mode, got evaluation",
    ),
}


# The same with by_layer=True, where the second call is the last.
BY_LAYER = {
    "the first call": ALONE["the first call"],
    "between two layers": (raises_at(2), None, loss, "rank 1 in the forward pass: ArithmeticError: between two"),
    "another layer": (
        leave_out_last,
        None,
        loss,
        "rank 0 in the input of SyncBatchNorm1d 'last'; rank 1 in the forward",
    ),
    "evaluation": ALONE["evaluation"],
}


CASES = [(name, False) for name in ALONE] + [(name, True) for name in BY_LAYER]


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize(("name", "by_layer"), CASES)
def test_an_error_of_one_rank_is_told_to_all(name, by_layer):
    change, batch, wrong, told = (BY_LAYER if by_layer else ALONE)[name]
    model = convert_sync_batchnorm(Model(), dist.new_group())
    model.first.running_mean.fill_(2.0)
    own_loss, own_batch = loss, torch.randn(4, 3)
    if dist.get_rank() == dist.get_world_size() - 1:
        own_loss, own_batch = wrong, own_batch if batch is None else batch
        if change is not None:
            change(model)
    mode, state = model.training, torch.get_rng_state()
    with pytest.raises((RuntimeError, ValueError), match=told):
        verify_synchronization(model, own_batch, own_loss, by_layer=by_layer)
    assert model.first.running_mean.eq(2).all()
    assert model.training is model.last.training is mode
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.first._forward_pre_hooks
    assert not model.last._forward_pre_hooks
