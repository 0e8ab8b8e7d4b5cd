"""A rank that waits for half of the time-out logs the call that it waits in."""

import logging
import re
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from bagua_syncbn.reliability import watch
from bagua_syncbn.reliability.history import history_in
from tests.faults.programs import STEP, message_of, own_model

SECONDS = 6.0  # time-out of the group; its half is far above what a call takes on a busy machine


@contextmanager
def logged():
    """Collects log messages of the package, from level WARNING on."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("bagua_syncbn")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def stay_away():
    """Runs two steps; rank 1 does not take part in the third."""
    with logged() as messages, own_model(SECONDS) as model:
        for _ in range(2):
            model.run(STEP)
        error = message_of(lambda: model.run(STEP)) if dist.get_rank() == 0 else ""
        dist.barrier()
        return messages, error, model.a.process_group.name


def test_a_long_wait_is_logged_with_call_and_group(pool):
    (messages, error, group), (none, _, _) = pool.run(stay_away, 2)
    assert not none
    (message,) = messages
    what = "forward of SyncBatchNorm1d 'a' of Model (8 channels, float32, eps=1e-05, momentum=0.1), call 13"
    waited = re.match(r"sync_batch_norm: rank 0 of 2 has waited for ([\d.]+) s, half of ", message)
    assert SECONDS / 2 <= float(waited[1]) < SECONDS
    assert f"in the {what}. " in message
    assert f"(group {group})" in message
    assert f"collective failed in the {what}, on rank 0" in error


def look_with(monkeypatch, history, enqueued, completed):
    """Checks once after half of the time-out, with these numbers of NCCL collectives."""
    monkeypatch.setattr(watch, "nccl_progress", lambda _: (enqueued, completed))
    (watched,) = (watched for watched in watch._watches if watched.history() is history)
    watched.seconds, watched.has_logged, watched.seen = 0.0, False, None
    with logged() as messages:
        watched.look(history)
    watched.seconds = 300.0
    return messages


@pytest.mark.ranks(2)
def test_the_pending_call_on_a_device_is_found_by_its_number():
    with own_model() as model, pytest.MonkeyPatch.context() as patch:
        for _ in range(3):
            model.run(STEP)
        history = history_in(model.a.process_group)
        sent = history.calls + history.probes
        (message,) = look_with(patch, history, sent, sent - 5)
        assert "in the forward of SyncBatchNorm1d 'b' of Model (8" in message
        assert "call 14, which is on the device. " in message
        assert not look_with(patch, history, sent, sent)
        assert not look_with(patch, history, sent + 1, sent), "collectives of others are among them"
