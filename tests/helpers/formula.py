"""The reference: batch normalization from its formula, differentiated by autograd, without any code of the package."""

import torch

EPS = 0.5  # large, so that "clamp" has channels with variances above and below


def per_channel(values, input):
    """Returns ``values`` (C) in a shape that broadcasts to ``input`` (N, C, \\*)."""
    return values.view(1, -1, *[1] * (input.dim() - 2))


def values_of(input, valid=None):
    """Returns the values (n, C) of ``input`` (N, C, \\*), at the ``valid`` positions (N, 1, \\*)."""
    values = input.movedim(1, -1)
    return values.flatten(0, -2) if valid is None else values[valid.expand(input[:, :1].shape).squeeze(1)]


def moments(values):
    """Returns mean and biased variance (C) of ``values`` (n, C); zeros if there are none."""
    if len(values) == 0:
        return values.new_zeros(values.size(1)), values.new_zeros(values.size(1))
    return values.mean(0), values.var(0, correction=0)


def normalize(input, eps_mode="plus", eps=EPS, mean=None, var=None):
    """Returns ``input`` normalized with ``mean`` and ``var`` (C), by default those of the input."""
    if mean is None:
        mean, var = moments(values_of(input))
    divisor = var.clamp(min=eps) if eps_mode == "clamp" else var + eps
    return (input - per_channel(mean, input)) / per_channel(divisor, input).sqrt()


def move(layer, values, skip_nonfinite=True):
    """Updates the running statistics of ``layer`` with ``values`` (n, C), if there are at least two."""
    if len(values) > 1 and (values.isfinite().all() or not skip_nonfinite):
        layer.num_batches_tracked += 1
        factor = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(values.mean(0), factor)
        layer.running_var.lerp_(values.var(0), factor)


def mixture(means, variances, weights):
    """Returns mean and variance (C) of a mixture of R distributions (R, C) with ``weights`` (R)."""
    shares = (weights / weights.sum() if weights.any() else torch.full_like(weights, 1 / len(weights))).unsqueeze(1)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean) ** 2)).sum(0)
