"""After Ctrl-C anywhere in a call, ranks compute correct numbers or raise an error that names the call.

After Ctrl-C in a function or context that changes a model or a thread for a while, both are as before.
"""

import copy
import itertools
import os
import random
import re
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn import Repeatable
from bagua_syncbn import _ops as ops
from bagua_syncbn._groups import EVERYONE, spec_of
from bagua_syncbn._reliability.history import history_in
from bagua_syncbn._step.hooks import hooks
from bagua_syncbn._torch.modules import saving_hooks
from bagua_syncbn.communicators import c10d, shared
from tests.faults.programs import is_odd, message_of, own_group
from tests.helpers.checkpoints import CHECKPOINTS
from tests.helpers.one_rank import Twin
from tests.helpers.steps import assert_same_bits, draw, gathered, step

PACKAGE = Path(bagua_syncbn.__file__).parent
PROTOCOL = ("_reliability/protocol.py",)
STEP = "_reliability/", "communicators/", "_step/", "functional.py"
COMPREHENSIONS = "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"  # a part of a line, as in Python 3.12
NAMED = re.compile(
    "this group failed before|collective failed in the (forward|backward) of Sync"
    "|ranks made different calls|has not finished in this group"
)


@contextmanager
def interrupted(number, places):
    """Raises KeyboardInterrupt at line ``number`` that is executed in these files. Yields the list of lines so far."""
    seen, files = [], tuple(f"{PACKAGE / place}" for place in places)
    assert all(map(os.path.exists, files))

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(files) or frame.f_code.co_name in COMPREHENSIONS:
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


def make_step(communicator):
    """Returns a training step, which compares this rank with one process on the whole batch."""
    input, grad_output = draw(2, 8, 3)
    layer = bagua_syncbn.SyncBatchNorm1d(3, process_group=communicator, dtype=torch.float64)
    expected, own = step(nn.BatchNorm1d(3).double(), input, grad_output), slice(dist.get_rank(), None, 2)

    def run():
        found = step(layer, input[own], grad_output[own])
        for name in ("output", "input.grad"):
            torch.testing.assert_close(found[name], expected[name][own])

    return run


def steps_until_an_error(run, number, before, places):
    """Runs five steps; step ``before`` is interrupted on the last rank. Returns the error and the lines."""
    done, seen = 0, []
    while done < 5:
        try:
            with interrupted(number, places) if done == before and not seen and is_odd() else nullcontext(seen) as seen:
                run()
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
                run = make_step(communicator)
                message, seen = steps_until_an_error(run, number, before, places)
                place = f"line {number}, {seen[-1] if seen else ''}"
                assert not message or NAMED.search(message), f"{place}: {message}"
                if message:
                    with pytest.raises(RuntimeError, match=NAMED):
                        run()
                assert time.monotonic() - begin < 30, f"{place}: the other rank was not notified"
                if not is_odd():  # the interrupted rank may take one step more
                    communicator.leave("ended")
                *_, lines = gathered(len(seen))  # the group's destruction would also notify peers
            if lines < number:
                return lines
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
@pytest.mark.parametrize("way", ["shared", pytest.param("collectives", marks=pytest.mark.all_rows)])
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
        call(layers[0]) if is_odd() else waiting.join()
        communicator.leave("ended")


X = draw(4, 3)


class Borrowed:
    """A model after some steps. A temporary change must not affect its state or its next steps."""

    def __init__(self):
        torch.manual_seed(0)
        layers = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.0), nn.BatchNorm1d(3, momentum=None)
        self.model = bagua_syncbn.convert_sync_batchnorm(nn.Sequential(*layers).double(), Twin())
        for _ in range(3):
            step(self.model, X)
        self.before = copy.deepcopy(self.model.state_dict())
        self.untouched = self.state()

    def state(self):
        """Returns everything but the values of buffers."""
        parts = [
            [type(part), vars(part)["training"], sorted(vars(part)), list(part._forward_pre_hooks), list(part._buffers)]
            for part in self.model.modules()
        ]
        layers = [vars(self.model[index])["_sync_state"] for index in (1, 3)]
        states = [(id(each), each.group, each.frozen_mode, each.attachments) for each in layers]
        thread = hooks.see_output, ops.this_thread.is_repeating, saving_hooks(), torch.is_grad_enabled()
        random_states = torch.get_rng_state().tolist(), random.getstate()
        return parts, states, list(map(id, self.model.buffers())), thread, random_states, spec_of(None) is EVERYONE

    def step(self, call=None):
        """Returns the results of a step that starts from the initial buffers. They depend on each message."""
        self.model.load_state_dict(self.before)
        return step(self.model, X, call=call)


def interrupted_anywhere(run, places):
    """Interrupts ``run`` at each line in the files ``places``. Yields the line and that run's :class:`Borrowed`."""
    for number in itertools.count(1):
        borrowed, is_interrupted = Borrowed(), False
        with interrupted(number, places) as seen:
            try:
                run(borrowed)
            except KeyboardInterrupt:
                is_interrupted = True
        yield f"line {number}, {seen[-1]}", borrowed
        if not is_interrupted:
            assert number > 20, "saw too little"
            return


def accumulate(model):
    with bagua_syncbn.accumulate_statistics(model):
        model(X)
        model(X)


def recalibrate_inside_accumulation(model):
    with bagua_syncbn.accumulate_statistics(model):
        model(X)
        bagua_syncbn.recalibrate_statistics(model, [X])


def mask(model):
    with (
        bagua_syncbn.masked(model, torch.ones(4, 1, dtype=torch.bool)),
        bagua_syncbn.masked(model, torch.arange(4).view(4, 1) < 3),
    ):
        model(X)


def verify(model):
    bagua_syncbn.verify_synchronization(model, X, lambda model, x: model(x).square().mean())


RESTORES = "conversion/dry_run.py", "_errors.py", "conversion/models.py", "_groups/spec.py", "statistics/"
TRAINS = accumulate, recalibrate_inside_accumulation, mask
BORROWS = {
    "recalibrate": lambda model: bagua_syncbn.recalibrate_statistics(model, [X]),
    "noise": lambda model: bagua_syncbn.measure_batch_noise(model, [X]),
    "accumulate": accumulate,
    "recalibrate inside accumulation": recalibrate_inside_accumulation,
    "mask": mask,
    "verify": verify,
}


SLOW = "verify", "noise", "recalibrate inside accumulation"
SLOW += "nested", "nested in reentrant", "reentrant, nested", "without early stop", "selective, all"


def by_name(cases):
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in cases]


@pytest.mark.parametrize("name", by_name(BORROWS))
def test_an_interrupted_temporary_change_of_a_model_is_undone(name, single_threaded):
    borrow, places = BORROWS[name], (*RESTORES, "verification/noise.py", "verification/verify.py")
    expected, other = Borrowed().step(), Borrowed()
    borrow(other.model)
    complete = [other.before, other.model.state_dict()]
    for line, borrowed in interrupted_anywhere(lambda borrowed: borrow(borrowed.model), places):
        if borrow not in TRAINS:
            buffers = borrowed.model.state_dict().values()
            assert any(all(map(torch.equal, buffers, each.values())) for each in complete), line
        assert borrowed.state() == borrowed.untouched, line
        message = message_of(lambda borrowed=borrowed, line=line: assert_same_bits(borrowed.step(), expected, line))
        is_named = borrow in TRAINS and NAMED.search(message)  # an interrupt between the messages of a training call
        assert message == "finished" or is_named, f"{line}: {message}"


CHANGES = {
    "freeze": bagua_syncbn.freeze_statistics,
    "unfreeze": lambda model: bagua_syncbn.unfreeze_statistics(bagua_syncbn.freeze_statistics(model)),
    "revert": bagua_syncbn.revert_sync_batchnorm,
    "merge": lambda model: bagua_syncbn.merge_statistics(model, Twin()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupted_change_of_a_model_is_complete_or_undone(name, single_threaded):
    def facts(model):
        modes = [(type(layer), layer.training, bagua_syncbn.conversion_report(layer).summary()) for layer in model]
        return modes, {name: value.tolist() for name, value in model.state_dict().items()}

    complete = [facts(Borrowed().model)]
    for change in (bagua_syncbn.freeze_statistics,) * (name == "unfreeze") + (CHANGES[name],):
        model = Borrowed().model
        change(model)
        complete.append(facts(model))
    for line, borrowed in interrupted_anywhere(
        lambda borrowed: CHANGES[name](borrowed.model), (*RESTORES, "conversion/convert.py")
    ):
        assert facts(borrowed.model) in complete, line


def by_hand(function, input):
    """Runs without gradients, then with gradients outside backward, as gradient caches do."""
    region = Repeatable()
    with torch.no_grad(), region:
        function(input)
    with region:
        return function(input)


REGIONS = {**CHECKPOINTS, "by hand": by_hand}
CHECKPOINT_PLACES = "memory/checkpointing.py", "_torch/checkpoints.py", "_errors.py", "_ops/native.py"


@pytest.mark.parametrize("name", by_name(REGIONS))
def test_after_an_interrupt_in_a_checkpoint_later_steps_of_the_thread_are_right(name, single_threaded):
    around = REGIONS[name]
    fresh = Borrowed()
    expected = {call: fresh.step(call and partial(around, fresh.model)) for call in (None, around)}
    run = lambda borrowed: borrowed.step(partial(around, borrowed.model))  # noqa: E731
    messages = set()
    for line, borrowed in interrupted_anywhere(run, CHECKPOINT_PLACES):
        torch.utils.checkpoint.checkpoint(nn.ReLU(), X.clone().requires_grad_(), use_reentrant=False).sum().backward()
        for call in (None, around):
            checkpointed = call and partial(around, borrowed.model)
            try:
                result = borrowed.step(checkpointed)
            except RuntimeError as error:  # says what to do
                messages.add(str(error).partition("; ")[2])
                result = borrowed.step(checkpointed)
            assert_same_bits(result, expected[call], line)
        assert borrowed.state() == borrowed.untouched, line
    told = "a checkpointed function must make the same calls each time; if Ctrl-C interrupted the end of a Repeatable"
    assert messages <= ({f"{told}, repeat the step"} if name == "by hand" else set())
