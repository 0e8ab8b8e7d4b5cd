"""The report on groups: read on ranks that wait, that another rank waits for, and that have failed."""

import sys
import time
from contextlib import contextmanager
from threading import Thread
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from bagua_syncbn import groups_report
from bagua_syncbn.agreement import history
from bagua_syncbn.agreement.history import history_in
from tests.faults.programs import is_odd, message_of, own_model

A, B = (f"of SyncBatchNorm1d '{name}' of Model (8 channels, float32, eps=1e-05, momentum=0.1)" for name in "ab")


@contextmanager
def unknown_so_far():
    """Hides the groups of earlier tests in this process."""
    with patch.object(history, "_histories", WeakIdKeyDictionary()), patch.object(history, "_lasting", []):
        yield


@pytest.mark.ranks(2, new_job=True)
def test_ranks_say_which_layer_they_wait_in_and_which_one_they_expect():
    seen = []

    def look():
        deadline = time.monotonic() + 60
        while "begun" not in groups_report() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(groups_report())
        dist.barrier()

    with unknown_so_far(), own_model() as model:
        assert groups_report() == "no calls of synchronized layers over several ranks"
        for _ in range(2):
            model.run("ab<")
        # In the job's group, while the main thread of the first rank waits in the layers' group.
        looker = Thread(target=look)
        if is_odd():
            dist.barrier()
            seen.append(groups_report())
        else:
            looker.start()
        model.run("a")
        if not is_odd():
            looker.join()
        where = f"rank {dist.get_rank()} of 2: 8 calls", f"last: backward {A}", f"begun: forward {A}"
        where = where[: 2 if is_odd() else 3]
        assert seen == ["\n    ".join([*where, f"expected next: forward {A}"])]
        assert "begun" not in groups_report()
        assert "expected all ranks" in message_of(lambda: model.run("a" if is_odd() else "b"))
        assert f"\n    failed in: forward {A if is_odd() else B}, call 10" in groups_report()


class Second:
    size, rank = 2, 1


def test_a_report_is_read_while_other_threads_make_groups():
    def make():
        for _ in range(20):
            communicators = [Second() for _ in range(500)]
            for communicator in communicators:
                history_in(communicator)

    seen, maker, before = set(), Thread(target=make), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        maker.start()
        while maker.is_alive():
            seen |= set(groups_report().split("\n"))
    finally:
        maker.join()
        sys.setswitchinterval(before)
    assert "rank 1 of 2: 0 calls" in seen
