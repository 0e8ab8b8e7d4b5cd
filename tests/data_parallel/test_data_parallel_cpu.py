"""Replicas that share a device split inputs, copy the model, and gather outputs as torch does on several devices."""

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn

from bagua_syncbn.data_parallel import DataParallelWithCallback, SynchronizedBatchNorm1d
from tests.helpers.steps import assert_same_bits, check_ranks

pytestmark = pytest.mark.usefixtures("single_threaded")
Pair = namedtuple("Pair", ["a", "b"])


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def in_replicas(function, **options):
    return DataParallelWithCallback(Calls(function), ["cpu"] * 2, **options)


def test_nested_inputs_are_split_and_outputs_gathered():
    def echo(*args, **kwargs):
        return {"args": list(args), "kwargs": kwargs, "pair": Pair(args[0], None), "count": torch.tensor(len(args[0]))}

    x, y = torch.arange(10).view(5, 2), torch.arange(5.0)
    model = in_replicas(echo)
    output = model(x, [y, {"deep": (x,)}], options={"mask": y})
    assert isinstance(output["pair"], Pair)
    assert_same_bits(output, echo(x, [y, {"deep": (x,)}], options={"mask": y}) | {"count": torch.tensor([3, 2])})
    with pytest.raises(ValueError, match=r"inputs: expected .* equally many chunks, got 1, 2 chunks"):
        model(x, y[:1])
    with pytest.raises(TypeError, match="outputs: expected tensors or None, got int"):
        in_replicas(len)(x)
    assert in_replicas(lambda: torch.ones(1))().tolist() == [1]  # without inputs, a single replica runs
    assert in_replicas(echo, output_device="meta")(x)["args"][0].device.type == "meta"


def test_batches_are_split_along_a_given_dimension():
    layer = nn.Sequential(Calls(torch.t), SynchronizedBatchNorm1d(3), Calls(torch.t))
    batch = torch.randn(3, 8)
    output = DataParallelWithCallback(layer, ["cpu"] * 2, dim=1)(batch)
    torch.testing.assert_close(output, nn.BatchNorm1d(3)(batch.T).T)


def test_replicas_run_in_the_callers_grad_and_autocast_modes():
    def modes(input):
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return torch.tensor([[*modes, torch.get_autocast_dtype("cpu") == torch.float16]])

    model = in_replicas(modes)
    assert model(torch.ones(2)).tolist() == [[True, False, False]] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert model(torch.ones(2)).tolist() == [[False, True, True]] * 2


class Varied(nn.Module):
    """Tied, recurrent and missing parameters and buffers."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.missing = nn.LSTM(3, 4, batch_first=True), None
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("nothing", None)
        self.heads = nn.ParameterList([torch.ones(4), torch.ones(4)])

    def forward(self, input):
        assert self.encode.weight is self.decode.weight
        return self.decode(self.encode(self.recurrent(input)[0])) * self.scale * self.heads[0]


def test_replicas_of_any_module_train_like_one_process():
    expected = Varied()
    actual = DataParallelWithCallback(copy.deepcopy(expected), ["cpu"] * 3)
    check_ranks(actual, expected, torch.randn(6, 5, 3), torch.randn(6, 5, 4), [6], tolerance=1e-5)
    assert actual.module.heads[1].grad is None
