"""Every option of the layer holds by every way into it, in training and in evaluation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import (
    SyncBatchNorm2d,
    accumulate_statistics,
    convert_sync_batchnorm,
    freeze_statistics,
    masked,
    recompute_outputs,
    sync_batch_norm,
)
from bagua_syncbn.data_parallel import DataParallelWithCallback

pytestmark = pytest.mark.reference_too

OPTIONS = {
    "eps": 0.5,
    "momentum": 0.3,
    "average": None,  # momentum
    "eps_mode": "clamp",
    "skip_nonfinite": True,
    "activation": ("leaky_relu", 0.2),
    "frozen": True,
}


class BySuper(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input)


class ByFunction(nn.BatchNorm2d):
    """As timm writes it: torch's forward, with F.batch_norm."""

    def forward(self, input):
        factor = self.momentum
        if self.training:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if factor is None else factor
        statistics = self.running_mean, self.running_var
        return F.batch_norm(input, *statistics, self.weight, self.bias, self.training, factor or 0.0, self.eps)


def given(name):
    """The options of a layer of which one is not torch's."""
    options = {"eps": 1e-5, "momentum": 0.1, "eps_mode": "plus", "skip_nonfinite": False, "activation": None}
    if name != "frozen":
        options["momentum" if name == "average" else name] = OPTIONS[name]
    return options | ({"eps": 2.0} if name == "eps_mode" else {})  # above some of the variances


def make_layer(name, cls=None):
    options = given(name)
    if cls is None:
        layer = SyncBatchNorm2d(3, **options)
    else:
        local = cls(3, eps=options["eps"], momentum=options["momentum"])
        layer = convert_sync_batchnorm(local, skip_nonfinite=options["skip_nonfinite"])
        layer.eps_mode, layer.fused_activation = options["eps_mode"], options["activation"]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.5, -0.5, 1.0]))
        layer.bias.copy_(torch.tensor([0.1, 0.2, -0.3]))
        layer.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
        layer.running_var.copy_(torch.tensor([0.5, 2.0, 4.0]))
    return (freeze_statistics(layer) if name == "frozen" else layer).double()


def as_function(layer):
    def call(input):
        tracked = layer.num_batches_tracked if layer.training else None
        buffers, parameters = (layer.running_mean, layer.running_var), (layer.weight, layer.bias)
        options = {"eps_mode": layer.eps_mode, "skip_nonfinite": layer.skip_nonfinite}
        return sync_batch_norm(
            *(input, *buffers, *parameters, layer.training, layer.momentum, layer.eps),
            **options,
            activation=layer.fused_activation,
            num_batches_tracked=tracked,
        )

    return call


def within(context):
    def way(layer):
        def call(input):
            with context(layer):
                return layer(input)

        return call

    return way


WAYS = {
    "forward": lambda layer: layer,
    "function": as_function,
    "super": lambda layer: layer,
    "own F.batch_norm": lambda layer: layer,
    "replicas": lambda layer: DataParallelWithCallback(layer, device_ids=["cpu", "cpu"]),
    "compiled": lambda layer: torch.compile(layer, backend="eager"),
    "checkpointed": lambda layer: lambda input: checkpoint(layer, input, use_reentrant=False),
    "masked": within(lambda layer: masked(layer, torch.ones(1, 1, 1, 1, dtype=torch.bool))),
    "masked, zeroes": within(lambda layer: masked(layer, torch.ones(1, 1, 1, 1, dtype=torch.bool), zero_masked=True)),
    "accumulated": within(accumulate_statistics),
    "recomputed": within(lambda layer: recompute_outputs()),
}
CLASSES = {"super": BySuper, "own F.batch_norm": ByFunction}


def expected_step(layer, input, grad_output, training):
    """Output and gradients by the formula; moves the buffers of ``layer`` in training."""
    input = input.clone().requires_grad_()
    mean, var = layer.running_mean, layer.running_var
    if training:
        mean, var = input.mean((0, 2, 3)), input.var((0, 2, 3), correction=0)
    number = input[:, 0].numel()
    if training and (mean.isfinite().all() or not layer.skip_nonfinite):
        layer.num_batches_tracked.add_(1)
        factor = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(mean.detach(), factor)
        layer.running_var.lerp_(var.detach() * number / (number - 1), factor)
    divisor = var.clamp(min=layer.eps) if layer.eps_mode == "clamp" else var + layer.eps
    view = (1, -1, 1, 1)
    output = (input - mean.view(view)) * divisor.rsqrt().view(view) * layer.weight.view(view) + layer.bias.view(view)
    output = F.leaky_relu(output, 0.2) if layer.fused_activation else output
    return output.detach(), *torch.autograd.grad(output, (input, layer.weight, layer.bias), grad_output)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_every_option_holds_by_every_way_in(way, option, single_threaded):
    layer, model = make_layer(option, CLASSES.get(way)), make_layer(option)
    call = WAYS[way](layer)
    for step, training in enumerate((True, True, False)):
        layer.train(training)
        input, grad_output = torch.randn(2, 4, 3, 2, 5, dtype=torch.float64) + step
        own = input.clone().requires_grad_()
        output = call(own)
        actual = output.detach(), *torch.autograd.grad(output, (own, layer.weight, layer.bias), grad_output)
        expected = expected_step(model, input, grad_output, training and option != "frozen")
        for name, one, other in zip(("output", "input", "weight", "bias"), actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")
        torch.testing.assert_close(list(layer.buffers()), list(model.buffers()), rtol=1e-9, atol=1e-9)
    if option == "skip_nonfinite":
        layer.train()
        call(torch.full((4, 3, 2, 5), torch.inf, dtype=torch.float64))
        statistics = [layer.running_mean, layer.running_var], [model.running_mean, model.running_var]
        torch.testing.assert_close(*statistics, rtol=1e-9, atol=1e-9)
