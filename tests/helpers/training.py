"""Training of a model on ranks and, on the whole batch, in a single process."""

import io

import torch
from torch import nn

STEPS = 5


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(4 * 16, 5),
        nn.BatchNorm1d(5),
    ).double()


def make_batches(size):
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield (
            torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64),
            torch.randn(size, 5, generator=generator, dtype=torch.float64),
        )


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(model, optimizer, sizes, rank):
    """Trains on this rank's share, a step per item. DDP averages gradients to the whole batch's gradient."""
    for batch in make_batches(sum(sizes)):
        input, target = (part.split(sizes)[rank].to(next(model.parameters()).dtype) for part in batch)
        loss = (model(input) - target).square().sum() * len(sizes) / sum(sizes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def train(model, optimizer, sizes, rank):
    """Returns the state after all steps."""
    for _ in steps(model, optimizer, sizes, rank):
        pass
    return model.state_dict()


def one_process(sizes):
    model = make_model()
    return train(model, make_optimizer(model), (sum(sizes),), 0)


def check(states, sizes, prefix="", tolerance=1e-9):
    expected = one_process(sizes)
    for rank, state in enumerate(states):
        assert set(state) == {prefix + name for name in expected}
        for name, value in expected.items():
            error = (state[prefix + name] - value).abs().max()
            assert error < tolerance, f"{name} of rank {rank} is off by {error:.1e}"


def through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
