"""Measures the batch noise and gradient error of the network in ``make demo``, for docs/verification.md:

python -m benchmarks.noise docs/pictures/noise.svg
"""

import sys
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.ticker import PercentFormatter
from torch import Tensor, nn

from bagua_syncbn import measure_batch_noise
from bagua_syncbn.verification import BatchNoise

from .svg import COLORS, chart

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_digits import build_model, global_batches, load_data

STEPS = 537  # as in the demo


def trained(steps: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns the demo's network after ``steps`` steps in one process, and its training data."""
    images, _, labels, _ = load_data(0, torch.float64, torch.device("cpu"))
    torch.manual_seed(0)
    model = build_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in islice(global_batches(len(images), 8, 0), steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model, images, labels


def noise(model: nn.Module, images: Tensor) -> BatchNoise:
    return measure_batch_noise(model, (images[batch] for batch in islice(global_batches(len(images), 32, 0), 44)))


def gradient_errors(model: nn.Module, images: Tensor, labels: Tensor, sizes: list[int], steps: int = 60) -> list[float]:
    """Returns the systematic error of the gradient relative to the mean gradient, for each of ``sizes``.

    The error arises because parts of this size are normalized separately instead of all 64 samples together.
    """

    def gradient(batch: Tensor, size: int) -> Tensor:
        losses = [F.cross_entropy(model(images[part]), labels[part]) for part in batch.split(size)]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        return torch.cat([own.flatten() for own in gradients])

    batches = list(islice(global_batches(len(images), 64, 1), steps))
    together = torch.stack([gradient(batch, 64) for batch in batches])
    errors = []
    for size in sizes:
        error = torch.stack([gradient(batch, size) for batch in batches]) - together
        systematic = error.mean(0).square().sum() - error.var(0).sum() / steps  # minus sampling noise
        errors.append((systematic.clamp(min=0).sqrt() / together.mean(0).norm()).item())
    return errors


def draw(found: BatchNoise, path: Path) -> None:
    """Draws each layer's noise for several numbers of samples per rank, and the limit."""
    names = [layer.name for layer in found.layers]
    title = "Batch noise, as a share of the standard deviation"
    with chart(path, title, "layers of the demo", "make demo", 66, 40) as axes:
        for size, color in {2: "sky", 8: "blue", 32: "text"}.items():  # longest bars first, shorter ones on top
            noise = [layer.at(size) for layer in found.layers]
            bars = axes.barh(names, noise, 0.7, color=COLORS[color], label=f"{size} samples per rank")
            if size == 2:
                axes.bar_label(bars, [f"{share:.0%}" for share in noise], padding=4)
        axes.axvline(found.limit, color=COLORS["orange"], linestyle=(0, (4, 3)), label=f"limit: {found.limit:.0%}")
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.margins(x=0.1)
        axes.invert_yaxis()


def main() -> None:
    sizes = [2, 4, 8, 16]
    for steps in (5, 60, 179, STEPS):
        model, images, labels = trained(steps)
        found = noise(model, images)
        worst = max(layer.of_one_sample for layer in found.layers)
        for size, error in zip(sizes, gradient_errors(model, images, labels, sizes), strict=True):
            square = worst**2 * (1 / size - 1 / 64)
            print(
                f"{steps} steps, {size} samples: noise {worst / size**0.5:.0%}, error {error:.1%}, {error / square:.1f}"
            )
    print(found.at(2))
    draw(found, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
