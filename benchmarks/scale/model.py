"""A training step of a network over W ranks: its layers synchronize in one global group, or in one group per node.

Step time is the time of everything else, taken as given, plus the collectives of all layers one after the other: each
layer needs its statistics before the next can begin, so nothing hides them. Left out are the gradients, which both
kinds of group exchange alike; the kernels around the collectives; and ranks that wait for a slower one.
"""

from typing import NamedTuple

from .networks import Network


def resnet50_channels() -> list[int]:
    """Returns the channels of ResNet-50's 53 batch normalizations."""
    channels = [64]
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        channels += [width, width, 4 * width] * blocks
        channels.append(4 * width)  # of the shortcut that widens
    return channels


class Job(NamedTuple):
    """A network and how it is synchronized."""

    name: str
    channels: list[int]
    compute: float  # seconds of a step without synchronization
    passes: int = 1  # of the network a step
    gathers: int = 1  # collectives of a layer forward
    reduces: int = 1  # and backward

    def synchronization(self, network: Network, ranks: int, nodes: int) -> float:
        """Seconds a step when groups of ``ranks`` on ``nodes`` synchronize."""
        if ranks == 1:
            return 0.0
        total = 0.0
        for channels in self.channels:
            # A layer that sends its statistics in several messages sends as many bytes, but starts several times.
            forward = network.all_gather(ranks, nodes, (8 * channels + 8) // self.gathers)
            backward = network.all_reduce(ranks, nodes, 8 * channels // self.reduces)
            total += self.gathers * forward + self.reduces * backward
        return self.passes * total

    def step(self, network: Network, ranks: int, per_node: int, group: str) -> float:
        """Seconds of a step on ``ranks`` GPUs, ``per_node`` in a node, with ``group`` "global" or "node"."""
        nodes = -(-ranks // per_node)
        if group == "node":
            return self.compute + self.synchronization(network, min(ranks, per_node), 1)
        return self.compute + self.synchronization(network, ranks, nodes)


RANKS = [2**exponent for exponent in range(1, 13)]
PER_NODE = 8

# 100 ms is the assumed time of everything else in a step; whoever knows their own divides by that.
RESNET50 = Job("ResNet-50, float32 statistics, 100 ms a step without synchronization", resnet50_channels(), 0.1)


def crossover(job: Job, network: Network, excess: float, per_node: int = PER_NODE) -> int | None:
    """Returns the fewest ranks with which a global group makes the step longer by ``excess`` than groups per node."""
    for ranks in range(per_node + 1, RANKS[-1] + 1):
        global_step, node_step = (job.step(network, ranks, per_node, group) for group in ("global", "node"))
        if global_step >= (1 + excess) * node_step:
            return ranks
    return None


def gather_limit(network: Network, channels: int, per_node: int = PER_NODE) -> int | None:
    """Returns the fewest ranks with which gathering the statistics takes longer than reducing as many bytes would."""
    size = 8 * channels + 8
    for ranks in range(2, RANKS[-1] + 1):
        nodes = -(-ranks // per_node)
        if network.all_gather(ranks, nodes, size) > network.all_reduce(ranks, nodes, size):
            return ranks
    return None
