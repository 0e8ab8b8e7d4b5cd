"""Bad input raises on the rank that can know, names the argument, and leaves the buffers as they were."""

from functools import partial
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from bagua_syncbn import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    accumulate_statistics,
    convert_sync_batchnorm,
    freeze_statistics,
    masked,
    merge_statistics,
    ops,
    recalibrate_statistics,
    sync_batch_norm,
)
from benchmarks.one_rank import Twin

MESSAGES = [
    (lambda: SyncBatchNorm2d(3), torch.randn(4, 3, 5), ValueError, "4D input"),
    (lambda: SyncBatchNorm1d(3), torch.randn(4, 3, 5, 5), ValueError, "2D or 3D input"),
    (lambda: SyncBatchNorm3d(3), torch.randn(4, 3, 5, 5), ValueError, "5D input"),
    (lambda: SyncBatchNorm(3), torch.randn(3), ValueError, r"input: expected at least 2 dimensions, .* got 1"),
    (lambda: SyncBatchNorm(3), torch.randn(4, 5), RuntimeError, "^SyncBatchNorm: expected 3 channels, got 5"),
    (
        lambda: SyncBatchNorm(3, track_running_stats=False),
        torch.randn(4, 5),
        RuntimeError,
        "^SyncBatchNorm: expected 3 channels, got 5",
    ),
    (lambda: SyncBatchNorm(3), torch.ones(4, 3, dtype=torch.int64), TypeError, r"input: expected a float16.*int64"),
    (lambda: SyncBatchNorm(3), torch.ones(4, 3, dtype=torch.complex64), TypeError, r"input: .*complex64"),
    (lambda: SyncBatchNorm(3), torch.randn(4, 3, device="meta"), RuntimeError, r"expected it on meta.* got cpu"),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("make", "input", "error", "message"), MESSAGES)
def test_wrong_input_is_refused_and_changes_no_buffer(make, input, error, message, training):
    layer = make().train(training)
    with pytest.raises(error, match=message):
        layer(input)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, torch.full_like(buffer, name == "running_var")), f"{name} changed"


@pytest.mark.ranks(2, new_job=True, timeout=60)  # in a job whose group is not made yet
def test_no_rank_waits_for_one_with_bad_input():
    """Rank 0 alone calls the layers, so that it would wait for ever if one communicated."""
    if dist.get_rank() == 0:
        for row in MESSAGES:
            test_wrong_input_is_refused_and_changes_no_buffer(*row, True)


@pytest.mark.parametrize("context", [accumulate_statistics, partial(masked, mask=torch.ones(1, dtype=torch.bool))])
def test_models_without_synchronized_layers_are_told(context, recwarn):
    with context(nn.Sequential(SyncBatchNorm(3))):
        assert not recwarn.list
    with pytest.warns(UserWarning, match=": found no synchronized layer in Sequential") as caught:  # noqa: SIM117
        with context(nn.Sequential(nn.BatchNorm1d(3))):
            pass
    assert caught[0].filename == __file__


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (1, 3, 1, 1)])
def test_one_value_per_channel_is_refused_in_training_only(shape):
    layer = SyncBatchNorm(3)
    with pytest.raises(ValueError, match="expected more than 1 value per channel when training, got input size"):
        layer(torch.randn(shape))
    assert layer.num_batches_tracked == 0
    assert layer.eval()(torch.randn(shape)).shape == shape


NAN = float("nan")
ONES = torch.ones(2)
PLANES = torch.ones(2, 4, 3, 3)

# Options: a value, and the error.
OPTIONS = [
    ("eps", -1e-5, ValueError, "expected a finite number .*, got -1e-05"),
    ("eps", NAN, ValueError, "expected a finite number .*, got nan"),
    ("eps", float("inf"), ValueError, "expected a finite number .*, got inf"),
    ("eps", "cpu", TypeError, "expected a number, got str"),
    ("eps", None, TypeError, "expected a number, got NoneType"),
    ("eps", [1e-5], TypeError, "expected a number, got list"),
    ("momentum", NAN, ValueError, "expected a finite number or None, got nan"),
    ("momentum", -float("inf"), ValueError, "expected a finite number or None, got -inf"),
    ("momentum", "0.1", TypeError, "expected a number or None, got str"),
    ("momentum", [0.1], TypeError, "expected a number or None, got list"),
    ("momentum", ONES, TypeError, "expected a number or None, got Tensor"),
    ("eps_mode", "times", ValueError, 'expected "plus" or "clamp", got \'times\''),
    ("eps_mode", ONES, ValueError, 'expected "plus" or "clamp", got tensor'),
    ("skip_nonfinite", "no", TypeError, "expected a bool, got str"),
    ("skip_nonfinite", ONES, TypeError, "expected a bool, got Tensor"),
    ("activation", ("leaky_relu", NAN), ValueError, "expected a finite parameter for leaky_relu, got nan"),
    ("activation", nn.ELU(float("inf")), ValueError, "expected a finite parameter for elu, got inf"),
    ("activation", "mish", ValueError, "expected one of relu, .*, got 'mish'"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), OPTIONS)
@pytest.mark.parametrize("way", ["given", "set", "set after a call", "in evaluation", "function"])
def test_wrong_options_are_refused_when_given_or_set(name, value, error, message, way):
    attribute = "fused_activation" if name == "activation" else name
    layer = SyncBatchNorm(3, process_group=Twin())
    for _ in range(2 * (way == "set after a call")):
        layer(torch.randn(4, 3))
    layer.train(way != "in evaluation")

    def set_and_call():
        setattr(layer, attribute, value)
        layer(torch.randn(4, 3))

    calls = {
        "given": lambda: SyncBatchNorm(3, **{name: value}),
        "function": lambda: function(process_group=Twin(), **{name: value}),
    }
    with pytest.raises(error, match=f"{name}: {message}"):
        calls.get(way, set_and_call)()
    assert layer.num_batches_tracked == 2 * (way == "set after a call")


def test_an_eps_of_zero_is_refused_in_training_alone():
    layer = SyncBatchNorm(3, eps=0.0)
    with pytest.raises(ValueError, match=r"eps: expected a finite number above 0 in training, got 0.0"):
        layer(torch.randn(4, 3))
    assert layer.eval()(torch.randn(4, 3)).isfinite().all()
    layer.eps_mode = "clamp"
    assert layer.train()(torch.randn(4, 3)).isfinite().all()


NO_TENSOR = "expected a tensor, got float"
NO_MODEL = "expected a torch.nn.Module, got NoneType"
NO_FUNCTION = "expected a function .*, or None, got str"
MODEL = nn.Sequential(SyncBatchNorm(3))


def function(**arguments):
    return sync_batch_norm(**{"input": torch.randn(4, 3), "running_mean": None, "running_var": None} | arguments)


@pytest.mark.parametrize(("name", "message", "call"), [
    *(
        (name, NO_TENSOR, lambda name=name: function(**{name: 1.5}))
        for name in signature(sync_batch_norm).parameters
        if name.startswith(("input", "running", "weight", "bias", "num_batches", "residual", "mask", "lengths"))
    ),
    ("input", "expected a tensor, got list", lambda: SyncBatchNorm(3)([1.0])),
    ("input", "expected a tensor, got NoneType", lambda: SyncBatchNorm2d(3)(None)),
    ("model", NO_MODEL, lambda: accumulate_statistics(None).__enter__()),
    ("model", NO_MODEL, lambda: masked(None, torch.ones(1, dtype=torch.bool)).__enter__()),
    ("rule", NO_FUNCTION, lambda: masked(MODEL, torch.ones(1, dtype=torch.bool), rule="a").__enter__()),
    ("weight", "expected a number, got str", lambda: merge_statistics(MODEL, weight="a")),
    ("batches", "expected an iterable of batches, got NoneType", lambda: recalibrate_statistics(MODEL, None)),
    ("forward", NO_FUNCTION, lambda: recalibrate_statistics(MODEL, [], forward="a")),
    ("filter", NO_FUNCTION, lambda: freeze_statistics(MODEL, "a")),
    ("running_mean", "expected memory for each element", lambda: function(
        running_mean=torch.zeros(1).expand(3), running_var=torch.ones(3)
    )),
])  # fmt: skip
def test_arguments_of_other_kinds_are_named(name, message, call):
    with pytest.raises((TypeError, RuntimeError), match=f"^(SyncBatchNorm(2d)?: )?{name}: {message}"):
        call()


@pytest.mark.parametrize("call", [
    lambda: SyncBatchNorm(3)(torch.randn(4, 3), zero_masked="no"),
    lambda: function(zero_masked="no"),
    lambda: function(training=ONES.expand(2, 2)),
    lambda: masked(SyncBatchNorm(3), torch.ones(4, 1, dtype=torch.bool), zero_masked="no").__enter__(),
    lambda: convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), skip_nonfinite="no"),
])  # fmt: skip
def test_flags_are_bools(call):
    with pytest.raises(TypeError, match=r"^(SyncBatchNorm: )?\w+: expected a bool, got (str|Tensor)"):
        call()


@pytest.mark.parametrize(("message", "call"), [
    ("expected 4 channels, got 5", lambda layer: layer(torch.randn(2, 5, 3, 3))),
    ("expected 4D input", lambda layer: layer(torch.randn(2, 4))),
    ("input: expected a tensor, got list", lambda layer: layer([1.0])),
    ("input: expected more than 1 value per channel", lambda layer: layer(torch.randn(1, 4, 1, 1))),
    ("residual: expected torch.float32", lambda layer: layer(torch.randn(2, 4, 3, 3), torch.ones(2, 4, 3, 3).half())),
    ("mask: expected a bool tensor", lambda layer: layer(torch.randn(2, 4, 3, 3), mask=torch.ones(3))),
    ("eps: expected a finite number", lambda layer: (setattr(layer, "eps", NAN), layer(PLANES))),
])  # fmt: skip
def test_errors_of_a_call_name_the_layer(message, call):
    model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^SyncBatchNorm2d '1': {message}"):
        call(model[1])


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"running_mean": torch.zeros(2)}, ValueError, "running_mean, running_var: expected both or neither"),
    ({"training": False}, ValueError, "running_mean, running_var: expected tensors with training=False"),
    (
        {"running_mean": torch.zeros(2), "running_var": torch.ones(2), "momentum": None},
        ValueError,
        "num_batches_tracked: expected a tensor",
    ),
    ({"weight": torch.ones(2, dtype=torch.int32)}, TypeError, "weight: expected a floating point tensor"),
    ({"num_batches_tracked": torch.tensor(False)}, TypeError, "num_batches_tracked: expected an integer or float"),
    ({"running_mean": ONES, "running_var": ONES}, ValueError, "running_mean, running_var: expected two tensors"),
    ({"num_batches_tracked": torch.zeros(2).long()}, RuntimeError, r"num_batches_tracked: .* element, got \[2\]"),
    (
        {"num_batches_tracked": torch.tensor(0, device="meta")},
        RuntimeError,
        "num_batches_tracked: expected it on cpu.* got meta",
    ),
    ({"bias": torch.ones(2, 1)}, RuntimeError, r"bias: expected 2 elements.* got \[2, 1\]"),
    ({"process_group": "host"}, TypeError, "process_group: expected"),
])  # fmt: skip
def test_wrong_arguments_of_the_function_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        function(**{"input": torch.randn(4, 2)} | arguments)


@pytest.mark.ranks(2, new_job=True, timeout=60)
def test_distributed_tensors_and_traces_of_training_are_refused():
    """Before the ranks make their group: rank 0 alone makes the calls."""
    if dist.get_rank():
        return
    mesh = DeviceMesh("cpu", torch.tensor([0]), _init_backend=False)
    sharded = DTensor.from_local(torch.randn(4, 3), mesh, [Partial()], run_check=False)
    for message, call in [
        ("expected a DTensor that is sharded or replicated", lambda: SyncBatchNorm(3)(sharded)),
        ("no torch.jit.trace in training", lambda: torch.jit.trace(SyncBatchNorm(3), torch.randn(4, 3))),
        ("no torch.export in training", lambda: torch.export.export(SyncBatchNorm(3), (torch.randn(4, 3),))),
    ]:
        with pytest.raises((TypeError, RuntimeError), match=message):
            call()


def test_what_was_right_once_is_checked_again_when_it_changes():
    layer, input = SyncBatchNorm1d(3), torch.randn(4, 3)
    layer(input)
    layer.weight.data = torch.ones(4)  # the same parameter with another size
    with pytest.raises(RuntimeError, match="weight: expected 3 elements"):
        layer(input)
    layer.weight.data = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(TypeError, match="weight: expected a floating point tensor"):
        layer(input)


@pytest.mark.parametrize("training", [True, False])
def test_memory_that_there_is_not_is_torchs_error(training):
    layer = SyncBatchNorm(1, activation="relu").train(training)
    with pytest.raises(RuntimeError, match=f"you tried to allocate {2**48} bytes"):
        layer(torch.ones(1, 1).expand(2**46, 1))


def test_memory_that_there_is_not_in_backward_is_torchs_error(monkeypatch):
    def refuse(*_):
        raise RuntimeError("memory: expected 70368744177664 values of 4 bytes on cpu, got none")

    layer = SyncBatchNorm(1, eps_mode="clamp")
    output = layer(torch.randn(5, 1, requires_grad=True))
    monkeypatch.setattr(ops, "batch_norm_backward_elemt", refuse)
    with pytest.raises(RuntimeError, match=f"you tried to allocate {2**48} bytes"):
        output.sum().backward()


def test_memory_that_became_free_is_an_error_of_the_class_of_the_device():
    message = "memory: expected 8 values of 4 bytes on meta, got none"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        ops.raise_torchs(RuntimeError(message))
    ops.raise_torchs(RuntimeError("another"))
