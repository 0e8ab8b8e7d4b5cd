"""Invalid calls raise errors that name the argument, and leave the buffers unchanged."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

import bagua_syncbn
from bagua_syncbn import (
    SyncBatchNorm,
    accumulate_statistics,
    convert_sync_batchnorm,
    freeze_statistics,
    masked,
    merge_statistics,
    recalibrate_statistics,
    recompute_outputs,
    sync_batch_norm,
)
from bagua_syncbn._errors import raise_if_out_of_memory
from tests.helpers.one_rank import Twin
from tests.helpers.steps import unchanged

NAN = float("nan")
X = torch.randn(2, 4, 3, 3)
ONES, MASK = torch.ones(4), torch.ones(1, 1, 1, 3, dtype=torch.bool)
LAYER, NO_FUNCTION = "SyncBatchNorm2d '1': ", "expected a function .*, or None, got str"

# Tensors in layouts that are not dense, and their descriptions in errors.
LAYOUTS = [
    (X.to_sparse(), "layout torch.sparse_coo"),
    (X.to_mkldnn(), "layout torch._mkldnn"),
    (torch.nested.nested_tensor(list(X)), "a nested tensor"),
    (torch.nested.nested_tensor(list(X), layout=torch.jagged), "a nested tensor"),
]


def function(**arguments):
    return sync_batch_norm(**{"input": X, "running_mean": None, "running_var": None} | arguments)


# Invalid calls of a layer, and the beginning of the error, in training and evaluation.
INPUTS = [
    (ValueError, LAYER + "expected 4D input", lambda layer: layer(X[0])),
    (RuntimeError, LAYER + "input: expected 4 channels, got 5", lambda layer: layer(torch.ones(2, 5, 3, 3))),
    (TypeError, LAYER + "input: expected a float16.*int64", lambda layer: layer(X.long())),
    (TypeError, LAYER + "input: expected a tensor, got list", lambda layer: layer([1.0])),
    (
        RuntimeError,
        LAYER + "running_mean: expected a tensor on meta.* got one on cpu",
        lambda layer: layer(X.to("meta")),
    ),
    (TypeError, LAYER + "residual: expected torch.float32.* got torch.float16", lambda layer: layer(X, X.half())),
    (TypeError, LAYER + "residual: .* got torch.bool; pass a mask as mask=", lambda layer: layer(X, X > 0)),
    (TypeError, LAYER + "mask: expected a bool tensor", lambda layer: layer(X, mask=ONES)),
    *(
        (ValueError, LAYER + "mask: expected the size", lambda layer, mask=mask: layer(X, mask=mask))
        for mask in (MASK.expand(3, 1, 3, 3), MASK[0], MASK[:, 0, 0])
    ),
    (RuntimeError, LAYER + "mask: expected a tensor on cpu", lambda layer: layer(X, mask=MASK.to("meta"))),
    (TypeError, LAYER + "zero_masked: expected a bool, got str", lambda layer: layer(X, zero_masked="no")),
    *(
        (TypeError, rf"{LAYER}{name}: expected a dense \(strided\) tensor, got {got}", partial(call, given))
        for given, got in LAYOUTS
        for name, call in (
            ("input", lambda given, layer: layer(given, mask=MASK)),
            ("residual", lambda given, layer: layer(X, given)),
        )
    ),
]

# Valid arguments. test_cached_call.py tests tensors of a wrong class, dtype, device or size.
VALID = {
    **{name: ONES.clone() for name in ("running_mean", "running_var", "weight", "bias")},
    "num_batches_tracked": torch.tensor(0),
    "residual": X,
}

# Invalid arguments of the function, in training.
ARGUMENTS = [
    (TypeError, "mask: expected a tensor, got float", {"mask": 1.5}),
    (ValueError, "running_mean, running_var: expected both or neither", {"running_mean": ONES}),
    (ValueError, "running_mean, running_var: expected two", {"running_mean": ONES, "running_var": ONES}),
    (ValueError, "running_mean, running_var: expected tensors with training=False", {"training": False}),
    (
        RuntimeError,
        "running_mean: expected an element in memory for each channel",
        {"running_mean": ONES[:1].expand(4), "running_var": ONES},
    ),
    (
        ValueError,
        "num_batches_tracked: expected a tensor",
        {"running_mean": -ONES, "running_var": ONES, "momentum": None},
    ),
    (ValueError, "input: expected at least 2 dimensions, .* got 1", {"input": ONES}),
    (TypeError, "process_group: expected", {"process_group": "host"}),
    (TypeError, "training: expected a bool, got Tensor", {"training": ONES}),
]

# Calls in training.
CALLS = [
    (ValueError, LAYER + "input: expected more than 1 value per channel", lambda layer: layer(X[:1, :, :1, :1])),
    *((error, message, lambda _, given=given: function(**given)) for error, message, given in ARGUMENTS),
    (TypeError, "zero_masked: expected a bool", lambda layer: masked(layer, MASK, zero_masked="no").__enter__()),
    (TypeError, "skip_nonfinite: expected a bool", lambda layer: convert_sync_batchnorm(layer, skip_nonfinite="no")),
    (TypeError, "enabled: expected a bool, got NoneType", lambda layer: recompute_outputs(layer, enabled=None)),
    (TypeError, "model: expected a torch.nn.Module, got NoneType", lambda _: accumulate_statistics(None).__enter__()),
    (TypeError, "model: expected a torch.nn.Module, got NoneType", lambda _: masked(None, MASK).__enter__()),
    (TypeError, "mask: expected a tensor, got list", lambda layer: masked(layer, [True]).__enter__()),
    (TypeError, "rule: " + NO_FUNCTION, lambda layer: masked(layer, MASK, rule="a").__enter__()),
    (TypeError, "filter: " + NO_FUNCTION, lambda layer: freeze_statistics(layer, "a")),
    (TypeError, "forward: " + NO_FUNCTION, lambda layer: recalibrate_statistics(layer, [], forward="a")),
    (TypeError, r"rule: .* rule\(mask, shape\)", lambda layer: masked(layer, MASK, rule=lambda mask: mask).__enter__()),
    (TypeError, r"filter: .* filter\(name, module\)", lambda layer: freeze_statistics(layer, lambda name: True)),
    (
        TypeError,
        r"forward: .* forward\(batch\), or None, got a function with the arguments \(\)$",
        lambda layer: recalibrate_statistics(layer, [], forward=lambda: None),
    ),
    (TypeError, "batches: expected an iterable", lambda layer: recalibrate_statistics(layer, None)),
    (TypeError, "weight: expected a number, got str", lambda layer: merge_statistics(layer, weight="a")),
]

# Calls in training over several ranks.
OVER_RANKS = [
    (TypeError, ".*expected a DTensor that is sharded or replicated", lambda layer: layer(partial_dtensor())),
    (RuntimeError, ".*torch.jit.trace cannot record training", lambda layer: torch.jit.trace(layer, X)),
    (RuntimeError, ".*torch.export cannot record training", lambda layer: torch.export.export(layer, (X,))),
]


def partial_dtensor():
    mesh = DeviceMesh("cpu", torch.tensor([0]), _init_backend=False)
    return DTensor.from_local(X, mesh, [Partial()], run_check=False)


@pytest.mark.parametrize(
    ("error", "message", "call", "training"),
    [(*row, True) for row in INPUTS + CALLS] + [(*row, False) for row in INPUTS],
)
def test_invalid_calls_raise_and_change_no_buffer(error, message, call, training):
    """Before and after valid calls, whose checks are cached."""
    layer = make_layer().train(training)
    check_error(layer, error, message, call)
    for _ in range(2):
        layer(X, X)
        function(**VALID)
    check_error(layer, error, message, call)


def make_layer():
    return convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))[1]


def check_error(layer, error, message, call):
    with unchanged(layer), pytest.raises(error, match=f"^{message}"):
        call(layer)


@pytest.mark.ranks(2, new_job=True)  # in a job whose group has not been created
def test_invalid_calls_raise_before_any_communication():
    """Only rank 0 makes the calls, so communication would hang."""
    if dist.get_rank() == 0:
        for error, message, call in INPUTS + CALLS + OVER_RANKS:
            if "more than 1 value" not in message:  # peers may have more values
                check_error(make_layer(), error, message, call)


@pytest.mark.parametrize("context", [accumulate_statistics, partial(masked, mask=MASK)])
def test_models_without_synchronized_layers_warn(context, recwarn):
    model = nn.Sequential(SyncBatchNorm(3))
    copy.deepcopy(recompute_outputs(model))
    with context(model):
        assert not recwarn.list
    with pytest.warns(UserWarning, match=": found no synchronized layer in Sequential") as caught:  # noqa: SIM117
        with context(nn.Sequential(nn.BatchNorm1d(3))):
            pass
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="^recompute_outputs: found no synchronized layer in BatchNorm1d"):
        exec("recompute_outputs(model)", {"recompute_outputs": recompute_outputs, "model": nn.BatchNorm1d(3)})


@pytest.mark.parametrize(
    "context",
    [lambda: accumulate_statistics(SyncBatchNorm(4)), lambda: masked(SyncBatchNorm(4), MASK), recompute_outputs],
)
def test_contexts_that_are_not_entered_warn(context, recwarn):
    with context():
        pass
    context()(lambda: None)()
    assert not recwarn.list
    with pytest.warns(UserWarning, match="^[a-z_]+: has no effect without a with statement$") as caught:
        context()
    assert caught[0].filename == __file__


# Invalid options: the value and the error.
OPTIONS = [
    ("eps", -1e-5, ValueError, "expected a finite number .*, got -1e-05"),
    ("eps", NAN, ValueError, "expected a finite number .*, got nan"),
    ("eps", None, TypeError, "expected a number, got NoneType"),
    ("momentum", -float("inf"), ValueError, "expected a finite number or None, got -inf"),
    ("momentum", "0.1", TypeError, "expected a number or None, got str"),
    ("momentum", ONES, TypeError, "expected a number or None, got Tensor"),
    ("eps_mode", "times", ValueError, 'expected "plus" or "clamp", got \'times\''),
    ("eps_mode", ONES, ValueError, 'expected "plus" or "clamp", got tensor'),
    ("skip_nonfinite", "no", TypeError, "expected a bool, got str"),
    ("activation", ("leaky_relu", NAN), ValueError, "expected a finite parameter for leaky_relu, got nan"),
    ("activation", "unknown", ValueError, "expected one of relu, .*, got 'unknown'"),
    ("activation", ("relu", 0.1), ValueError, "expected no parameter for relu, got"),
    ("activation", ("elu", 1.0, 2.0), ValueError, "expected one parameter for elu"),
    ("activation", ("elu", "x"), TypeError, r"expected one of relu, .*, got \('elu', 'x'\)"),
    ("activation", nn.ReLU, TypeError, ".* nn.ReLU, .*, got <class 'torch.nn"),
    ("activation", nn.PReLU(), TypeError, "expected one of relu, .*, got PReLU"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), OPTIONS)
@pytest.mark.parametrize("way", ["given", "set", "set after a call", "in evaluation", "function"])
def test_invalid_options_raise(name, value, error, message, way):
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
        "function": lambda: function(input=torch.randn(4, 3), process_group=Twin(), **{name: value}),
    }
    with pytest.raises(error, match=f"{name}: {message}"):
        calls.get(way, set_and_call)()
    assert layer.num_batches_tracked == 2 * (way == "set after a call")


@pytest.mark.parametrize(("options", "shape", "message"), [
    ({"eps": 0.0}, (4, 3), "eps: expected a finite number above 0 in training, got 0.0"),
    *(({}, shape, "expected more than 1 value per channel when training") for shape in ((1, 3), (1, 3, 1, 1))),
])  # fmt: skip
def test_limits_of_training_do_not_apply_to_evaluation(options, shape, message):
    layer = SyncBatchNorm(3, **options)
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(shape))
    assert layer.eval()(torch.randn(shape)).isfinite().all()
    layer.eps_mode = "clamp"  # "clamp" accepts an eps of 0
    assert layer.train()(torch.randn(4, 3)).isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_running_out_of_memory_raises_torchs_error(training):
    layer = SyncBatchNorm(1, activation="relu").train(training)
    with pytest.raises(RuntimeError, match=f"you tried to allocate {2**48} bytes"):
        layer(torch.ones(1, 1).expand(2**46, 1))


def test_out_of_memory_errors_have_the_class_of_the_device():
    message = "memory: expected 8 values of 4 bytes on meta, got none"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        raise_if_out_of_memory(RuntimeError(message))
    raise_if_out_of_memory(RuntimeError("another"))


@pytest.mark.parametrize(("name", "ours"), [
    ("convert_syncbn_model", "; use bagua_syncbn.convert_sync_batchnorm"),
    ("convert_model", "; use bagua_syncbn.vacancy.convert_model"),
    ("SynchronizedBatchNorm2d", "; use bagua_syncbn.vacancy.SynchronizedBatchNorm2d"),
    ("another", ""),
])  # fmt: skip
def test_names_of_other_packages_lead_to_ours(name, ours):
    with pytest.raises(AttributeError, match=f"^module 'bagua_syncbn' has no attribute '{name}'{ours}$"):
        getattr(bagua_syncbn, name)
