"""The model against figures that others have published. It is off by far, and this says by how much."""

from typing import NamedTuple

from .model import Job, resnet50_channels
from .networks import V100


class Comparison(NamedTuple):
    case: str
    quantity: str
    published: float
    predicted: float

    @property
    def deviation(self) -> float:
        return self.predicted / self.published - 1


# SwAV, facebookresearch/swav issue 46: an epoch with batches of 256 takes 52 minutes, on one machine with as many
# images a GPU as in the case below. ImageNet has 1281167 images.
_SWAV_STEP = 52 * 60 / (1281167 / 256)

# The network runs once for each of two sizes of crops. Its layers were apex's before the messages were batched
# (NVIDIA/apex PR 980, a month after the figure): mean, variance and count forward, two sums backward.
SWAV = Job("SwAV", resnet50_channels(), 0.0, passes=2, gathers=3, reduces=2)

# fairscale PR 662: x = (50, 2048, 7, 7) on 8 V100, seconds of 100 forwards, means of the eight lines printed there.
_PR662 = {"BatchNorm2d": 0.139, "SyncBatchNorm": 2.514, "fairscale": 0.412}
_PR662_COLLECTIVES = {"SyncBatchNorm": 1, "fairscale": 2}
_PR662_CHANNELS = 2048


def swav() -> Comparison:
    """Issue 22: a global group of 64 GPUs takes about twice the time of groups of 8."""
    node = SWAV.synchronization(V100, 8, 1)
    everything_else = max(0.0, _SWAV_STEP - SWAV.synchronization(V100, 4, 1))
    ratio = (everything_else + SWAV.synchronization(V100, 64, 8)) / (everything_else + node)
    return Comparison("SwAV, 64 GPUs", "step with a global group / with groups of 8", 2.0, ratio)


def swav_unexplained() -> float:
    """Seconds by which each collective of the global group would have to be slower to make the step twice as long."""
    collectives = SWAV.passes * len(SWAV.channels) * (SWAV.gathers + SWAV.reduces)
    node_step = _SWAV_STEP - SWAV.synchronization(V100, 4, 1) + SWAV.synchronization(V100, 8, 1)
    missing = (swav().published - swav().predicted) * node_step
    return missing / collectives


def fairscale_pr662() -> list[Comparison]:
    """The time that was measured of the unsynchronized layer, plus the collectives of the other two."""
    found = []
    for name, collectives in _PR662_COLLECTIVES.items():
        if name == "fairscale":
            each = V100.all_reduce(8, 1, 8 * _PR662_CHANNELS // collectives)
        else:
            each = V100.all_gather(8, 1, 8 * _PR662_CHANNELS + 4)
        predicted = _PR662["BatchNorm2d"] + 100 * collectives * each
        found.append(Comparison(f"fairscale PR 662, {name}", "seconds of 100 forwards", _PR662[name], predicted))
    return found


def comparisons() -> list[Comparison]:
    return [swav(), *fairscale_pr662()]
