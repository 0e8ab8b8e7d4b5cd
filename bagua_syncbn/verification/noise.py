"""Batch noise: how far statistics of a batch lie from those of all data, layer by layer."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..checks import is_distributed
from ..extras.masks import is_masked
from ..extras.unchanged import forward_of, observe
from ..models import check_module
from ..sync_batchnorm import SyncBatchNorm
from .ranks import Peers
from .verify import unwrapped

_NAME = "measure_batch_noise"

# Mean squares are differences of sums: below this share of the larger one they are rounding, and count as zero.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class LayerNoise:
    """Batch noise of a layer, the root mean square of its channels."""

    name: str
    """Name in the model; with the number of the call, if it is not the first of a forward pass."""
    positions: int
    """Values of a channel in one sample."""
    worth: float
    """Number of independent values that would determine the mean as well as one sample does.

    inf if all samples have the same mean.
    """
    of_one_sample: float
    """Noise of a batch of one sample."""
    spread: float | None
    """Spread of the means of batches over the spread that their samples explain.

    None if there are too few or all samples have the same mean; inf if only those of each batch have.
    """
    is_mixed: bool
    """Whether ``spread`` is larger than chance explains."""

    def at(self, samples: int) -> float:
        """Returns the noise of a batch of ``samples`` samples."""
        return self.of_one_sample / sqrt(samples)


@dataclass(frozen=True)
class BatchNoise:
    """Result of :func:`measure_batch_noise`, the same on all ranks. As text: a verdict, and a table with bars."""

    layers: tuple[LayerNoise, ...]
    samples: int
    """Samples a rank that the verdict is about."""
    ranks: int
    limit: float
    """Noise above which the verdict is to synchronize."""

    def at(self, samples: int) -> "BatchNoise":
        """Returns the noise, and the verdict, for ``samples`` samples a rank."""
        return replace(self, samples=samples)

    @property
    def verdict(self) -> str:
        """Whether to synchronize, in words."""
        count, over = len(self.layers), sum(layer.at(self.samples) > self.limit for layer in self.layers)
        worst = max(self.layers, key=lambda layer: layer.of_one_sample)
        advice = "synchronize" if over else "no need to synchronize"
        text = (
            f"at {self.samples} sample{'s' * (self.samples > 1)} a rank, batch noise is {worst.at(self.samples):.0%} "
            f"of the deviation in {worst.name!r}: {advice}; over {self.limit:.0%} in {over} of {count} layers"
        )
        mixed = [layer for layer in self.layers if layer.is_mixed]
        if mixed:
            most = max(mixed, key=lambda layer: layer.spread or 0)
            text += (
                f"\nmeans of batches spread {most.spread:.1f} times as far as their samples explain in {most.name!r}, "
                f"and too far in {len(mixed)} of {count} layers: shuffle samples over batches and ranks, or synchronize"
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
    r"""Measures how noisy batch statistics are in each layer of ``module``, to decide whether to synchronize them.

    The noise of a layer is the root mean square change of its normalized values if the statistics of a batch of
    :math:`N` samples replace the statistics of all data. For a channel with mean :math:`\mu` and variance
    :math:`\sigma^2` (plus ``eps``) it is, to first order,

    .. math:: \text{noise}^2 = \frac{1}{N} \left(
        \frac{\operatorname{Var}(m)}{\sigma^2} + \frac{\operatorname{Var}(v)}{4 \sigma^4} \right)

    where :math:`m` is the mean of :math:`x` in one sample and :math:`v` the mean of :math:`(x - \mu)^2`. The first term
    is the error of the batch mean, the second the error of the batch deviation.

    **Correlation within a sample.** With :math:`S` positions and the intraclass correlation :math:`\rho` the variance
    of a batch mean is :math:`\sigma^2 (1 + (S - 1) \rho) / (N S)` (Kish, *Survey Sampling*, 1965: the design effect of
    cluster samples). :math:`\operatorname{Var}(m)` is measured between samples and includes it. A sample is worth
    :math:`\sigma^2 / \operatorname{Var}(m) = S / (1 + (S - 1) \rho)` independent values.

    **Spread.** If samples are shuffled, the mean squares of sample means between batches and within them are equal. If
    their ratio is larger than chance explains (4 standard errors, by Paulson's approximation, 1942), batches or ranks
    have different distributions, which adds to the noise.

    **Limit.** Noise changes the gradient in a random part, which averages out over steps, and in a systematic one,
    which does not and grows with the square of the noise; docs/verification.md has figures.

    The model runs in evaluation mode, in which samples do not influence each other and layers do not communicate. A
    rank may have any number of batches. In one process, each batch stands for the batch of a rank. Parameters, buffers,
    modes and the states of random generators are unchanged afterwards.

    The result holds for the running statistics and parameters of ``module``: train a new model for some steps first. It
    assumes independent samples, which the frames of one video are not. The formula is of first order, so a noise above
    0.5 only means that it is large.

    Args:
        module: the model in training mode, wrapped or not, converted or not. Layers in evaluation mode, such as frozen
            ones, use no batch statistics and are left out.
        batches: batches of this rank, some hundred samples in all, as for :func:`recalibrate_statistics`.
        samples: samples a rank that the verdict is about; None for the number in the largest batch.
        limit: noise above which the verdict is to synchronize.
        forward: called with each batch, runs the model; None for ``module(batch)``, or the first item of a batch.
        device: where each batch goes before ``module`` gets it; None to leave it. Not together with ``forward``.
        process_group: the ranks whose batches count, as for :func:`sync_batch_norm`; None for all of the job.

    Shape:
        - Input of layers: (N, C, \*), samples in the first dimension

    Returns:
        A :class:`~bagua_syncbn.verification.BatchNoise`: as text a verdict and a table by layer, with
        :meth:`~bagua_syncbn.verification.BatchNoise.at` for other sizes.

    Raises:
        TypeError: ``module`` is no module; ``batches`` is no iterable of batches; ``forward`` is not callable.
        ValueError: no layer is in training mode; a layer gets fewer than two samples, a mask or a DTensor; ``samples``
            or ``limit`` is not positive; ``device`` is given together with ``forward``.
        RuntimeError: another rank raised.

    Example::

        >>> noise = bagua_syncbn.measure_batch_noise(model, loader)
        >>> print(noise.at(2).verdict)
        at 2 samples a rank, batch noise is 52% of the deviation in '8': synchronize; over 10% in 2 of 3 layers
    """
    ranks = Peers(_NAME, process_group)

    def measure() -> dict[str, dict[str, Any]]:
        check_module(module)
        if not isinstance(batches, Iterable) or isinstance(batches, Tensor):
            raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}")
        if samples is not None and samples < 1:
            raise ValueError(f"samples: expected a positive number, or None, got {samples}")
        if not limit > 0:
            raise ValueError(f"limit: expected a positive number, got {limit}")
        return _sums(module, batches, forward_of(module, forward, device))

    of_ranks = ranks.together("the batches", measure)
    names = dict.fromkeys(name for own in of_ranks for name in own)
    if not names:
        raise ValueError("batches: expected at least one that reaches a layer, on some rank, got none")
    layers = tuple(_noise_of(name, [own[name] for own in of_ranks if name in own]) for name in names)
    largest = max(found["largest"] for own in of_ranks for found in own.values())
    return BatchNoise(layers, samples or largest, ranks.size, limit)


def _sums(module: nn.Module, batches: Iterable[Any], forward: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    """Returns the sums of all calls of layers while ``forward`` runs ``batches``."""
    modules = unwrapped(module).named_modules()
    layers = {name: own for name, own in modules if isinstance(own, _BatchNorm) and own.training}
    if not layers:
        raise ValueError("module: expected batch normalization layers in training mode, got none")
    new = [name for name, own in layers.items() if own.num_batches_tracked is not None and not own.num_batches_tracked]
    if new:
        warn(f"{_NAME}: these layers have not seen a batch, so their running statistics say nothing about the data; "
             f"train, or call recalibrate_statistics: {', '.join(new)}", stacklevel=5)  # fmt: skip
    calls: Counter[str] = Counter()
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, layer: Any, args: Any, kwargs: Any) -> None:
        input = args[0] if args else kwargs["input"]
        if (
            (isinstance(layer, SyncBatchNorm) and is_masked(layer))
            or {"mask", "lengths"} & kwargs.keys()
            or is_distributed(input)
        ):
            raise ValueError(f"module: expected layers without masks and DTensors, got {name!r} with one")
        calls[name] += 1
        name = name if calls[name] == 1 else f"{name}, call {calls[name]}"
        if input.numel():
            _add(found.setdefault(name, {"eps": layer.eps, "batches": 0, "largest": 0}), input)

    def run(batch: Any) -> None:
        calls.clear()
        forward(batch)

    observe(module, layers, add, batches, run, training=False)
    return found


def _add(found: dict[str, Any], input: Tensor) -> None:
    """Adds a batch (N, C, \\*) to ``found``.

    For each channel, the first of ``sums`` adds up the outer products of (1, m, q) over samples: m is the mean of a
    sample's values and q the mean of their squares, after subtraction of ``center``. The second adds up the outer
    products of each batch's sums, divided by its number of samples.
    """
    input = input.detach().cpu() if input.device.type == "mps" else input.detach()  # which has no float64
    values = input.double().flatten(2) if input.dim() > 2 else input.double().unsqueeze(2)
    if not found["batches"]:
        found["center"] = values.mean((0, 2))
        found["sums"] = values.new_zeros(2, values.size(1), 3, 3)
    values = values - found["center"][:, None]
    mean, square = values.mean(2), values.square().mean(2)
    of_samples = torch.stack([torch.ones_like(mean), mean, square], -1)
    of_batch = of_samples.sum(0)
    products = torch.einsum("nci,ncj->cij", of_samples, of_samples)
    found["sums"] += torch.stack([products, of_batch[:, :, None] * of_batch[:, None] / len(values)])
    found |= {"positions": values.size(2), "batches": found["batches"] + 1}
    found["largest"] = max(found["largest"], len(values))


def _moved(sums: Tensor, by: Tensor) -> Tensor:
    """Returns ``sums`` after the center moved: m becomes m + by, and q becomes q + 2 by m + by**2."""
    change = torch.eye(3, dtype=by.dtype).repeat(len(by), 1, 1)
    change[:, 1, 0], change[:, 2, 0], change[:, 2, 1] = by, by.square(), 2 * by
    return change @ sums @ change.mT


def _without_rounding(squares: Tensor, larger: Tensor | float = 1.0) -> Tensor:
    """Returns ``squares`` with zero in place of those that are rounding beside ``larger``."""
    return squares.masked_fill(squares <= _ROUNDING * larger, 0)


def _noise_of(name: str, of_ranks: list[dict[str, Any]]) -> LayerNoise:
    """Returns the noise of a layer, given what ranks have found."""
    if len({found["center"].shape for found in of_ranks}) > 1:
        raise ValueError(f"module: expected the same layers on all ranks, got others at {name!r}")
    first = of_ranks[0]
    total = sum(_moved(found["sums"], found["center"] - first["center"]) for found in of_ranks)
    assert isinstance(total, Tensor)
    count, batches = round(total[0, 0, 0, 0].item()), sum(found["batches"] for found in of_ranks)
    if count < 2:
        raise ValueError(f"batches: expected at least two samples, got {count} in {name!r}")
    samples, means = _moved(total, -total[0, :, 0, 1] / count)  # around the mean of all
    variance = samples[:, 0, 2] / count
    scale = variance + first["eps"]
    of_mean = _without_rounding(samples[:, 1, 1] / (count - 1) / scale)
    of_variance = (samples[:, 2, 2] - count * variance.square()) / (count - 1)
    noise = (of_mean + _without_rounding(variance * of_variance / (4 * scale**3))).mean().sqrt().item()
    is_spread = bool(of_mean.any())
    worth = ((variance / scale).sum() / of_mean.sum()).item() if is_spread else inf
    within = count - batches
    spread, is_mixed = None, False
    if batches > 1 and within > 9 and is_spread:
        squares = torch.stack([means[:, 1, 1], (samples - means)[:, 1, 1]]) / scale
        between_batches, within_batches = squares.sum(1) / torch.tensor([batches - 1, within])
        most = torch.maximum(between_batches, within_batches)
        ratio = (_without_rounding(between_batches, most) / _without_rounding(within_batches, most)).item()
        a, b = 2 / (9 * (batches - 1)), 2 / (9 * within)
        root = min(ratio, 1 / _ROUNDING) ** (1 / 3)
        normal = ((1 - b) * root - (1 - a)) / sqrt(b * root**2 + a)
        spread, is_mixed = sqrt(ratio), normal > 4
    return LayerNoise(name, first["positions"], worth, noise, spread, is_mixed)
