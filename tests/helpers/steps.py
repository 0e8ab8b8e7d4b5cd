"""Steps of any model, and the training of a model, compared between ranks and one process."""

import io
import random
from contextlib import contextmanager

import numpy
import torch
import torch.distributed as dist
from torch import nn

STEPS = 5  # number of steps that `train` takes


def draw(*size, seed=0, dtype=torch.float64):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def step(model, input, grad_output=None, *, order=1, call=None):
    """Runs ``model``, or ``call`` with its layers, forward and backward; returns all results by name.

    ``grad_output`` is a tensor, a function of the output, or None for a random tensor. ``order`` 2 differentiates the
    squared input gradient instead of the output.
    """
    for parameter in model.parameters():
        parameter.grad = None
    input = input.detach().clone().requires_grad_()
    output = (model if call is None else call)(input)
    if grad_output is None:
        grad_output = draw(*output.shape, seed=2)
    elif callable(grad_output):
        grad_output = grad_output(output.detach())
    grad_output = grad_output.to(output)
    if order == 2:
        (grad,) = torch.autograd.grad(output, input, grad_output, create_graph=True)
        grad.square().sum().backward()
    else:
        output.backward(grad_output)
    results = {"output": output, "input.grad": input.grad}
    results |= {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    return {name: None if value is None else value.detach() for name, value in results.items()} | {
        name: buffer.clone() for name, buffer in model.named_buffers()
    }


def assert_same_bits(actual, expected, what="results"):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def _facts(model, may_change):
    parts = [
        (sorted(vars(part)), part.training, list(part._forward_pre_hooks), list(part._forward_hooks), str(part))
        for part in model.modules()
    ]
    gradients = [None if parameter.grad is None else parameter.grad.tolist() for parameter in model.parameters()]
    state = {name: repr(value.tolist()) for name, value in model.state_dict().items()}  # NaN does not equal itself
    fixed = {name: value for name, value in state.items() if may_change is None or may_change not in name}
    return parts, gradients, fixed, list(map(id, model.buffers()))


@contextmanager
def unchanged(*models, may_change=None):
    """Checks that models keep modes, attributes, hooks, gradients and tensors, and that no random state changes.

    Tensors may change if ``may_change`` is a part of their name.
    """

    def facts():
        random_states = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
        return [_facts(model, may_change) for model in models], random_states

    before = facts()
    yield
    assert facts() == before


def gathered(value):
    """Returns the value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_ranks(model, plain, input, grad_output, splits, tolerance=1e-9, reference=None, **options):
    """Compares a step of ``model`` on this rank's share with ``reference``, or ``plain``, on the whole batch."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    own_grad_output = grad_output if callable(grad_output) else grad_output.split(splits)[rank]
    actual = step(model, input.split(splits)[rank], own_grad_output, **options)
    expected_step = step(plain, input, grad_output, call=reference)
    for (name, value), expected in zip(actual.items(), expected_step.values(), strict=True):
        if name in ("output", "input.grad"):
            expected = expected.split(splits)[rank]
        elif name.endswith(".grad") and value is not None and len(splits) > 1:
            dist.all_reduce(value)
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(value, expected, **close, msg=lambda text, name=name: f"{name}: {text}")


def through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# Training


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


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch_of(number, sizes, rank, like):
    """Returns this rank's share of input and target in a step, with dtype and device of ``like``."""
    drawn = draw(sum(sizes), 3, 8, 8, seed=number), draw(sum(sizes), 5, seed=STEPS + number)
    return [whole.split(sizes)[rank].to(like) for whole in drawn]


def take_step(model, optimizer, input, target, sizes):
    """Trains on this rank's share. Wrappers average gradients to the whole batch's gradient."""
    optimizer.zero_grad()
    loss = (model(input) - target).square().sum() * len(sizes) / sum(sizes)
    loss.backward()
    optimizer.step()


def train(model, optimizer, sizes, rank, steps=STEPS):
    """Trains on this rank's share; returns the state."""
    for number in range(steps):
        take_step(model, optimizer, *batch_of(number, sizes, rank, next(model.parameters())), sizes)
    return model.state_dict()


def check_training(states, sizes, prefix="", tolerance=1e-9, steps=STEPS):
    """Compares the states of all ranks after :func:`train` with one process."""
    model = make_model()
    expected = train(model, make_optimizer(model), (sum(sizes),), 0, steps)
    for state in states:
        assert state.keys() == {prefix + name for name in expected}
        for name, value in expected.items():
            error = (state[prefix + name] - value).abs().max()
            assert error < tolerance, f"{name} is off by {error:.1e}"
