"""Forward passes that activation checkpointing repeats in backward: they find the moments of the first one.

A training forward in the middle of a backward pass is taken for the repetition of one that was made before. It must
not communicate, because nothing says that the other ranks repeat theirs, nor count its batch once more. It is
recognized by what it is: this rank's statistics of its input are those of the first. So it does not matter who repeats
it, in which order and how often; and the choice among several is made on the device, where no host waits for it.

Where this rank's batch is the same twice and the other ranks' are not, its statistics are the same to the bit and the
moments are not. Then the numbers decide that autograd gives to the nodes of a graph in the order in which they are
made. The node that is running when a pass is repeated is one that needs it. If the first pass was in grad mode, that
node is in the graph of the same block, and so the newest pass that is not newer than the node is the one. If it was
not, as in reentrant checkpointing, the node stands for the whole block and was made at its beginning, and the oldest
pass that is newer is the one. What remains is a layer that one block calls twice on such batches: both calls take the
same pass.
"""

from collections import deque
from collections.abc import Iterable
from threading import get_ident
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from .. import ops
from .torch_private import NO_GRAPH_TASK, graph_task, is_capturing, next_node_number, running_node_number

# Forward passes without a graph to hold them, as in reentrant checkpointing: so many are held for a layer and a thread.
HELD_WITHOUT_GRAPH = 32

# How far the statistics of a repetition may be from those of the first pass, in deviations. Kernels that add up in a
# changing order stay far below; the nearest is taken, so that other batches below do no harm.
TOLERANCE = 1e-3

# Others have no such op, and are asked.
_ASSERTING_DEVICES = ("cpu", "cuda", "meta")


class Forward:
    """One forward pass: this rank's packed statistics (2C + 2), and the moments of all ranks once they are known."""

    moments: ops.MergedStats

    def __init__(self, stats: Tensor, eps: float, eps_mode: str, makes_graph: bool) -> None:
        self.stats, self.eps, self.eps_mode = stats, eps, eps_mode
        self.makes_graph, self.number = makes_graph, next_node_number()
        # A captured pass must not read what was not captured: when it is replayed, that may be gone.
        self.captured = stats.is_cuda and is_capturing()

    def is_like(self, other: "Forward") -> bool:
        """Whether ``other`` could be the same pass, from all that the host knows."""
        return (
            (self.eps, self.eps_mode, self.captured) == (other.eps, other.eps_mode, other.captured)
            and (self.stats.size(), self.stats.dtype) == (other.stats.size(), other.stats.dtype)
            and self.stats.device == other.stats.device
        )


class Forwards:
    """The forward passes of one layer that may still be repeated.

    Threads share it without a lock: each operation on the set is a single one of the interpreter's.
    """

    def __init__(self) -> None:
        self._alive: set[ref[Forward]] = set()
        self._held_by_thread: dict[int, deque[Forward]] = {}

    def remember(self, forward: Forward) -> None:
        """Remembers ``forward`` as long as a graph holds it."""
        self._alive.add(ref(forward, self._alive.discard))

    def hold(self, forward: Forward) -> None:
        """Holds ``forward``, which no graph does, until others of this thread have taken its place."""
        self._held_by_thread.setdefault(get_ident(), deque(maxlen=HELD_WITHOUT_GRAPH)).append(forward)

    def recall(self, forward: Forward) -> ops.MergedStats | None:
        """Returns the moments of the pass that ``forward`` repeats, or None if it is none that repeats.

        Raises:
            RuntimeError: there are passes that could be it, and the statistics of none are like its own. On CUDA this
                comes as an assertion on the device.
        """
        if graph_task() == NO_GRAPH_TASK:
            return None
        alike = self._alike(forward)
        if not alike:
            return None
        distances = _distances(forward.stats, torch.stack([other.stats for other in alike]))
        nearest = distances.argmin()  # the first of those that are the same
        _assert_on_device(
            distances.amin() <= TOLERANCE,
            "sync_batch_norm: expected a forward pass within backward to repeat an earlier one of its layer, as "
            "activation checkpointing does; got input with other statistics than any that is remembered",
        )
        if len(alike) == 1:
            return alike[0].moments

        def choose(values: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(values)).index_select(0, nearest.view(1)).squeeze(0)

        mean, invstd, count, clamped = zip(*(other.moments for other in alike), strict=True)
        return ops.MergedStats(
            choose(mean), choose(invstd), choose(count), None if forward.eps_mode == "plus" else choose(clamped)
        )

    def _alike(self, forward: Forward) -> list[Forward]:
        """Returns the passes that ``forward`` may repeat, the likeliest first where the host can tell."""
        running = running_node_number()

        def unlikelihood(other: Forward) -> tuple[bool, int]:
            is_on_the_other_side = (other.number > running) == other.makes_graph
            return is_on_the_other_side, abs(other.number - running)

        alive = (other() for other in self._alive.copy())
        return sorted((other for other in alive if other is not None and other.is_like(forward)), key=unlikelihood)


def _distances(stats: Tensor, others: Tensor) -> Tensor:
    """Largest differences to K packed statistics (K, 2C + 2), in deviations; infinite where the counts differ."""
    channels = stats.numel() // 2 - 1
    mean, var, count = others.split([channels, channels, 2], dim=1)
    # What rounding makes of a channel whose values are all the same is relative to the value.
    deviation = var.sqrt() + 1e-3 * mean.abs()
    unit = torch.cat([deviation, deviation**2, torch.zeros_like(count)], dim=1)
    # Overflow repeats too: not a number is as good as any other value.
    same = (stats == others) | (stats.isnan() & others.isnan())
    return ((stats - others).abs() / unit).nan_to_num(nan=torch.inf).masked_fill(same, 0).amax(1)


def _assert_on_device(condition: Tensor, message: str) -> None:
    """Raises RuntimeError, on CUDA some time later and from the device, unless ``condition``, a scalar, is true."""
    if condition.device.type in _ASSERTING_DEVICES:
        torch._assert_async(condition, message)
    elif not condition:
        raise RuntimeError(message)


_forwards_by_layer: WeakKeyDictionary[nn.Module, Forwards] = WeakKeyDictionary()
_forwards_of_none = Forwards()


def forwards_of(layer: nn.Module | None) -> Forwards:
    """Returns the forward passes of ``layer``, or those of all calls without one."""
    if layer is None:
        return _forwards_of_none
    forwards = _forwards_by_layer.get(layer)
    # The first of several threads that come here makes them for all.
    return _forwards_by_layer.setdefault(layer, Forwards()) if forwards is None else forwards
