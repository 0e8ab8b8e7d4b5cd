"""Batch noise: how far batch statistics are from the statistics of all data, layer by layer."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from math import inf, sqrt
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..checks import is_distributed
from ..dry_run import forward_of, observe_inputs
from ..masked import is_masked
from ..models import check_module
from ..sync_batchnorm import SyncBatchNorm
from .ranks import Peers
from .verify import unwrapped

# Sums of squares are differences of larger sums. Below this share of the larger one they are rounding errors.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class LayerNoise:
    """Batch noise of one layer: the root mean square over its channels."""

    name: str
    """Name in the model, followed by the number of the call after the first one in a forward pass."""
    positions: int
    """Values per channel in one sample."""
    worth: float
    """Number of independent values that determine the mean as well as one sample; inf if all samples have one mean."""
    of_one_sample: float
    """Noise of a batch of one sample."""
    spread: float | None
    """Spread of the batch means, relative to shuffled samples; 1 means shuffled.

    None if there are too few samples or all have the same mean; inf if samples differ only between batches.
    """
    is_mixed: bool
    """True if ``spread`` is larger than chance explains."""

    def at(self, samples: int) -> float:
        """Returns the noise of a batch of ``samples`` samples."""
        return self.of_one_sample / sqrt(samples)


@dataclass(frozen=True)
class BatchNoise:
    """Result of :func:`measure_batch_noise`, equal on all ranks; ``str`` returns a verdict and a table with bars."""

    layers: tuple[LayerNoise, ...]
    samples: int
    """Samples per rank that the verdict assumes."""
    ranks: int
    limit: float
    """The verdict is to synchronize if the noise exceeds this limit."""

    def at(self, samples: int) -> "BatchNoise":
        """Returns the result for ``samples`` samples per rank."""
        return replace(self, samples=samples)

    @property
    def verdict(self) -> str:
        """Advice whether to synchronize, as text."""
        count, over = len(self.layers), sum(layer.at(self.samples) > self.limit for layer in self.layers)
        worst = max(self.layers, key=lambda layer: layer.of_one_sample)
        text = (
            f"at {self.samples} sample{'s' * (self.samples > 1)} per rank, batch noise is "
            f"{worst.at(self.samples):.0%} of the standard deviation in {worst.name!r}: "
            f"{'synchronize' if over else 'no need to synchronize'}; above {self.limit:.0%} in {over} of {count} layers"
        )
        mixed = [layer for layer in self.layers if layer.is_mixed]
        if mixed:
            most = max(mixed, key=lambda layer: layer.spread or 0)
            text += (
                f"\nbatch means spread {most.spread:.1f} times as far as with shuffled samples in {most.name!r}, and "
                f"too far in {len(mixed)} of {count} layers: shuffle samples across batches and ranks, or synchronize"
            )
        return text

    def __str__(self) -> str:
        sizes = sorted({2, 8, 32, self.samples, self.samples * self.ranks})
        width = max(len(name) for name in ("layer", *(layer.name for layer in self.layers)))
        largest = max(layer.at(self.samples) for layer in self.layers) or 1.0
        lines = [f"{'layer':{width}}  values   worth" + "".join(f"{f'at {size}':>8}" for size in sizes)]
        for layer in self.layers:
            noise = "".join(f"{layer.at(size):8.0%}" for size in sizes)
            bar = "#" * round(30 * layer.at(self.samples) / largest)
            lines.append(f"{layer.name:{width}}  {layer.positions:6}  {layer.worth:6.1f}{noise}  {bar}".rstrip())
        return "\n".join([self.verdict, *lines])


def measure_batch_noise(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    samples: int | None = None,
    limit: float = 0.05,
    forward: Callable[[Any], Any] | None = None,
    device: torch.device | str | int | None = None,
    process_group: Any = None,
) -> BatchNoise:
    r"""Measures how noisy batch statistics are in each layer, to decide whether to synchronize them.

    Noise is the root mean square change of normalized values when the statistics of :math:`N` samples replace the
    statistics of all data. For a channel with mean :math:`\mu` and variance :math:`\sigma^2` (plus ``eps``),

    .. math:: \text{noise}^2 = \frac{1}{N} \left(
        \frac{\operatorname{Var}(m)}{\sigma^2} + \frac{\operatorname{Var}(v)}{4 \sigma^4} \right)

    to first order, with the per-sample means :math:`m` of :math:`x` and :math:`v` of :math:`(x - \mu)^2`. So a noise
    above 0.5 only means that it is large. :math:`\operatorname{Var}(m)` includes the correlation :math:`\rho` of the
    :math:`S` positions within a sample: a sample is worth :math:`\sigma^2 / \operatorname{Var}(m) = S / (1 + (S - 1)
    \rho)` independent values (Kish, *Survey Sampling*, 1965). Samples are assumed to be independent; video frames are
    not.

    If samples are shuffled, the mean squares of sample means between and within batches are equal. If their ratio is
    more than 4 standard errors too large (Paulson, 1942), batches or ranks have different distributions.

    The model runs in evaluation mode and without communication; nothing in it, and no random state, changes. Ranks may
    have different numbers of batches. The result holds for the current parameters and running statistics, so train a
    new model for some steps first.

    Args:
        module: the model in training mode, wrapped or not, converted or not. Layers in evaluation mode (e.g. frozen
            layers) are skipped.
        batches: batches of this rank, a few hundred samples in all, as for :func:`recalibrate_statistics`.
        samples: samples per rank that the verdict assumes; None for the size of the largest batch.
        limit: the verdict is to synchronize if the noise exceeds this limit.
        forward: called with each batch, runs the model; None for ``module(batch)``, or the first item of a batch.
        device: where batches are moved before ``module`` is called; None to leave them. Not together with ``forward``.
        process_group: the ranks that take part, as for :func:`sync_batch_norm`; None for the whole job.

    Shape:
        - Input of layers: (N, C, \*), samples in the first dimension

    Returns:
        A :class:`~bagua_syncbn.verification.BatchNoise`: a verdict and a per-layer table as text, and
        :meth:`~bagua_syncbn.verification.BatchNoise.at` for other batch sizes.

    Raises:
        TypeError: ``module`` is not a module, ``batches`` not an iterable of batches, or ``forward`` not callable.
        ValueError: no layer is in training mode; a layer gets fewer than two samples, a mask or a DTensor; ``samples``
            or ``limit`` is not positive; ``device`` is given together with ``forward``.
        RuntimeError: another rank raised.

    Example::

        >>> noise = bagua_syncbn.measure_batch_noise(model, loader)
        >>> print(noise.at(2).verdict)
        at 2 samples per rank, batch noise is 52% of the standard deviation in '8': synchronize; above 5% in 3 of 3 ...
    """

    def measure() -> dict[str, _Sums]:
        check_module(module)
        if not isinstance(batches, Iterable) or isinstance(batches, Tensor):
            raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}")
        for name, value in ("samples", 1 if samples is None else samples), ("limit", limit):
            if not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        return _measure(module, batches, forward_of(module, forward, device))

    ranks = Peers("measure_batch_noise", process_group)
    by_rank = ranks.gather("the batches", measure)
    by_layer = {name: [found[name] for found in by_rank if name in found] for found in by_rank for name in found}
    if not by_layer:
        raise ValueError("batches: expected a non-empty batch on some rank, got none that reaches a layer")
    layers = tuple(_noise_of(name, found) for name, found in by_layer.items())
    largest = max(sums.largest for found in by_layer.values() for sums in found)
    return BatchNoise(layers, samples or largest, ranks.size, limit)


class _Sums(NamedTuple):
    """Sums over the samples of one layer."""

    eps: float
    positions: int
    batches: int
    largest: int
    """Samples in the largest batch."""
    center: Tensor
    """(C), subtracted from all values."""
    products: Tensor
    """(2, C, 3, 3), products of features (1, m, q): the per-sample means of values and of their squares.

    The first are summed over samples. The second are products of each batch's sums, divided by its size.
    """

    def __add__(self, other: "_Sums") -> "_Sums":  # type: ignore[override]
        batches, largest = self.batches + other.batches, max(self.largest, other.largest)
        products = self.products + _shifted(other.products, other.center - self.center)
        return self._replace(batches=batches, largest=largest, products=products)


def _measure(module: nn.Module, batches: Iterable[Any], forward: Callable[[Any], Any]) -> dict[str, _Sums]:
    """Returns sums for each call of a layer while ``forward`` runs ``batches``."""
    modules = unwrapped(module).named_modules()
    layers = {name: layer for name, layer in modules if isinstance(layer, _BatchNorm) and layer.training}
    if not layers:
        raise ValueError("module: expected batch normalization layers in training mode, got none")
    counters = {name: layer.num_batches_tracked for name, layer in layers.items()}
    new = [name for name, counter in counters.items() if counter is not None and not counter]
    if new:
        warn(f"measure_batch_noise: these layers were never trained, so their running statistics are not those of the "
             f"data; train, or call recalibrate_statistics: {', '.join(new)}", stacklevel=5)  # fmt: skip
    calls: Counter[str] = Counter()
    found: dict[str, _Sums] = {}

    def add(name: str, layer: Any, args: Any, kwargs: Any) -> None:
        input = args[0] if args else kwargs["input"]
        masked = {"mask", "lengths"} & kwargs.keys() or (isinstance(layer, SyncBatchNorm) and is_masked(layer))
        if masked or is_distributed(input):
            raise ValueError(f"module: expected layers without masks or DTensors, got {name!r} with one")
        calls[name] += 1
        name = name if calls[name] == 1 else f"{name}, call {calls[name]}"
        if input.numel():
            sums = _sums_of(input, layer.eps)
            found[name] = found[name] + sums if name in found else sums

    def run(batch: Any) -> None:
        calls.clear()
        forward(batch)

    observe_inputs(module, layers, add, batches, run, training=False)
    return found


def _sums_of(input: Tensor, eps: float) -> _Sums:
    """Returns the sums of one batch (N, C, \\*)."""
    values = (input.detach().cpu() if input.device.type == "mps" else input.detach()).double()  # MPS has no float64
    values = values.flatten(2) if values.dim() > 2 else values.unsqueeze(2)
    center = values.mean((0, 2))
    values = values - center[:, None]
    mean = values.mean(2)
    features = torch.stack([torch.ones_like(mean), mean, values.square().mean(2)], -1)
    total = features.sum(0)
    products = torch.einsum("nci,ncj->cij", features, features), total[:, :, None] * total[:, None] / len(values)
    return _Sums(eps, values.size(2), 1, len(values), center, torch.stack(products))


def _shifted(products: Tensor, shift: Tensor) -> Tensor:
    """Returns ``products`` after adding ``shift`` to all values: m + shift, q + 2 * shift * m + shift**2."""
    change = torch.eye(3, dtype=shift.dtype, device=shift.device).repeat(len(shift), 1, 1)
    change[:, 1, 0], change[:, 2, 0], change[:, 2, 1] = shift, shift.square(), 2 * shift
    return change @ products @ change.mT


def _without_rounding(squares: Tensor, larger: Tensor | float = 1.0) -> Tensor:
    """Replaces values that are rounding errors relative to ``larger`` by zero."""
    return squares.masked_fill(squares <= _ROUNDING * larger, 0)


def _noise_of(name: str, by_rank: list[_Sums]) -> LayerNoise:
    """Returns the noise of a layer, given the sums of each rank."""
    if len({found.center.shape for found in by_rank}) > 1:
        raise ValueError(f"module: expected the same layers on all ranks, got different ones at {name!r}")
    eps, positions, batches, _, _, products = reduce(_Sums.__add__, by_rank)
    count = round(products[0, 0, 0, 0].item())
    if count < 2:
        raise ValueError(f"batches: expected at least two samples, got {count} in {name!r}")
    of_samples, of_batches = _shifted(products, -products[0, :, 0, 1] / count)  # relative to the mean of all samples
    variance = of_samples[:, 0, 2] / count
    scale = variance + eps
    var_of_mean = _without_rounding(of_samples[:, 1, 1] / (count - 1) / scale)
    var_of_var = (of_samples[:, 2, 2] - count * variance.square()) / (count - 1)
    noise = (var_of_mean + _without_rounding(variance * var_of_var / (4 * scale**3))).mean().sqrt().item()
    samples_differ, within = bool(var_of_mean.any()), count - batches
    worth = ((variance / scale).sum() / var_of_mean.sum()).item() if samples_differ else inf
    if batches < 2 or within < 10 or not samples_differ:
        return LayerNoise(name, positions, worth, noise, None, False)
    squares = torch.stack([of_batches[:, 1, 1], (of_samples - of_batches)[:, 1, 1]]) / scale
    mean_squares = squares.sum(1) / torch.tensor([batches - 1, within])
    ratio = torch.divide(*_without_rounding(mean_squares, mean_squares.max())).item()
    a, b = 2 / (9 * (batches - 1)), 2 / (9 * within)
    root = min(ratio, 1 / _ROUNDING) ** (1 / 3)
    normal = ((1 - b) * root - (1 - a)) / sqrt(b * root**2 + a)
    return LayerNoise(name, positions, worth, noise, sqrt(ratio), normal > 4)
