"""Trains a small convolutional network on scikit-learn's handwritten digits, with synchronized batch normalization.

The same script runs as one process, under torchrun and under Bagua's launcher::

    python examples/train_digits.py
    torchrun --nproc_per_node=4 examples/train_digits.py
    python -m bagua.distributed.launch --nproc_per_node=4 examples/train_digits.py

``--batch-size`` is the global batch size, and the order of the samples depends only on the seed: any number of ranks
trains the same model on the same global batches.
"""

import argparse
import json
import os
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import bagua_syncbn


def join_job() -> torch.device:
    """Joins the launcher's job, if any; returns this rank's device."""
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    use_cuda = torch.cuda.device_count() >= local_size  # NCCL needs a device per rank
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if use_cuda and "BAGUA_SERVICE_PORT" in os.environ:  # set by Bagua's launcher; Bagua needs CUDA
        import bagua.torch_api

        bagua.torch_api.init_process_group()
    elif "RANK" in os.environ:  # set by both launchers
        dist.init_process_group("nccl" if use_cuda else "gloo")
    return device


def load_data(seed: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns train images, test images, train labels and test labels: 1437 and 360 images of 8 by 8 pixels."""
    digits = load_digits()
    images, labels = digits.images[:, None] / 16, digits.target
    parts = train_test_split(images, labels, test_size=0.2, random_state=seed, stratify=labels)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part).to(device) for part in parts)
    return x_train.to(dtype), x_test.to(dtype), y_train, y_test


def build_model() -> nn.Module:
    def block(in_channels: int, out_channels: int) -> list[nn.Module]:
        convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]

    features = [*block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 64), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(64, 10))


def global_batches(samples: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yields the indices of global batches forever, equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        shuffled = torch.randperm(samples, generator=generator)
        yield from shuffled[: samples - samples % batch_size].split(batch_size)


def mean_over_ranks(loss: Tensor, group: "dist.ProcessGroup | None") -> float:
    mean = loss.detach().clone()
    if group is not None:
        dist.all_reduce(mean, group=group)
        mean /= group.size()
    return mean.item()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return (model(images).argmax(1) == labels).double().mean().item()


DTYPE_HELP = "for parameters and images; Bagua on CUDA has no float64 gradients (default: %(default)s)"


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--sync", action=argparse.BooleanOptionalAction, default=True, help="synchronize the layers")
    parser.add_argument("--batch-size", type=int, default=8, help="global batch size (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, help="instead of --epochs")
    parser.add_argument("--lr", type=float, default=0.05, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help=DTYPE_HELP)
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="file for losses and test accuracy")
    return parser.parse_args()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args = parse_args(parser)
    device, dtype = join_job(), getattr(torch, args.dtype)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x_train, x_test, y_train, y_test = load_data(args.seed, dtype, device)
    steps = args.epochs * (len(x_train) // max(args.batch_size, 1)) if args.steps is None else args.steps
    # With equal shares, the mean of the ranks' losses is the mean over the global batch.
    if args.batch_size not in range(size, len(x_train) + 1, size):
        expected = f"a multiple of {size}, the number of ranks, up to {len(x_train)}, the number of images"
        parser.error(f"--batch-size: expected {expected}, got {args.batch_size}")
    if steps < 1:
        parser.error(f"--epochs, --steps: expected at least one step, got {steps}")

    torch.manual_seed(args.seed)
    model = build_model().to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    if args.sync:
        model = bagua_syncbn.convert_sync_batchnorm(model)
    else:
        warnings.filterwarnings("ignore", "with_bagua: found no synchronized layer")
    # Adds the data parallelism of Bagua or torch, depending on the job; none in a single process.
    model = bagua_syncbn.with_bagua(model, [optimizer])

    # Losses use a separate group. Torch's data parallelism never frees the default group: if one of its threads drops a
    # Python tensor during interpreter exit, the process aborts.
    loss_group = dist.new_group() if dist.is_initialized() else None
    batches = islice(global_batches(len(x_train), args.batch_size, args.seed), steps)
    losses = []
    progress = tqdm(batches, total=steps, unit="step", disable=rank != 0)
    for batch in progress:
        mine = batch.chunk(size)[rank].to(device)  # this rank's share of the global batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_train[mine]), y_train[mine])
        loss.backward()  # averages the gradients over the ranks
        optimizer.step()
        losses.append(mean_over_ranks(loss, loss_group))
        progress.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)

    if rank == 0:
        # Evaluation does not communicate, so a single rank can run it. With --no-sync, ranks have different running
        # statistics, and checkpoints usually contain those of rank 0.
        test_accuracy = accuracy(model, x_test, y_test)
        print(f"final loss {losses[-1]:.4f}, test accuracy {test_accuracy:.2%}")
        if args.output:
            args.output.write_text(json.dumps({"losses": losses, "test_accuracy": test_accuracy}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
