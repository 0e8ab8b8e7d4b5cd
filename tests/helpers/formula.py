"""Batch normalization by its formula, for autograd to differentiate: what the layers are compared with."""

import torch
from torch import nn

EPS = 0.5  # large, so that "clamp" has channels on either side


def draw(*size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normalize(input, eps_mode):
    dims = [0, *range(2, input.dim())]
    var, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    return (input - mean) / (torch.clamp(var, min=EPS) if eps_mode == "clamp" else var + EPS).sqrt()


class Clamped(nn.Module):
    """The plain formula of eps_mode="clamp", differentiated by autograd: what the layer is compared with."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer  # a torch.nn.BatchNorm, for its parameters, buffers and settings

    def forward(self, input):
        layer = self.layer
        shape = (1, -1, *[1] * (input.dim() - 2))
        dims = [0, *range(2, input.dim())]
        var, mean = torch.var_mean(input, dims, correction=0)
        if self.training and layer.track_running_stats:
            count = input.numel() / input.size(1)
            layer.num_batches_tracked.add_(1)
            momentum = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(mean.detach(), momentum)
            layer.running_var.lerp_(var.detach() * count / (count - 1), momentum)
        elif layer.track_running_stats:
            var, mean = layer.running_var, layer.running_mean
        weight, bias = (1, 0) if layer.weight is None else (layer.weight.view(shape), layer.bias.view(shape))
        return (input - mean.view(shape)) / var.view(shape).clamp(min=layer.eps).sqrt() * weight + bias
