"""After Ctrl-C anywhere in a call, ranks compute correct numbers or raise an error that names the call."""

import itertools
import re
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn._reliability.history import history_in
from bagua_syncbn.communicators import c10d, shared
from tests.faults.programs import is_odd, message_of, own_group

PACKAGE = Path(bagua_syncbn.__file__).parent
PROTOCOL = ("_reliability/protocol.py",)
STEP = "_reliability/", "communicators/", "_step/", "functional.py"
assert all((PACKAGE / place).exists() for place in PROTOCOL + STEP)
NAMED = re.compile(
    "this group failed before|collective failed in the (forward|backward) of Sync"
    "|ranks made different calls|has not finished in this group"
)


@contextmanager
def interrupted(number, places):
    """Raises KeyboardInterrupt at line ``number`` that is executed in these files. Yields the list of lines so far."""
    seen = []

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(tuple(f"{PACKAGE / place}" for place in places)):
            return None
        if event == "line":
            seen.append(f"{frame.f_code.co_name}, line {frame.f_lineno}")
            if len(seen) == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(None)


class Step:
    """A training step, compared with one process on the whole batch."""

    def __init__(self, communicator):
        torch.manual_seed(0)
        self.inputs, self.grads = torch.randn(2, 8, 3).double()
        self.expected = self.run(nn.BatchNorm1d(3).double(), slice(None))
        self.layer = bagua_syncbn.SyncBatchNorm1d(3, process_group=communicator).double()

    def run(self, layer, own):
        input = self.inputs[own].requires_grad_()
        output = layer(input)
        return torch.cat([output.detach(), *torch.autograd.grad(output, input, self.grads[own])], 1)

    def __call__(self):
        own = slice(0, 4) if dist.get_rank() == 0 else slice(4, 8)
        torch.testing.assert_close(self.run(self.layer, own), self.expected[own])


def steps_until_an_error(step, number, before, places):
    """Runs five steps; step ``before`` is interrupted on the last rank. Returns the error and the lines."""
    done, seen = 0, []
    while done < 5:
        try:
            with interrupted(number, places) if done == before and not seen and is_odd() else nullcontext(seen) as seen:
                step()
            done += 1
        except KeyboardInterrupt:
            continue
        except RuntimeError as error:
            return str(error), seen
    return "", seen


def interrupt_everywhere(way, before, places):
    """Interrupts a step at each line in turn, and checks both ranks. Returns the number of lines."""
    slices = patch.object(c10d, "_SLICE", timedelta(milliseconds=10))
    with patch.object(shared, "_WANTED", way), slices:
        for number in itertools.count(1):
            begin = time.monotonic()
            with own_group(60.0) as communicator:
                step = Step(communicator)
                message, seen = steps_until_an_error(step, number, before, places)
                place = f"line {number}, {seen[-1] if seen else ''}"
                assert not message or NAMED.search(message), f"{place}: {message}"
                if message:
                    with pytest.raises(RuntimeError, match=NAMED):
                        step()
                assert time.monotonic() - begin < 30, f"{place}: the other rank was not notified"
                if not is_odd():  # the interrupted rank may take one step more
                    communicator.leave("ended")
                lines = [len(seen)]
                dist.broadcast_object_list(lines, 1)  # the group's destruction would also notify peers
            if lines[0] < number:
                return lines[0]
    return 0


@pytest.mark.ranks(2, timeout=900)
@pytest.mark.parametrize("way", ["shared", "collectives"])
@pytest.mark.parametrize(("places", "before"), [
    (PROTOCOL, 3),
    *(pytest.param(STEP, before, marks=pytest.mark.slow) for before in (0, 3)),
], ids=["messages", "first step", "later step"])  # fmt: skip
def test_an_interrupt_anywhere_in_a_step_gives_correct_numbers_or_a_named_error(way, places, before):
    assert interrupt_everywhere(way, before, places) > 20, "saw too little"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["shared", "collectives"])
def test_a_second_thread_in_a_group_raises(way):
    def call(layer):
        return message_of(lambda: layer(torch.randn(4, layer.num_features)))

    with patch.object(shared, "_WANTED", way), own_group() as communicator:
        layers = [bagua_syncbn.SyncBatchNorm(channels, process_group=communicator) for channels in (5, 900)]
        waiting = threading.Thread(target=call, args=(layers[0],))
        if not is_odd():
            waiting.start()
            while history_in(communicator).sending is None:
                time.sleep(0.01)
            message = call(layers[1])
            assert NAMED.search(message), message
            assert "forward of SyncBatchNorm (5 channels, float32, eps=1e-05, momentum=0.1) has not finished" in message
            assert message.endswith("give each thread a separate group from torch.distributed.new_group()")
        dist.barrier()
        if is_odd():
            call(layers[0])
        else:
            waiting.join()
        communicator.leave("ended")
