"""Batch normalization by its formula, for autograd to differentiate: what the layers are compared with."""

import torch

EPS = 0.5  # large, so that "clamp" has channels on either side


def draw(*size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normalize(input, eps_mode):
    dims = [0, *range(2, input.dim())]
    var, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    return (input - mean) / (torch.clamp(var, min=EPS) if eps_mode == "clamp" else var + EPS).sqrt()
