"""Replicas on CPU, in a single process.

Trains the network of ``train_digits.py`` twice on the same batches, as one model and in synchronized replicas, and
prints the largest difference::

    python examples/data_parallel_cpu.py --replicas 4
    python examples/data_parallel_cpu.py --replicas 4 --unsynchronized
"""

import argparse
import copy
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from train_digits import build_model, global_batches, load_data

from bagua_syncbn.data_parallel import DataParallelWithCallback, convert_model


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=61, help="for all replicas in total")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unsynchronized", action="store_true", help="do not convert the layers")
    return parser.parse_args(argv)


def largest_difference(first: nn.Module, second: nn.Module) -> float:
    states = first.state_dict().values(), second.state_dict().values()
    return max((a - b).abs().max().item() for a, b in zip(*states, strict=True))


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.manual_seed(args.seed)
    # float64, so that rounding does not hide differences between the methods.
    x_train, _, y_train, _ = load_data(args.seed, torch.float64, torch.device("cpu"))
    whole = build_model().double()
    split = copy.deepcopy(whole)
    if not args.unsynchronized:
        split = convert_model(split)
    calls = {"one model": whole, f"{args.replicas} replicas": DataParallelWithCallback(split, ["cpu"] * args.replicas)}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (whole, split)]

    batches = global_batches(len(x_train), args.batch_size, args.seed)
    for step, batch in enumerate(islice(batches, args.steps), start=1):
        losses = []
        for model, optimizer in zip(calls.values(), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x_train[batch]), y_train[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if step in (1, 10) or step == args.steps:
            print(
                f"step {step:3}  " + "  ".join(f"{name} {loss:.6f}" for name, loss in zip(calls, losses, strict=True))
            )
    print(f"largest difference of a parameter or a running statistic: {largest_difference(whole, split):.1e}")


if __name__ == "__main__":
    main()
