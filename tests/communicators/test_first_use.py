"""The first use of a group, in which its ranks meet: what keeps them from it ends on all of them, in text, in time."""

import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm

SECONDS = 2.0  # the time-out of the job


def join(store, world_size, rank):
    """Begins a job of this time-out, with a store of the kind that is named."""
    dist.barrier()
    dist.destroy_process_group()
    kind, place = store
    timeout = timedelta(seconds=SECONDS)
    if kind == "tcp":
        keeper = dist.TCPStore("localhost", place, world_size, rank == 0, timeout, multi_tenant=True)
    else:
        keeper = dist.FileStore(place, world_size)
        keeper.set_timeout(timeout)
    dist.init_process_group("gloo", store=keeper, rank=rank, world_size=world_size, timeout=timeout)


@pytest.fixture
def store(request, tmp_path):
    if request.param == "file":
        return "file", str(tmp_path / "store")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return "tcp", probe.getsockname()[1]


KINDS = {
    "everyone": lambda pair: None,
    "given": lambda pair: pair,
    "number": lambda pair: 2,
    "ranks": lambda pair: bagua_syncbn.communicators.RankGroup((0, 1)),
}


def first_uses(store, *kinds):
    """Each rank has a layer of another kind, None for a rank that stays away. Then all make a group anew."""
    rank = dist.get_rank()
    join(store, 2, rank)
    pair = dist.new_group([0, 1])  # with the time-out of torch, 30 minutes
    message, begin = "", time.monotonic()
    if kinds[rank] is not None:
        model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), KINDS[kinds[rank]](pair))
        try:
            model(torch.randn(4, 3))
        except RuntimeError as error:
            message = str(error)
    took = time.monotonic() - begin
    time.sleep(max(0, 2 * SECONDS - took))
    after = SyncBatchNorm(1, momentum=1.0, process_group=dist.new_group([0, 1]))
    after(torch.full((2, 1), float(rank)))
    dist.barrier()
    return message, took, after.running_mean.item()


@pytest.mark.parametrize(("store", "kinds"), [
    ("file", ("everyone", "given")),
    ("tcp", ("given", "number")),
    ("tcp", ("ranks", "everyone")),
    ("file", ("ranks", "given")),
], indirect=["store"])  # fmt: skip
def test_ranks_that_make_other_groups_end_in_time_and_are_named(pool, store, kinds):
    pool.forget_job()
    results = pool.run(first_uses, 2, store, *kinds)
    pool.forget_job()
    told = {"everyone": "process_group=None", "given": "group '1' of ranks (0, 1)", "number": "process_group=2"}
    told["ranks"] = "process_group=RankGroup(ranks=(0, 1))"
    waited = ["", ""]
    for rank, (message, took, mean) in enumerate(results):
        assert took < SECONDS + 1.5
        assert mean == 0.5  # a group made anew works
        assert "forward of SyncBatchNorm1d '0': process_group: expected ranks 0, 1 to make the first use of" in message
        assert told[kinds[rank]] in message
        waited[rank] = f"; rank {1 - rank} waits in the first use of {told[kinds[1 - rank]]}" in message
    assert any(waited)


@pytest.mark.parametrize("store", ["file", "tcp"], indirect=True)
def test_a_rank_that_stays_away_is_named(pool, store):
    pool.forget_job()
    (message, took, _), _ = pool.run(first_uses, 2, store, "everyone", None)
    pool.forget_job()
    assert took < SECONDS + 1.5
    assert "rank 0 waited for rank 1 for 2 s, the job's time-out; sync_group" in message
