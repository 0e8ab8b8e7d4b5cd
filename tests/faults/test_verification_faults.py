"""An error on one rank inside verify_synchronization is raised on all, and the model is unchanged."""

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


def own_batch_alone(model, batch):
    """A loss that raises for the batch of one rank, but not for the merged batch."""
    if len(batch) == 4:
        raise ArithmeticError("of 4 samples")
    return loss(model, batch)


def leave_out_last(model):
    model.leaves_out_last = True


def raises_at(call):
    return lambda model: setattr(model, "raises_from_call", call)


X = torch.randn(4, 3)
IN_EVALUATION = nn.Module.eval, X, loss, "rank 1 in .*: ValueError: model: expected training mode, got evaluation mode"
# A change of the model, the batch and the loss of the last rank, and the error on all ranks.
CASES = {
    "one process": (raises_at(2), X, loss, "rank 1 in the step in one process: ArithmeticError: between two"),
    "the step": (raises_at(3), X, loss, "rank 1 in the step on ranks: ArithmeticError: between two"),
    "its batch": (None, X, own_batch_alone, "rank 1 in a trial of the loss: ArithmeticError: of 4 samples"),
    "the loss": (None, X, lambda model, x: model(x), "rank 1 in .*: TypeError: loss: .*scalar tensor, got si"),
    "its channels": (None, torch.ones(4, 3, 1), loss, "batch: expected tensors that differ only in their first dim"),
    "no loss": (None, X, None, "rank 1 in .*: TypeError: loss: expected a function of the model and a batch, got None"),
    "a batch that cannot be sent": (None, [lambda: 0], lambda model, _: loss(model, X), "rank 1 in .*: .*ickl"),
    "evaluation": IN_EVALUATION,
    "the first call, by layer": (raises_at(1), X, loss, "rank 1 in the forward pass: ArithmeticError: between two"),
    "another layer, by layer": (
        leave_out_last, X, loss, "layers: rank 0 in the input of SyncBatchNorm1d 'last'; rank 1 in the forward"
    ),
    "evaluation, by layer": IN_EVALUATION,
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_an_error_on_one_rank_is_raised_on_all(name):
    change, batch, wrong, error = CASES[name]
    model = convert_sync_batchnorm(Model(), dist.new_group())
    model.first.running_mean.fill_(2.0)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last and change is not None:
        change(model)
    mode, state = model.training, torch.get_rng_state()
    with pytest.raises((RuntimeError, ValueError), match=error):
        verify_synchronization(model, batch if is_last else X, wrong if is_last else loss, by_layer="by layer" in name)
    assert model.first.running_mean.eq(2).all()
    assert model.training is model.last.training is mode
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.first._forward_pre_hooks
    assert not model.last._forward_pre_hooks
