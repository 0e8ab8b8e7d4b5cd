"""Forward passes that activation checkpointing repeats in backward: they find the moments of the first one.

A training forward in the middle of a backward pass is taken for the repetition of one that was made before. It must
not communicate, because nothing says that the other ranks repeat theirs, nor count its batch once more. It is
recognized by what it is: this rank's statistics of its input are those of the first. So it does not matter who repeats
it, in which order and how often; and the choice among several is made on the device, where no host waits for it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from .. import ops
from .internals import is_in_backward

# Forward passes without a graph to hold them, as in reentrant checkpointing, are held in this number for a layer.
HELD_WITHOUT_GRAPH = 32

# How far the statistics of a repetition may be from those of the first pass, in deviations. Kernels that add up in a
# changing order stay far below, and other batches far above or do no harm.
TOLERANCE = 1e-3

# Others have no such op, and are asked.
_ASSERTING_DEVICES = ("cpu", "cuda")


@dataclass(eq=False)
class Forward:
    """One forward pass: this rank's packed statistics (2C + 2), and the moments of all ranks that came of them."""

    stats: Tensor
    eps: float
    eps_mode: str
    moments: ops.Moments


class Forwards:
    """The forward passes of one layer that may still be repeated."""

    def __init__(self) -> None:
        self._alive: deque[ref[Forward]] = deque()
        self._held: deque[Forward] = deque(maxlen=HELD_WITHOUT_GRAPH)

    def remember(self, forward: Forward) -> None:
        """Remembers ``forward`` as long as a graph holds it."""
        while self._alive and self._alive[0]() is None:
            self._alive.popleft()
        self._alive.append(ref(forward))

    def hold(self, forward: Forward) -> None:
        """Holds ``forward``, which no graph does, until others have taken its place."""
        self._held.append(forward)

    def recall(self, stats: Tensor, eps: float, eps_mode: str) -> Forward | None:
        """Returns the forward pass that the present one repeats, or None if this one is none that repeats.

        Raises:
            RuntimeError: there are passes that could be it, and the statistics of none are like ``stats`` (2C + 2). On
                CUDA this comes as an assertion on the device.
        """
        if not is_in_backward():
            return None
        alike = list(self._alike(stats, eps, eps_mode))
        if not alike:
            return None
        distances = torch.stack([_distance(stats, forward.stats) for forward in alike])
        nearest = distances.argmin()
        _assert_on_device(
            distances.amin() <= TOLERANCE,
            "sync_batch_norm: expected a forward pass within backward to repeat an earlier one of its layer, as "
            "activation checkpointing does; got input with other statistics than any that is remembered",
        )
        if len(alike) == 1:
            return alike[0]

        def choose(values: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(values)).index_select(0, nearest.view(1)).squeeze(0)

        mean, invstd, count, clamped = zip(*(forward.moments for forward in alike), strict=True)
        chosen = ops.Moments(
            choose(mean), choose(invstd), choose(count), None if eps_mode == "plus" else choose(clamped)
        )
        return Forward(stats, eps, eps_mode, chosen)

    def _alike(self, stats: Tensor, eps: float, eps_mode: str) -> Iterator[Forward]:
        # The newest first, which argmin takes where several are the same.
        for alive in reversed(self._alive):
            forward = alive()
            if forward is None:
                continue
            other = forward.stats
            same_kind = (other.size(), other.dtype, other.device) == (stats.size(), stats.dtype, stats.device)
            if same_kind and (forward.eps, forward.eps_mode) == (eps, eps_mode):
                yield forward


def _distance(stats: Tensor, other: Tensor) -> Tensor:
    """Largest difference between two packed statistics, in deviations; infinite where the counts differ."""
    channels = stats.numel() // 2 - 1
    mean, var, _ = other.split([channels, channels, 2])
    # What rounding makes of a channel whose values are all the same is relative to the value.
    deviation = var.sqrt() + 1e-3 * mean.abs()
    unit = torch.cat([deviation, deviation**2, deviation.new_zeros(2)])
    # Overflow repeats too: not a number is as good as any other value.
    same = (stats == other) | (stats.isnan() & other.isnan())
    distances = ((stats - other).abs() / unit).nan_to_num(nan=torch.inf).masked_fill(same, 0)
    return distances.amax()


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
    if forwards is None:
        forwards = _forwards_by_layer[layer] = Forwards()
    return forwards
