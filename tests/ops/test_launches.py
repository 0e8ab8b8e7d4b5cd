"""What a layer makes a device do, without one: every op that it dispatches is one of ours, a view, or an allocation.

Each of our ops is one kernel (``test_cuda_emulated.py``, ``test_cuda_bindings.py``), so this counts launches. On a GPU
``test_gpu_layers.py`` counts them with the profiler.
"""

import pytest
import torch
from cases import laid_out
from torch.utils._python_dispatch import TorchDispatchMode

import bagua_syncbn

# Ops of ATen after which the device has nothing to do.
FREE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "alias",
    "view",
    "unsqueeze",
}


class Dispatched(TorchDispatchMode):
    """Names of the ops that are dispatched while it is on: ours, and those of ATen that launch something."""

    def __enter__(self):
        self.ours, self.launches = [], []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if namespace == "bagua_syncbn":
            self.ours.append(name)
        elif name not in FREE:
            self.launches.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Recorded:
    """Two ranks, of which the other one has the same batch. Its collectives are not dispatched, only counted."""

    size = 2
    rank = 0

    def __init__(self):
        self.calls = []

    def all_gather(self, packed):
        self.calls.append("all_gather")
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.stack([packed, packed])

    def all_reduce(self, packed):
        self.calls.append("all_reduce")
        with torch.utils._python_dispatch._disable_current_modes():
            return packed.mul_(2)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_launches_forward_two_backward_and_a_collective_each(dtype, layout, affine, momentum):
    communicator = Recorded()
    layer = bagua_syncbn.SyncBatchNorm2d(8, momentum=momentum, affine=affine, process_group=communicator)
    input, grad_output = (laid_out(torch.randn(4, 8, 5, 5).to(dtype), layout) for _ in range(2))
    input.requires_grad_()
    for _ in range(2):  # until the ranks have agreed on what they send, and on what comes after it
        layer(input).backward(grad_output)
    communicator.calls.clear()
    with Dispatched() as forward:
        output = layer(input)
    assert forward.ours == ["batch_norm_stats", "batch_norm_gather_stats", "batch_norm_elemt"]
    assert forward.launches == []
    assert communicator.calls == ["all_gather"]
    with Dispatched() as backward:
        torch.autograd.grad(output, (input, *layer.parameters()), grad_output)
    assert backward.ours == ["batch_norm_backward_reduce", "batch_norm_backward_elemt"]
    assert backward.launches == []
    assert communicator.calls == ["all_gather", "all_reduce"]


def test_launches_of_others_are_seen():
    with Dispatched() as dispatched:
        torch.ones(3).view(3, 1).add_(1)
    assert dispatched.launches == ["aten::ones", "aten::add_"]
