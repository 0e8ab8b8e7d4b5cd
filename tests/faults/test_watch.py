"""A rank that has waited for half of the timeout logs its message."""

import itertools
import re
import time
from types import SimpleNamespace
from unittest import TestCase
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from bagua_syncbn._reliability import watch
from bagua_syncbn._reliability.history import history_in
from bagua_syncbn.communicators import shared
from tests.faults.programs import STEP, forward, is_odd, message_of, own_model

SECONDS = 6.0  # timeout of the group; calls take much less than half of it, even on a busy machine


@pytest.mark.ranks(2)
def test_a_long_wait_is_logged_with_message_and_group():
    """Rank 1 skips the third step."""
    with own_model(SECONDS) as model:
        for _ in range(2):
            model.run(STEP)
        if is_odd():
            with TestCase().assertNoLogs("bagua_syncbn", "WARNING"):
                dist.barrier()
            return
        begin = time.monotonic()
        with TestCase().assertLogs("bagua_syncbn", "WARNING") as logs:
            error = message_of(lambda: model.run(STEP))
        took = time.monotonic() - begin
        dist.barrier()
        (message,) = (record.getMessage() for record in logs.records)
        what = "forward of SyncBatchNorm1d 'a' of Model (8 channels, float32, eps=1e-05, momentum=0.1), message 13"
        waited = re.match(r"sync_batch_norm: rank 0 of 2 has waited for ([\d.]+) s, half of ", message)
        assert SECONDS / 2 <= float(waited[1]) < SECONDS
        assert f"in the {what}. Likely causes: a peer is in eval(), " in message
        assert f"(group {model.a.process_group.name})" in message
        assert f"collective failed in the {what}, on rank 0" in error
        assert SECONDS - 0.1 < took < SECONDS + 54
        assert shared.problem() or "rank 1 of the group did not arrive before the timeout" in error


def test_each_long_wait_is_logged_once(caplog):
    one, two = (SimpleNamespace(messages=n, sending=SimpleNamespace(text="forward"), failure=None) for n in (4, 5))
    looks, clock = iter([*[one] * 8, *[two] * 8, None]), SimpleNamespace(monotonic=itertools.count().__next__)
    with patch.object(watch, "time", clock):
        watch._watch(lambda: next(looks), Mock(), 8.0, "rank 0 of 2", "a group", "")
    assert [re.search("waited for 4 s, half .* in the (.*)\\. Likely", text)[1] for text in caplog.messages] == [
        "forward, message 5", "forward, message 6"
    ]  # fmt: skip


@pytest.mark.ranks(2)
def test_the_pending_message_on_a_device_is_found_by_its_number():
    with own_model() as model:
        for _ in range(3):
            model.run(STEP)
        history = history_in(model.a.process_group)
        sent, options = history.messages + history.probes, "float32, eps=1e-05, momentum=0.1"
        for progress, expected in (
            ((sent, sent - 5), f"{forward('b')}, {options}), message 14, which is on the device"),
            ((sent, sent), ""),
            ((sent + 1, sent), ""),  # other code has sent a collective through this group
        ):
            with patch.object(watch, "nccl_progress", return_value=progress):
                assert watch.unfinished_message(history, "") == expected
