"""Replicas that share a device, as on the CPU: what is split, copied and gathered."""

import copy
import importlib
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

from bagua_syncbn import data_parallel as dp
from bagua_syncbn.data_parallel import DataParallelWithCallback, SynchronizedBatchNorm1d

pytestmark = pytest.mark.usefixtures("single_threaded")
ROOT = Path(__file__).resolve().parents[2]
Pair = namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize(
    ("device_ids", "shared"),
    [([0, 0], True), ([0, "cuda:0"], True), (["cuda:0", "cpu"], True), (["cpu"], True), ([0, 1], False), ([], False)],
    ids=str,
)
def test_devices_that_are_named_twice(device_ids, shared):
    assert dp.wrapper.are_shared(device_ids) == shared


class Does(nn.Module):
    """Computes a function."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def in_replicas(function, **options):
    return DataParallelWithCallback(Does(function), ["cpu"] * 2, **options)


def test_nested_inputs_are_split_and_outputs_gathered():
    def echo(*args, **kwargs):
        return {"args": list(args), "kwargs": kwargs, "pair": Pair(args[0], None), "count": torch.tensor(len(args[0]))}

    x, y = torch.arange(10).view(5, 2), torch.arange(5.0)
    model = in_replicas(echo)
    output = model(x, [y, {"deep": (x,)}], options={"mask": y})
    assert torch.equal(output["args"][0], x)
    assert torch.equal(output["args"][1][0], y)
    assert torch.equal(output["args"][1][1]["deep"][0], x)
    assert torch.equal(output["kwargs"]["options"]["mask"], y)
    assert isinstance(output["pair"], Pair)
    assert output["pair"].b is None
    assert output["count"].tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"inputs: expected tensors that split .* got some that split into \[1, 2\]"):
        model(x, y[:1])
    with pytest.raises(TypeError, match=r"module: expected outputs that are tensors or None, .* got str"):
        model(x, "text")
    assert in_replicas(lambda: torch.ones(1))().tolist() == [1]  # without input one replica runs
    assert in_replicas(echo, output_device="meta")(x)["args"][0].device.type == "meta"


def test_batches_are_split_along_a_given_dimension():
    layer = nn.Sequential(Does(torch.t), SynchronizedBatchNorm1d(3), Does(torch.t))
    batch = torch.randn(3, 8)
    output = DataParallelWithCallback(layer, ["cpu"] * 2, dim=1)(batch)
    torch.testing.assert_close(output, nn.BatchNorm1d(3)(batch.T).T)


def test_modes_reach_the_threads():
    def modes(input):
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        return torch.tensor([[*modes, torch.get_autocast_dtype("cpu") == torch.float16]])

    model = in_replicas(modes)
    assert model(torch.ones(2)).tolist() == [[True, False, False, False]] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert model(torch.ones(2)).tolist() == [[False, False, True, True]] * 2
    with torch.inference_mode():
        assert model(torch.ones(2)).tolist() == [[False, True, False, False]] * 2


class Varied(nn.Module):
    """Parameters and buffers of other kinds: tied, recurrent, none, of no module."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(3, 4, batch_first=True)
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.missing = None
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("nothing", None)
        self.heads = nn.ParameterList([torch.ones(4), torch.ones(4)])

    def forward(self, input):
        assert self.encode.weight is self.decode.weight
        # As in torch's replicas.
        assert (list(self.parameters()) == []) == hasattr(self, "_is_replica")
        return self.decode(self.encode(self.recurrent(input)[0])) * self.scale * self.heads[0]


def test_replicas_of_other_modules_train_like_one_process():
    expected = Varied()
    actual = copy.deepcopy(expected)
    batch, grad_output = torch.randn(6, 5, 3), torch.randn(6, 5, 4)
    expected(batch).backward(grad_output)
    DataParallelWithCallback(actual, ["cpu"] * 3)(batch).backward(grad_output)
    for (name, parameter), reference in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (reference.grad is None) == (name == "heads.1")
        if name != "heads.1":
            torch.testing.assert_close(parameter.grad, reference.grad)


def test_the_example_runs_and_reports_a_difference(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("data_parallel_cpu")
    example.main(["--replicas", "3", "--steps", "4", "--batch-size", "50"])
    assert "largest difference" in capsys.readouterr().out
