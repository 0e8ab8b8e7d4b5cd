"""Random calls on ranks in threads: matching calls are computed, and the first mismatch raises on all ranks."""

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
    """Returns lists of calls for all ranks, usually different. A call is a kind and the name of a layer.

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
        other = draw.choice([call for call in possible_after(before) if call != after[0]])
        ranks[which] = before + draw.choice([after[1:], [other], [other, *after], [other, *after[1:]]])
    return ranks


def possible_after(calls):
    """Returns the possible next calls."""
    left = Counter()
    for kind, name in calls:
        left[name] += 1 if kind == "forward" else -1
    last = [("backward of last", name) for name in CHANNELS if left[name] > 0]
    first = [("backward of first", name) for name in CHANNELS if left[name] > 1]
    return [("forward", name) for name in "aabc"] + 2 * (last + first) + [ERROR]


def made(calls):
    """Returns ``calls`` with the number of their forward; drops backward passes that have no forward."""
    unfinished, found = {name: [] for name in CHANNELS}, []
    for kind, name in calls:
        if kind == "forward":
            unfinished[name].append(len(found))
            found.append(("forward", name, len(found)))
        elif kind == "error":
            if found and found[-1][0] != "error":  # peers miss errors before the first message, and repeated errors
                found.append(("error", "", -1))
        elif unfinished[name]:
            found.append(("backward", name, unfinished[name].pop(0 if kind == "backward of first" else -1)))
    return found


class Caller:
    """Three layers on a rank."""

    def __init__(self, communicator):
        self.rank, self.size = communicator.rank, communicator.size
        layers = nn.ModuleDict({name: nn.BatchNorm1d(CHANNELS[name]) for name in CHANNELS})
        self.layers, self.forwards = convert_sync_batchnorm(layers, communicator), {}

    def make(self, number, kind, name, forward):
        """Makes a call and compares the result with one process."""
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


def run(calls, communicator):
    """Returns the number of successful ``calls``, and the error in the next call or ""."""
    caller = Caller(communicator)
    for number, call in enumerate(calls):
        try:
            caller.make(number, *call)
        except RuntimeError as error:
            before = len(communicator.sent)
            with pytest.raises(RuntimeError):  # the group has failed permanently
                caller.make(number, "forward", "a", number)
            assert len(communicator.sent) == before
            return number, str(error)
    communicator.leave(f"rank {communicator.rank} has ended")
    return len(calls), ""


def first_difference(programs):
    """Returns the number of the first call that differs between ranks, or else the number of calls."""
    alike = [len(set(calls)) == 1 for calls in zip_longest(*programs)]
    return alike.index(False) if False in alike else len(alike)


@pytest.mark.parametrize("summed", [False, True], ids=["rows", "sums"])
@pytest.mark.parametrize("seeds", [0, 1, *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in range(2, 12))])
def test_ranks_raise_in_the_first_call_that_differs(summed, seeds):
    with patch("bagua_syncbn.communicators.c10d.FEWEST_SUMMED", 2 if summed else 32):
        for seed in range(25 * seeds, 25 * seeds + 25):
            programs = [made(calls) for calls in program(random.Random(seed))]
            ends = run_threads(len(programs), lambda rank, programs=programs: run(programs[rank.rank], rank))
            differ = first_difference(programs)
            for calls, (answered, message) in zip(programs, ends, strict=True):
                # A rank raises in this call, or in the next if it raised an error in this call.
                expected = differ + (calls[differ : differ + 1] == [("error", "", -1)])
                assert answered == min(expected, len(calls)), f"seed {seed}: {programs} {ends}"
                assert (message == "") == (answered == len(calls)), f"seed {seed}: {programs} {ends}"
                assert not re.search("the ranks send|came within", message), f"seed {seed}: {programs} {ends}"
