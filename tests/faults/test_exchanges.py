"""Random calls on ranks in threads: matching calls are computed, and the first mismatch raises on all ranks."""

import random
import re
from collections import Counter
from itertools import zip_longest
from unittest.mock import patch

import pytest
import torch
from torch import nn

from bagua_syncbn import check_ranks, convert_sync_batchnorm, ops
from bagua_syncbn.errors import notify_peers
from bagua_syncbn.options import Options
from bagua_syncbn.reliability import faults
from bagua_syncbn.step.call import Call
from bagua_syncbn.step.exchange import exchange_of
from tests.helpers.threads import run_threads

CHANNELS = {"a": 3, "b": 3, "c": 5}
OPTIONS = Options()
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


def value(rank, number):
    return float(rank + 1 + 10 * number)


class Caller:
    """Three layers on a rank."""

    def __init__(self, communicator):
        self.communicator, self.forwards = communicator, {}
        self.layers = convert_sync_batchnorm(nn.ModuleDict({name: nn.BatchNorm1d(CHANNELS[name]) for name in CHANNELS}))

    def make(self, number, kind, name, forward):
        """Makes a call and checks the result."""
        rank, size = self.communicator.rank, self.communicator.size
        if kind == "error":
            notify_peers(self.communicator, self.layers["a"], ValueError("on this rank"))
            return
        mean_of_all = sum(value(other, number) for other in range(size)) / size
        x = torch.full((2, CHANNELS[name]), value(rank, number))
        if kind == "forward":
            call = Call(x, None, None, None, ops.NO_BUFFERS, OPTIONS, True, None, self.layers[name])
            exchange = exchange_of(call, OPTIONS, self.communicator)()
            row = ops.batch_norm_stats(x, *exchange.header, None, exchange.uses_sums)
            rows, *headers = exchange.gather(row)
            mean, invstd, count = ops.merge_stats(rows, ops.NO_BUFFERS, OPTIONS, *headers)
            exchange.check(rows)
            torch.testing.assert_close(mean, torch.full_like(mean, mean_of_all))
            self.forwards[number] = exchange, mean, invstd, count
        else:
            exchange, mean, invstd, count = self.forwards[forward]
            sums, *_ = ops.batch_norm_backward_reduce(x, x, mean, invstd, None, exchange.fingerprint())
            sums, *headers = exchange.sum(sums)
            ops.batch_norm_backward_elemt(x, x, None, mean, invstd, sums, count, *headers)
            exchange.check()
            torch.testing.assert_close(sums[: x.size(1)], torch.full_like(mean, 2 * size * mean_of_all))


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


@pytest.mark.parametrize("adds_up", [False, True], ids=["rows", "sums"])
@pytest.mark.parametrize("seeds", range(8))
def test_ranks_raise_in_the_first_call_that_differs(adds_up, seeds):
    with patch("bagua_syncbn.communicators.c10d.FEWEST_ADDED", 2 if adds_up else 32):
        for seed in range(40 * seeds, 40 * seeds + 40):
            programs = [made(calls) for calls in program(random.Random(seed))]
            ends = run_threads(len(programs), lambda rank, programs=programs: run(programs[rank.rank], rank))
            differ = first_difference(programs)
            for calls, (answered, message) in zip(programs, ends, strict=True):
                # A rank raises in this call, or in the next if it raised an error in this call.
                expected = differ + (calls[differ : differ + 1] == [("error", "", -1)])
                assert answered == min(expected, len(calls)), f"seed {seed}: {programs} {ends}"
                assert (message == "") == (answered == len(calls)), f"seed {seed}: {programs} {ends}"
                assert not re.search("the ranks send|came within", message), f"seed {seed}: {programs} {ends}"


def test_devices_other_than_cpu_and_cuda_have_a_record_too():
    """Ops write to the record and check_ranks() reads it. The tensors are on the CPU, since there is no such device."""
    record = faults.FaultRecord("privateuseone", ())
    rows = torch.stack([ops.batch_norm_stats(torch.randn(4, 3), caller, 1) for caller in (5, 6)])
    mean, *_ = ops.merge_stats(rows, ops.NO_BUFFERS, OPTIONS, 1, record.tensor)
    assert mean.isnan().all()
    with pytest.raises(RuntimeError, match="ranks made different calls"):
        check_ranks()
