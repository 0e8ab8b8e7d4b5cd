"""Batch noise: the error of batch statistics relative to the statistics of all data, per layer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, sqrt
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._errors import restored
from .._groups import ProcessGroupLike
from .._step.checks import check_number, is_distributed
from .._warnings import warn
from ..conversion.dry_run import batch_loop, dry_run
from ..statistics.masked import is_masked
from ..sync_batchnorm import SyncBatchNorm
from .ranks import Peers
from .verify import inner_model


@dataclass(frozen=True)
class LayerNoise:
    """Batch noise of a layer: the root mean square over its channels."""

    name: str
    positions: int
    """Values per channel in each sample."""
    worth: float
    """Effective number of independent values per sample; inf if all samples have equal means."""
    of_one_sample: float
    """Noise of a batch with a single sample."""

    def at(self, samples: int) -> float:
        """Returns the noise of a batch of ``samples`` samples."""
        _check_samples(samples)
        return self.of_one_sample / sqrt(samples)


@dataclass(frozen=True)
class BatchNoise:
    """Result of :func:`~bagua_syncbn.measure_batch_noise`, equal on all ranks.

    ``str`` returns the verdict and a table.
    """

    layers: tuple[LayerNoise, ...]
    samples: int
    """Samples per rank that the verdict assumes."""
    ranks: int
    limit: float
    """The verdict is to synchronize if the noise exceeds this limit."""

    def __post_init__(self) -> None:
        _check_samples(self.samples)

    def at(self, samples: int) -> "BatchNoise":
        """Returns the result for ``samples`` samples per rank."""
        return replace(self, samples=samples)

    @property
    def verdict(self) -> str:
        """Advice on whether to synchronize."""
        count, over = len(self.layers), sum(layer.at(self.samples) > self.limit for layer in self.layers)
        worst = max(self.layers, key=lambda layer: layer.of_one_sample)
        return (
            f"at {self.samples} sample{'s' * (self.samples > 1)} per rank, batch noise is "
            f"{worst.at(self.samples):.0%} of the standard deviation in {worst.name!r}: "
            f"{'synchronize' if over else 'no need to synchronize'}; above {self.limit:.0%} in {over} of {count} layers"
        )

    def __str__(self) -> str:
        sizes = sorted({2, 8, 32, self.samples, self.samples * self.ranks})
        width = max(len(name) for name in ("layer", *(layer.name for layer in self.layers)))
        lines = [self.verdict, f"{'layer':{width}}  values   worth" + "".join(f"{f'at {size}':>8}" for size in sizes)]
        for layer in self.layers:
            noise = "".join(f"{layer.at(size):8.0%}" for size in sizes)
            lines.append(f"{layer.name:{width}}  {layer.positions:6}  {layer.worth:6.1f}{noise}")
        return "\n".join(lines)


def measure_batch_noise(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    samples: int | None = None,
    limit: float = 0.05,
    forward: Callable[[Any], Any] | None = None,
    device: torch.device | str | int | None = None,
    process_group: ProcessGroupLike = None,
) -> BatchNoise:
    r"""Measures the noise of batch statistics in each layer, to decide whether to synchronize them.

    Noise is the root mean square change of normalized values when the statistics of :math:`N` samples replace the
    statistics of all data. For a channel with mean :math:`\mu` and variance :math:`\sigma^2` (far above ``eps``),

    .. math:: \text{noise}^2 = \frac{1}{N} \left(
        \frac{\operatorname{Var}(m)}{\sigma^2} + \frac{\operatorname{Var}(v)}{4 \sigma^4} \right)

    where :math:`m` and :math:`v` are the means of :math:`x` and :math:`(x - \mu)^2` in a sample. This is a first-order
    approximation: a result above 0.5 only means that the noise is large. A sample is worth
    :math:`\sigma^2 / \operatorname{Var}(m) = S / (1 + (S - 1) \rho)` independent values if its :math:`S` positions have
    correlation :math:`\rho` (Kish, *Survey Sampling*, 1965). Samples must be independent and shuffled, unlike video
    frames. Repeated calls of a layer count as more samples.

    The model runs in evaluation mode, without communication. Parameters, buffers, modes and random states do not
    change. Tensors in plain attributes are not restored if forward writes to them, even if they share memory with a
    buffer. Ranks may have different numbers of batches. Train a new model for some steps first: noise depends on
    parameters and running statistics.

    Args:
        module: the model in training mode, wrapped or not, converted or not. Layers in evaluation mode are skipped.
        samples: samples per rank that the verdict assumes; None for the size of the largest batch.
        limit: the verdict is to synchronize if the noise exceeds this limit.
        batches: as for :func:`recalibrate_statistics`. A few hundred samples in total are enough; each takes 16 bytes
            per channel.
        forward, device: as for :func:`recalibrate_statistics`.
        process_group: the ranks that take part, as for :func:`sync_group`; None for the whole job.

    Raises:
        TypeError: ``module`` is not a module, ``batches`` not an iterable of batches, ``forward`` not callable with
            a batch, ``samples`` not an int, ``limit`` not a number, or ``device`` not a device; ``process_group`` has
            an unsupported type.
        ValueError: ``samples`` is below 1; ``limit`` is negative or not finite; no layer is in training mode; a layer
            gets fewer than two samples, a mask or a DTensor; both ``device`` and ``forward`` are given;
            ``process_group`` does not fit the job.
        RuntimeError: another rank raised, or makes another call; ``WORLD_SIZE`` is above 1, but no process group was
            initialized.

    Warns if a layer has never updated its running statistics.

    Example::

        >>> noise = bagua_syncbn.measure_batch_noise(model, loader)
        >>> print(noise.at(2).verdict)
        at 2 samples per rank, batch noise is 52% of the standard deviation in '8': synchronize; above 5% in 3 of 3 ...
    """
    ranks = Peers("measure_batch_noise", module, process_group)
    ranks.run("the check of arguments", lambda: _check(samples, limit))
    by_rank = ranks.gather(ranks.run("the batches", lambda: _observe(module, batches, forward, device)))
    names = dict.fromkeys(name for own in by_rank for name in own)
    found = {name: [input for own in by_rank for input in own.get(name, [])] for name in names}
    if not found:
        raise ValueError("batches: expected a non-empty batch on some rank, got no input to any layer")
    largest = max(len(features) for inputs in found.values() for features, *_ in inputs)
    layers = tuple(_noise(name, inputs) for name, inputs in found.items())
    return BatchNoise(layers, largest if samples is None else samples, ranks.size, limit)


def _check(samples: Any, limit: Any) -> None:
    if samples is not None:
        _check_samples(samples)
    check_number("limit", limit)
    if not 0 <= limit < inf:
        raise ValueError(f"limit: expected a finite number of at least 0, got {limit}")


def _check_samples(samples: Any) -> None:
    if not isinstance(samples, Integral) or isinstance(samples, bool):
        raise TypeError(f"samples: expected an int, got {type(samples).__name__}")
    if samples < 1:
        raise ValueError(f"samples: expected at least 1, got {samples}")


# Each sample's means of values and of squared values (N, C, 2); positions and eps as in the formula.
_Input: TypeAlias = tuple[Tensor, int, float]


def _observe(module: nn.Module, batches: Iterable[Any], forward: object, device: Any) -> dict[str, list[_Input]]:
    """Returns the inputs of each layer."""
    run = batch_loop(module, batches, forward, device)
    modules = inner_model(module).named_modules()
    layers: dict[str, Any] = {name: part for name, part in modules if isinstance(part, _BatchNorm) and part.training}
    if not layers:
        raise ValueError("module: expected batch normalization layers in training mode, got none")
    new = [name for name, layer in layers.items() if layer.num_batches_tracked == 0]
    if new:
        warn(f"measure_batch_noise: layers with untrained running statistics: {', '.join(new)}; train for some steps, "
             "or call recalibrate_statistics")  # fmt: skip
    found: dict[str, list[_Input]] = {}

    def add(name: str, layer: Any, args: Any, kwargs: Any) -> None:
        input = args[0] if args else kwargs["input"]
        masked = "mask" in kwargs or (isinstance(layer, SyncBatchNorm) and is_masked(layer))
        if masked or is_distributed(input):
            raise ValueError(f"module: expected layers without masks or DTensors, got {name!r} with one")
        if input.numel():
            values = (input.cpu() if input.device.type == "mps" else input).double()  # no float64 on MPS
            values = values.reshape(*values.shape[:2], -1)
            features = torch.stack([values.mean(2), values.square().mean(2)], -1).cpu()
            found.setdefault(name, []).append((features, values.size(2), layer.eps))

    hooks: list[Any] = []
    with dry_run(module), restored(lambda: [hook.remove() for hook in hooks]):
        for name, layer in layers.items():
            hooks.append(layer.register_forward_pre_hook(partial(add, name), with_kwargs=True))
        run()
    return found


def _noise(name: str, inputs: list[_Input]) -> LayerNoise:
    means, squares = torch.cat([features for features, *_ in inputs]).unbind(-1)
    if len(means) < 2:
        raise ValueError(f"batches: expected at least two samples, got {len(means)} in {name!r}")
    mean = means.mean(0)
    variances = squares - 2 * mean * means + mean.square()  # each sample's mean of (x - mean)^2
    variance, (_, positions, eps) = variances.mean(0), inputs[0]
    scale = variance + eps
    terms = means.var(0) / scale, variance * variances.var(0) / (4 * scale**3)
    of_mean, of_var = (term.where(term > 1e-12, 0) for term in terms)  # smaller terms are rounding errors
    worth = ((variance / scale).sum() / of_mean.sum()).item() if of_mean.any() else inf
    return LayerNoise(name, positions, worth, (of_mean + of_var).mean().sqrt().item())
