"""Section large: the cost of a layer over group sizes, for several rules that merge statistics of ranks.

Host time is measured with instant peers. Wire time is computed.
"""

import math
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import bagua_syncbn
from bagua_syncbn import ops

from ..recorded import Case, Results, of_section, table
from ..timing import Workload, time_workload

RANKS = (2, 8, 31, 32, 128, 1024)
GPUS = (8, 64, 512, 4096)
WIRE_RANKS = (2, 8, 16, 31, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # shown in the chart
CHANNELS, SAMPLES, _EPS = 256, 4, 1e-5

RULES = {
    "ours": "bagua_syncbn",
    "torch": "torch's",
    "fairscale": "fairscale's",
    "naive": "naive sum",
}


class InstantPeers:
    """A communicator with simulated peers that instantly send the same messages; records each message's kind and
    size."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: list[tuple[str, int]] = []
        self._rows = torch.empty(0)

    def all_gather(self, packed: Tensor) -> Tensor:
        self.sent.append(("gather", packed.nbytes))
        if self._rows.shape != (self.size, packed.numel()) or self._rows.dtype != packed.dtype:
            self._rows = packed.repeat(self.size, 1)
        # Reuses the rows of the first call, because filling them is a backend's work; only headers change.
        self._rows[:, -3:] = packed[-3:]
        return self._rows

    def all_reduce(self, packed: Tensor) -> Tensor:
        self.sent.append(("sum", packed.nbytes))
        return packed.mul_(self.size)


# Mean, variance and count of all ranks, merged from the last message.
Merged = tuple[Tensor, Tensor, Tensor]


def _merge_rows(rows: Tensor) -> Merged:
    rows = rows[rows[:, -1] >= 1]  # ranks with values
    means, invstds, counts = rows.split([CHANNELS, CHANNELS, 1], 1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return mean, (counts * (invstds**-2 - _EPS + (means - mean) ** 2)).sum(0) / count, count


def _merge_sums(total: Tensor) -> Merged:
    mean, square = (total[:-1] / total[-1]).chunk(2)
    return mean, square - mean.square(), total[-1]


def _merge_means(total: Tensor, count: Tensor) -> Merged:
    mean, square = total.chunk(2)
    return mean, square - mean.square(), count


def _torchs(x: Tensor, peers: InstantPeers) -> Callable[[], Merged]:
    """Gathers mean, inverse deviation and count."""
    var, mean = torch.var_mean(x, 0, correction=0)
    rows = peers.all_gather(torch.cat([mean, (var + _EPS).rsqrt(), x.new_full((1,), len(x))]))
    return lambda: _merge_rows(rows)


def _fairscales(x: Tensor, peers: InstantPeers) -> Callable[[], Merged]:
    """Sums counts, then means and means of squares weighted by counts."""
    count = x.new_full((1,), len(x))
    every = peers.all_reduce(count.clone())
    total = peers.all_reduce(torch.cat([x.mean(0), x.square().mean(0)]) * (count / every))
    return lambda: _merge_means(total, every[0])


def _naive(x: Tensor, peers: InstantPeers) -> Callable[[], Merged]:
    """Sums values, squares and counts."""
    total = peers.all_reduce(torch.cat([x.sum(0), x.square().sum(0), x.new_full((1,), len(x))]))
    return lambda: _merge_sums(total)


_RULES = {"torch": _torchs, "fairscale": _fairscales, "naive": _naive}


def _move(running: tuple[Tensor, Tensor], mean: Tensor, var: Tensor, count: Tensor) -> Merged:
    """Updates the running statistics. Returns mean, inverse deviation and count."""
    running[0].lerp_(mean, 0.1)
    running[1].lerp_(var * (count / (count - 1)), 0.1)
    return mean, (var + _EPS).rsqrt(), count


class RuleStep(torch.autograd.Function):
    """A bare step with a different rule: statistics, messages and merge in torch operations, otherwise our ops."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running: Any, rule: Any, peers: InstantPeers
    ) -> Tensor:
        mean, invstd, count = _move(running, *rule(x, peers)())
        ctx.save_for_backward(x, weight, mean, invstd, count)
        ctx.peers = peers
        return ops.batch_norm_elemt(x, weight, bias, mean, invstd)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight)
        sums = ctx.peers.all_reduce(sums)
        grad_input = ops.batch_norm_backward_elemt(dy, x, weight, mean, invstd, sums, count.long())
        return grad_input, grad_weight, grad_bias, None, None, None


def make(ranks: int) -> tuple[Workload, Workload, dict[str, list[tuple[str, int]]]]:
    """Returns steps, merges and messages, by rule."""
    x, dy = torch.randn(SAMPLES, CHANNELS, requires_grad=True), torch.randn(SAMPLES, CHANNELS)
    peers = {name: InstantPeers(ranks) for name in RULES}
    layer = bagua_syncbn.SyncBatchNorm(CHANNELS, process_group=peers["ours"])
    parameters, running = list(layer.parameters()), (torch.zeros(CHANNELS), torch.ones(CHANNELS))

    def step(normalize: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(normalize(x), (x, *parameters), dy)

    def by_rule(name: str) -> Callable[[], object]:
        return step(lambda x: RuleStep.apply(x, *parameters, running, _RULES[name], peers[name]))

    def merge_by_rule(name: str) -> Callable[[], object]:
        merge = _RULES[name](x.detach(), InstantPeers(ranks))
        return lambda: _move(running, *merge())

    steps, sent = {"ours": step(layer)} | {name: by_rule(name) for name in _RULES}, {}
    for name, function in steps.items():
        for _ in range(3):  # our layer predicts messages starting in the third step
            peers[name].sent.clear()
            function()
        sent[name] = list(peers[name].sent)
    merge = ops.merge_stats
    with patch.object(ops, "merge_stats", wraps=merge) as merging:
        steps["ours"]()
    arguments = merging.call_args
    merges = {"ours": lambda: merge(*arguments.args, **arguments.kwargs)} | {n: merge_by_rule(n) for n in _RULES}
    return steps, merges, sent


def cases(job: dict[str, Any]) -> list[tuple[int]]:
    return [(ranks,) for ranks in RANKS]


def measure(ranks: int, job: dict[str, Any]) -> Case:
    torch.set_num_threads(1)
    often = {"least": 3 * job["least"], "most": 20 * job["most"], "seconds": job["seconds"] / 2}
    steps, merges, sent = make(ranks)
    workload = steps | {f"merge, {name}": merge for name, merge in merges.items()}
    return {"group": ranks, "messages": sent, **time_workload(workload, job | often)}


def received(messages: list[tuple[str, int]], ranks: int) -> float:
    """Returns the bytes that a rank sends and receives in a ring."""
    return sum(size * (ranks - 1) * (1 if kind == "gather" else 2 / ranks) for kind, size in messages)


def on_wire(messages: list[tuple[str, int]], gpus: int) -> float:
    """Returns the microseconds of a layer's messages between ``gpus``, 8 per host, sent in sequence.

    Uses the latencies from which NCCL 2.20.3 selects algorithms (``src/graph/tuning.cc``; protocol LL, NVLink,
    network), with rings for gathers and trees for sums, and a bandwidth of 25 GB/s, half of 400 Gb/s.
    """
    hosts, per_us = math.ceil(gpus / 8), 25e3
    passed = gpus - hosts, hosts - 1  # ring steps: within hosts, between hosts
    gather = 6.6 + passed[0] * (0.6 if hosts == 1 else 1.0) + passed[1] * 2.7
    add_up = 6.8 + 2 * ((min(gpus, 8) - 1) * 0.6 + math.log2(hosts) * 5.0)
    return sum(
        gather + (gpus - 1) * size / per_us if kind == "gather" else add_up + 2 * size / per_us
        for kind, size in messages
    )


def messages_of(results: Results, rule: str, ranks: int) -> list[tuple[str, int]]:
    """Returns the messages of a layer over ``ranks``, from the largest measured group up to this size."""
    case = max((c for c in of_section(results, "large") if c["group"] <= ranks), key=lambda c: c["group"])
    messages: list[tuple[str, int]] = case["messages"][rule]
    return messages


def large_table(results: Results) -> str:
    """A layer's step over group sizes (256 channels, forward and backward): median host microseconds with instant
    peers, microseconds of the merge only, and KiB that a rank sends and receives in a ring.
    """

    def row(case: Case) -> list[str]:
        times = case["microseconds"]
        hosts = [f"{median(times[name]):,.0f}" for name in RULES]
        merges = [f"{median(times[f'merge, {name}']):,.1f}" for name in RULES]
        kib = [f"{received(case['messages'][name], case['group']) / 1024:,.1f}" for name in RULES]
        return [f"{case['group']:,}", *hosts, *merges, *kib]

    header = [f"{what}: {name}" if name == "ours" else name for what in ("host", "merge", "KiB") for name in RULES]
    return table(["ranks", *header], map(row, of_section(results, "large")))


def wire_table(results: Results) -> str:
    """Computed microseconds of a layer's messages between GPUs (256 channels, forward and backward)."""

    def row(gpus: int) -> list[str]:
        return [f"{gpus:,}", *(f"{on_wire(messages_of(results, name, gpus), gpus):,.0f}" for name in RULES)]

    return table(["GPUs", *RULES.values()], map(row, GPUS))


TABLES = {"large": large_table, "wire": wire_table}
