"""Exchanges on rows of statistics, without models, over ranks that are threads.

No rank takes the message of another call for that of its own: ranks do the calls that all of them make, and raise in
the first one that they do not make together.
"""

import random
import re
from itertools import zip_longest
from unittest.mock import patch

import pytest
import torch
from torch import nn

from bagua_syncbn import ops
from bagua_syncbn.errors import notify_peers
from bagua_syncbn.layer_state import LayerState
from bagua_syncbn.names import ConvertedModel, Origin
from bagua_syncbn.options import Options
from bagua_syncbn.step.call import Call
from bagua_syncbn.step.exchange import exchange_of
from tests.helpers.threads import run_threads

CHANNELS = {"a": 3, "b": 3, "c": 5}
FIRST = {"a": "1", "b": "2", "c": "3"}
NAMES = {first: name for name, first in FIRST.items()}
OPTIONS = Options()


def program(draw):
    """Returns a string of calls for each rank, which most times differ.

    ``a``, ``b`` and ``c`` are forwards; ``A`` is the backward of the last ``a`` without one, ``1`` that of the first,
    and so on; ``!`` is an error that the rank catches.
    """
    step = ""
    for _ in range(draw.randint(2, 6)):
        step += draw.choice(possible_after(step))
    base = step * draw.randint(1, 4) + draw.choice(["", "!" + step])
    ranks = [base] * draw.randint(2, 4)
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        which, place = draw.randrange(len(ranks)), draw.randrange(len(base))
        before, after = base[:place], base[place:]
        other = draw.choice(possible_after(before).replace(after[0], ""))
        ranks[which] = before + draw.choice([after[1:], other, other + after, other + after[1:]])
    return ranks


def possible_after(calls):
    """Returns the calls that can follow: no backward of nothing, and no second one that is the same."""
    left = {name: calls.count(name) - calls.count(name.upper()) - calls.count(first) for name, first in FIRST.items()}
    last = "".join(name.upper() for name, number in left.items() if number > 0)
    first = "".join(FIRST[name] for name, number in left.items() if number > 1)
    return "aabc" + 2 * (last + first) + "!"


def made(calls):
    """Returns ``calls`` without the backward passes of nothing, each with the number of the forward that it follows."""
    open_calls, found = {name: [] for name in CHANNELS}, []
    for call in calls:
        name = NAMES.get(call, call.lower())
        if call.islower():
            open_calls[name].append(len(found))
            found.append((call, len(found)))
        elif call == "!":
            if found and found[-1] != ("!", -1):  # nobody is told before the first message; errors in a row are one
                found.append(("!", -1))
        elif open_calls[name]:
            found.append((name.upper(), open_calls[name].pop(0 if call.isdigit() else -1)))
    return found


def value(rank, number):
    return float(rank + 1 + 10 * number)


class Caller:
    """A rank that makes calls of three layers."""

    def __init__(self, communicator):
        self.communicator, self.forwards = communicator, {}
        model = ConvertedModel("Net")
        self.layers = {name: nn.Identity() for name in CHANNELS}
        for name, layer in self.layers.items():
            layer._sync_state = LayerState(origin=Origin(name, model))

    def make(self, number, call, of):
        """Makes a call, and checks the answer."""
        rank, size = self.communicator.rank, self.communicator.size
        if call == "!":
            notify_peers(self.communicator, self.layers["a"], ValueError("its own"))
            return
        mean_of_all = sum(value(other, number) for other in range(size)) / size
        x = torch.full((2, CHANNELS[call.lower()]), value(rank, number))
        if call.islower():
            made = Call(x, None, None, None, ops.NO_BUFFERS, OPTIONS, True, None, self.layers[call])
            exchange = exchange_of(made, OPTIONS, self.communicator)()
            row = ops.batch_norm_stats(x, *exchange.header, None, exchange.uses_sums)
            received = exchange.gather(row)
            rows = received.message
            mean, invstd, count = ops.merge_stats(rows, ops.NO_BUFFERS, OPTIONS, *received[1:])
            exchange.check(rows)
            torch.testing.assert_close(mean, torch.full_like(mean, mean_of_all))
            self.forwards[number] = exchange, mean, invstd, count
        else:
            exchange, mean, invstd, count = self.forwards[of]
            sums, *_ = ops.batch_norm_backward_reduce(x, x, mean, invstd, None, exchange.fingerprint())
            sums, *headers = exchange.sum(sums)
            ops.batch_norm_backward_elemt(x, x, None, mean, invstd, sums, count, *headers)
            exchange.check()
            torch.testing.assert_close(sums[: x.size(1)], torch.full_like(mean, 2 * size * mean_of_all))


def run(calls, communicator):
    """Returns how many ``calls`` were answered, and the error that ended them, or ""."""
    caller = Caller(communicator)
    for number, call in enumerate(calls):
        try:
            caller.make(number, *call)
        except RuntimeError as error:
            before = len(communicator.sent)
            with pytest.raises(RuntimeError):  # the group has failed for good
                caller.make(number, "a", number)
            assert len(communicator.sent) == before
            return number, str(error)
    communicator.leave(f"rank {communicator.rank} has ended")
    return len(calls), ""


def first_difference(programs):
    """Returns the number of the first call that not all ranks make; the length of programs that are equal."""
    alike = [len(set(calls)) == 1 for calls in zip_longest(*programs)]
    return alike.index(False) if False in alike else len(alike)


@pytest.mark.parametrize("adds_up", [False, True], ids=["rows", "sums"])
@pytest.mark.parametrize("seeds", range(8))
def test_ranks_make_the_calls_that_all_make_and_raise_in_the_first_other_one(adds_up, seeds):
    with patch("bagua_syncbn.communicators.c10d.FEWEST_ADDED", 2 if adds_up else 32):
        for seed in range(40 * seeds, 40 * seeds + 40):
            programs = [made(calls) for calls in program(random.Random(seed))]
            ends = run_threads(len(programs), lambda rank, programs=programs: run(programs[rank.rank], rank))
            differ = first_difference(programs)
            for calls, (answered, message) in zip(programs, ends, strict=True):
                # A rank raises in the call itself; after an error of its own, in its next one.
                expected = differ + (calls[differ : differ + 1] == [("!", -1)])
                assert answered == min(expected, len(calls)), f"seed {seed}: {programs} {ends}"
                assert (message == "") == (answered == len(calls)), f"seed {seed}: {programs} {ends}"
                assert not re.search("the ranks send|came within", message), f"seed {seed}: {programs} {ends}"
