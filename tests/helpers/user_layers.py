"""Typical user-written layers and parametrizations, for conversion."""

import torch.nn.functional as F
from torch import nn


class BatchNormReLU(nn.BatchNorm2d):
    """A subclass that adds an operation after the forward of its base class."""

    def __init__(self, num_features, slope=0.1):
        super().__init__(num_features)
        self.slope = slope

    def forward(self, input):
        return nn.functional.leaky_relu(super().forward(input), self.slope)


class Centered(nn.BatchNorm2d):
    """A subclass that never calls torch's batch normalization."""

    def forward(self, input):
        return input - input.mean((0, 2, 3), keepdim=True)


class _WithAct:
    """Batch normalization and activation as in timm: a copy of torch's forward."""

    def __init__(self, num_features, act_layer=nn.LeakyReLU, **options):
        super().__init__(num_features, **options)
        self.act = act_layer()

    def forward(self, input):
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1 / float(self.num_batches_tracked)
        tracked = not self.training or self.track_running_stats
        return self.act(
            F.batch_norm(
                input,
                self.running_mean if tracked else None,
                self.running_var if tracked else None,
                self.weight,
                self.bias,
                self.training or self.running_mean is None,
                factor,
                self.eps,
            )
        )


class BatchNormAct(_WithAct, nn.BatchNorm2d):
    pass


class BatchNormAct1d(_WithAct, nn.BatchNorm1d):
    pass


class SyncBatchNormAct(nn.SyncBatchNorm):
    """A subclass of torch's synchronized layer, as in timm."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.act = nn.ReLU()

    def forward(self, input):
        return self.act(super().forward(input))


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2
