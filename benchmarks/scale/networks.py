r"""Time of small collectives, as latency of steps and bandwidth.

The constants are assumptions, nothing here was measured on such a network. Latencies are those of the cost model by
which NCCL chooses its algorithms (NVIDIA/nccl 2.30, src/graph/tuning.cc: baseLatencies, hwLatencies, LL protocol, and
getNetOverhead). With W ranks on M nodes, in microseconds:

- ring all-gather: 6.6 + (W - M) * max(0.6, 1.0 if M > 1) + (M - 1) * 2.7
- ring all-reduce: twice the steps
- tree all-reduce: 6.8 + 2 * ((W / M - 1) * 0.6 + log2(M) * 5.0)

One rank a node takes the tree's 5.0 between nodes in place of 2.7. An all-reduce takes the cheaper of ring and tree.
Bandwidths are nominal ones per direction halved, since the LL protocol sends a flag with each word.
"""

import math
from typing import NamedTuple, Protocol


class Network(Protocol):
    def all_gather(self, ranks: int, nodes: int, size: int) -> float:
        """Seconds of an all-gather of ``size`` bytes a rank."""

    def all_reduce(self, ranks: int, nodes: int, size: int) -> float:
        """Seconds of an all-reduce of ``size`` bytes."""


class Nccl(NamedTuple):
    """Latencies in microseconds, bandwidths in bytes a second and direction of one GPU."""

    name: str
    intra_bandwidth: float
    inter_bandwidth: float
    ring_base: float = 6.6
    tree_base: float = 6.8
    intra_latency: float = 0.6
    ring_inter_latency: float = 2.7
    tree_inter_latency: float = 5.0
    net_overhead: float = 1.0

    def all_gather(self, ranks: int, nodes: int, size: int) -> float:
        return self._ring(ranks, nodes, ranks - 1, size)

    def all_reduce(self, ranks: int, nodes: int, size: int) -> float:
        ring = self._ring(ranks, nodes, 2 * (ranks - 1), size / ranks)
        depth = (ranks / nodes - 1) * self.intra_latency + math.log2(nodes) * self.tree_inter_latency
        tree = (self.tree_base + 2 * depth) * 1e-6 + 2 * size / self._bandwidth(nodes)
        return min(ring, tree)

    def _ring(self, ranks: int, nodes: int, steps: int, size_of_step: float) -> float:
        inter_steps = steps * (nodes - 1) / (ranks - 1) if nodes > 1 else 0
        intra = max(self.intra_latency, self.net_overhead) if nodes > 1 else self.intra_latency
        inter = self.tree_inter_latency if ranks == nodes else self.ring_inter_latency
        latency = self.ring_base + (steps - inter_steps) * intra + inter_steps * inter
        return latency * 1e-6 + steps * size_of_step / self._bandwidth(nodes)

    def _bandwidth(self, nodes: int) -> float:
        return (self.intra_bandwidth if nodes == 1 else min(self.intra_bandwidth, self.inter_bandwidth)) / 2


# NVLink: 450 GB/s a direction on an H100, 150 on a V100 (NVIDIA's data sheets). InfiniBand: 400 Gbit/s (NDR) for each
# GPU, and 100 Gbit/s (EDR) for every second V100, as in a DGX-1.
H100 = Nccl("H100 class: NVLink 4, InfiniBand NDR", 450e9, 50e9)
V100 = Nccl("V100 class: NVLink 2, InfiniBand EDR", 150e9, 6.25e9)
