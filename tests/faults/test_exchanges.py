"""Random programs on ranks in threads: equal actions are computed, and the first mismatch raises on all ranks."""

import random
import re
from collections import Counter
from contextlib import suppress
from itertools import zip_longest
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bagua_syncbn import convert_sync_batchnorm
from tests.helpers.threads import run_threads

CHANNELS = {"a": 3, "b": 3, "c": 5}
ERROR = "error", ""  # an error that the rank catches


def program(draw):
    """Returns lists of actions for all ranks, usually different. An action is a kind and the name of a layer.

    "backward of first" is the backward pass of the layer's first unfinished forward.
    """
    step = []
    for _ in range(draw.randint(2, 6)):
        step.append(draw.choice(possible_after(step)))
    base = step * draw.randint(1, 4) + draw.choice([[], [ERROR, *step]])
    ranks = [base] * draw.randint(2, 4)
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        which, place = draw.randrange(len(ranks)), draw.randrange(len(base))
        before, after = base[:place], base[place:]
        other = draw.choice([action for action in possible_after(before) if action != after[0]])
        ranks[which] = before + draw.choice([after[1:], [other], [other, *after], [other, *after[1:]]])
    return ranks


def possible_after(actions):
    """Returns the possible next actions."""
    left = Counter()
    for kind, name in actions:
        left[name] += 1 if kind == "forward" else -1
    last = [("backward of last", name) for name in CHANNELS if left[name] > 0]
    first = [("backward of first", name) for name in CHANNELS if left[name] > 1]
    return [("forward", name) for name in "aabc"] + 2 * (last + first) + [ERROR]


def numbered(actions):
    """Returns ``actions`` with the number of their forward.

    Drops actions that send nothing: backward passes without a forward, errors before the first message, and errors
    after an error.
    """
    unfinished, found = {name: [] for name in CHANNELS}, []
    for kind, name in actions:
        if kind == "forward":
            unfinished[name].append(len(found))
            found.append(("forward", name, len(found)))
        elif kind == "error":
            if found and found[-1][0] != "error":
                found.append(("error", "", -1))
        elif unfinished[name]:
            found.append(("backward", name, unfinished[name].pop(0 if kind == "backward of first" else -1)))
    return found


class Trainer:
    """Three layers on a rank."""

    def __init__(self, communicator):
        self.rank, self.size = communicator.rank, communicator.size
        layers = nn.ModuleDict({name: nn.BatchNorm1d(CHANNELS[name]) for name in CHANNELS})
        self.layers, self.forwards = convert_sync_batchnorm(layers, communicator), {}

    def act(self, number, kind, name, forward):
        """Takes an action and compares the result with one process."""
        layer, own = self.layers[name or "a"], slice(2 * self.rank, 2 * self.rank + 2)
        whole = torch.randn(2 * self.size, layer.num_features, generator=torch.Generator().manual_seed(number))
        if kind == "error":
            with suppress(TypeError):
                layer(whole.long())
        elif kind == "forward":
            whole, input = whole.requires_grad_(), whole[own].detach().requires_grad_()
            self.forwards[number] = whole, F.batch_norm(whole, None, None, training=True), input, layer(input)
            torch.testing.assert_close(self.forwards[number][3], self.forwards[number][1][own])
        else:
            batch, expected, input, output = self.forwards[forward]
            (grad,) = torch.autograd.grad(output, input, whole[own])
            torch.testing.assert_close(grad, torch.autograd.grad(expected, batch, whole)[0][own])


def run(actions, communicator):
    """Returns the number of successful ``actions``, and the error in the next action or ""."""
    trainer = Trainer(communicator)
    for number, action in enumerate(actions):
        try:
            trainer.act(number, *action)
        except RuntimeError as error:
            before = len(communicator.sent)
            with pytest.raises(RuntimeError):  # the group has failed permanently
                trainer.act(number, "forward", "a", number)
            assert len(communicator.sent) == before
            return number, str(error)
    communicator.leave(f"rank {communicator.rank} has ended")
    return len(actions), ""


def first_difference(programs):
    """Returns the number of the first action that differs between ranks, or else the number of actions."""
    alike = [len(set(actions)) == 1 for actions in zip_longest(*programs)]
    return alike.index(False) if False in alike else len(alike)


@pytest.mark.parametrize("summed", [False, True], ids=["rows", "sums"])
@pytest.mark.parametrize("seeds", [0, 1, *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in range(2, 12))])
def test_ranks_raise_at_the_first_action_that_differs(summed, seeds):
    with patch("bagua_syncbn.communicators.c10d.FEWEST_SUMMED", 2 if summed else 32):
        for seed in range(25 * seeds, 25 * seeds + 25):
            programs = [numbered(actions) for actions in program(random.Random(seed))]
            ends = run_threads(len(programs), lambda rank, programs=programs: run(programs[rank.rank], rank))
            differ = first_difference(programs)
            for actions, (answered, message) in zip(programs, ends, strict=True):
                # A rank raises in this action, or in the next if this action is an error.
                expected = differ + (actions[differ : differ + 1] == [("error", "", -1)])
                assert answered == min(expected, len(actions)), f"seed {seed}: {programs} {ends}"
                assert (message == "") == (answered == len(actions)), f"seed {seed}: {programs} {ends}"
                assert not re.search("the ranks send|came within", message), f"seed {seed}: {programs} {ends}"
