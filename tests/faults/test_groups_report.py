"""groups_report on a waiting rank, on the awaited rank, and after a failure."""

import sys
import time
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from bagua_syncbn import SyncBatchNorm, groups_report
from benchmarks.one_rank import Twin
from tests.faults.programs import is_odd, message_of, own_model

A, B = (f"of SyncBatchNorm1d '{name}' of Model (8 channels, float32, eps=1e-05, momentum=0.1)" for name in "ab")


@pytest.mark.ranks(2, new_job=True)
def test_the_report_shows_current_and_expected_calls():
    begun = [] if is_odd() else [f"begun: forward {A}"]
    lines = f"rank {dist.get_rank()} of 2: 8 calls", f"last: backward {A}", *begun, f"expected next: forward {A}"
    expected, seen = "\n    ".join(lines), []

    def look():
        deadline = time.monotonic() + 60
        while expected not in groups_report() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(groups_report())
        dist.barrier()  # a collective in the job's group, while the main thread waits in the layers' group

    with own_model() as model:
        for _ in range(2):
            model.run("a b backward")
        looker = Thread(target=look)
        if is_odd():
            look()
        else:
            looker.start()
        model.run("a")
        if not is_odd():
            looker.join()
        assert expected in seen[0]
        assert expected not in groups_report()
        assert "ranks made different calls" in message_of(lambda: model.run("a" if is_odd() else "b"))
        assert f"\n    failed in: forward {A if is_odd() else B}, call 10" in groups_report()


def test_the_report_is_safe_while_other_threads_create_groups():
    def make():
        for _ in range(20):
            for layer in [SyncBatchNorm(1, process_group=Twin()) for _ in range(50)]:
                layer(torch.ones(2, 1))

    seen, maker, before = set(), Thread(target=make), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        maker.start()
        while maker.is_alive():
            seen |= set(groups_report().split("\n"))
    finally:
        maker.join()
        sys.setswitchinterval(before)
    assert "rank 0 of 2: 1 calls" in seen
