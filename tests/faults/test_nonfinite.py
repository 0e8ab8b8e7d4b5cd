"""An infinity or NaN in a rank's batch changes no state if GradScaler skips the step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import convert_sync_batchnorm


def state_after_each_step(value):
    """Trains on a rank; the second of three steps has the value. Returns the state after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = convert_sync_batchnorm(model, skip_nonfinite=True)
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    states = []
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        input = torch.randn(5, 4)
        if step == 1 and dist.get_rank() == 1:
            input[2, 1] = value
        optimizer.zero_grad()
        scaler.scale(parallel(input).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append({name: tensor.tolist() for name, tensor in model.state_dict().items()})
    return states


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_skipped_step_changes_no_state(pool, value):
    first, *others = pool.run(state_after_each_step, 2, value)
    assert others == [first]
    before, after, moved = first
    assert after == before
    assert moved["1.num_batches_tracked"] == 2
    assert all(moved[name] != before[name] for name in before)
