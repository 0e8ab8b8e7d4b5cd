"""Section training: a small residual network on scikit-learn's digits, data parallel, with each peer's layers.

Global batches, initial parameters and optimizer do not depend on the number of ranks. Peers take turns (a few steps
each) and are timed separately.
"""

import time
import warnings
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..machine import count_cores
from ..peers import Maker
from ..recorded import Case, Results, marked, of_section, quartiles, table
from ..timing import digits, start_together

BATCH_SIZE = 64  # total over all ranks
BOUT = 10  # consecutive steps of a peer
BOUTS = 15


class Block(nn.Module):
    """Two convolutions and a shortcut, as in a ResNet."""

    def __init__(self, make: Maker, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            make(channels, 4),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            make(channels, 4),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            convolution = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, make(channels, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def make_network(make: Maker) -> nn.Module:
    """Returns a ResNet for images of 8 by 8 pixels: six blocks, 15 batch normalizations, 0.18 million parameters."""
    blocks, channels_in = [], 16
    for channels in (16, 32, 64):
        for stride in (1 if channels == 16 else 2, 1):
            blocks.append(Block(make, channels_in, channels, stride))
            channels_in = channels
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), make(16, 4), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Trainer:
    """A network, its optimizer and step times."""

    def __init__(self, make: Maker, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self._model: nn.Module = make_network(make).to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9)
        if dist.get_world_size() > 1:
            # No buffer broadcast: synchronized buffers are already equal, and it would slow down the unsynchronized
            # layer.
            with warnings.catch_warnings():
                # torch 2.13 renamed the option; the new one would broadcast once.
                warnings.simplefilter("ignore", FutureWarning)
                self._model = nn.parallel.DistributedDataParallel(self._model, broadcast_buffers=False)
        self.seconds: list[float] = []

    def train(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Trains a step on each of this rank's batches, and appends the mean times over ranks."""
        seconds = []
        start_together()
        for images, labels in batches:
            start = time.perf_counter()
            self._optimizer.zero_grad()
            loss = F.cross_entropy(self._model(images), labels)
            loss.backward()
            self._optimizer.step()
            if loss.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        measured = torch.tensor(seconds, device=loss.device)
        dist.all_reduce(measured)
        self.seconds += (measured / dist.get_world_size()).tolist()


def load_batches(seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's shares of global batches, endlessly."""
    from sklearn.datasets import load_digits  # only this section needs it

    data = load_digits()
    images = torch.from_numpy(data.images[:, None] / 16).float().to(device)
    labels = torch.from_numpy(data.target).to(device)
    generator = torch.Generator().manual_seed(seed)
    while True:
        shuffled = torch.randperm(len(images), generator=generator)
        for batch in shuffled[: len(images) - len(images) % BATCH_SIZE].split(BATCH_SIZE):
            mine = batch.chunk(dist.get_world_size())[dist.get_rank()].to(device)
            yield images[mine], labels[mine]


def cases(job: dict[str, Any], world_size: int) -> list[tuple[int]]:
    """Returns the training seeds: only one if ranks share cores, because steps take longer."""
    if job["quick"]:
        return [(0,)] if world_size <= 2 else []
    return [(0,), (1,), (2,)] if world_size <= count_cores() else [(0,)]


def measure(seed: int, job: dict[str, Any], makers: dict[str, Maker], device: torch.device) -> Case:
    torch.set_num_threads(1)
    trainers = {name: Trainer(make, seed, device) for name, make in makers.items()}
    batches = {name: load_batches(seed, device) for name in makers}
    # Warms up shared state, so that the first peer is not slower.
    Trainer(makers["local"], seed, device).train([next(load_batches(seed, device)) for _ in range(3)])
    for turn in range(BOUTS):
        for name in list(trainers)[:: (-1) ** turn]:
            trainers[name].train([next(batches[name]) for _ in range(BOUT)])
    return {
        "seed": seed,
        "milliseconds": {name: [digits(1e3 * value) for value in t.seconds] for name, t in trainers.items()},
    }


def step_times(results: Results) -> dict[int, dict[str, list[float]]]:
    """Returns the times of all steps with all seeds in milliseconds, by number of ranks and peer."""
    times: dict[int, dict[str, list[float]]] = {}
    for case in of_section(results, "training"):
        for name, values in case["milliseconds"].items():
            times.setdefault(case["ranks"], {}).setdefault(name, []).extend(values)
    return times


def training_table(results: Results) -> str:
    """Training on digits: time of a step, relative to unsynchronized layers, with quartiles."""
    times = step_times(results)
    names = [name for name in dict.fromkeys(name for own in times.values() for name in own) if name != "local"]

    def step(ranks: int, name: str) -> str:
        low, middle, high = (time / median(times[ranks]["local"]) for time in quartiles(times[ranks][name]))
        return f"{middle:.2f} ({low:.2f}-{high:.2f})"

    def row(ranks: int) -> list[str]:
        return [marked(ranks, results), *(step(ranks, name) for name in names)]

    return table(["ranks", *names], map(row, times))


TABLES = {"training": training_table}
