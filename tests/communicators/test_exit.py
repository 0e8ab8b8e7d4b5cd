"""Destroyed process groups are freed, and threads of live groups do not abort the process at exit."""

import gc
import os
import sys
import time
from functools import partial
from operator import le
from pathlib import Path
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import bagua_syncbn
from bagua_syncbn.communicators import TorchCommunicator
from tests.faults.programs import message_of
from tests.helpers.own_groups import communicator_of

# A process_group argument, and the corresponding group.
KINDS = {
    "default": lambda: (None, dist.group.WORLD),
    "explicit": lambda: (group := dist.new_group(), group),
    "communicator": lambda: (TorchCommunicator(group := dist.new_group()), group),
    "description": lambda: (2, bagua_syncbn.sync_group(2)),
    "mesh": lambda: (mesh := init_device_mesh("cpu", (2,)), mesh.get_group()),
}


@pytest.mark.ranks(2, new_job=True)  # earlier tests may keep their job's group alive
@pytest.mark.parametrize(("kind", "compiles"), [*((kind, False) for kind in KINDS), ("explicit", True)])
def test_outputs_layers_graphs_and_compiled_models_keep_no_group_alive(kind, compiles):
    process_group, group = KINDS[kind]()
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = bagua_syncbn.convert_sync_batchnorm(model, process_group)
    before = nn.SyncBatchNorm(3)
    before.process_group = group
    converted = bagua_syncbn.convert_sync_batchnorm(nn.Sequential(before))
    if compiles:
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = [model(torch.randn(5, 4)).square().sum() for _ in range(2)]
    losses[0].backward()
    own = communicator_of(process_group).group
    watched = [ref(group), ref(own)]
    group = own = process_group = None
    dist.destroy_process_group()
    assert [one() for one in watched] == [None] * len(watched), "something keeps a destroyed group alive"
    assert isinstance(converted[0], bagua_syncbn.SyncBatchNorm)  # stays alive
    with pytest.raises(Exception, match="destroyed|resolve" if compiles else "destroyed"):
        losses[1].backward()


def use_groups(times, fails, kept):
    """Creates, uses and destroys groups."""
    for _ in range(times):
        group = dist.new_group()
        eps = 1e-3 if fails and dist.get_rank() else 1e-5
        layer = bagua_syncbn.SyncBatchNorm(4, eps=eps, process_group=group)
        message = message_of(lambda layer=layer: layer(torch.randn(3, 4, requires_grad=True)).sum().backward())
        assert (message != "finished") is fails
        dist.destroy_process_group(group)
        kept[:] = [group]


def held():
    """Returns the numbers of file descriptors, threads, torch's groups, and maps of shared memory."""
    gc.collect()
    descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    maps = Path("/proc/self/maps").read_text().count("memfd:bagua_syncbn")
    return descriptors, threads, len(dist.distributed_c10d._world.pg_map), maps


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("fails", "times"), [(False, 5), (True, 5), pytest.param(False, 300, marks=pytest.mark.slow)])
def test_the_layers_group_ends_with_its_given_group(fails, times):
    kept = []  # a destroyed group
    use_groups(2, fails, kept)
    before, deadline = held(), time.monotonic() + 60
    use_groups(times, fails, kept)
    while (
        not all(map(le, after := held(), before)) and time.monotonic() < deadline
    ):  # threads may take a moment to exit
        time.sleep(0.05)
    assert all(map(le, after, before)), f"{after} descriptors, threads, groups and maps, after {before}"


def send(collective):
    message = torch.ones(3)
    collective(message)
    return ref(message)


@pytest.mark.ranks(2)
def test_gloo_threads_never_hold_the_last_reference_to_a_message():
    """To free the message, the thread would request the GIL, which aborts a process that is exiting."""
    communicator = TorchCommunicator(communicator_of(None).group)
    begin = partial(communicator.begin, sums=False)
    sent = [*map(send, (communicator.all_gather, communicator.all_reduce, lambda packed: begin(packed).wait(), begin))]
    time.sleep(0.2)  # until gloo's threads have dropped their references
    assert [one() is not None for one in sent] == [True] * 4
    for _ in range(5):
        send(communicator.all_gather)
    kept = [False] * 3 + [True]  # the last completed collectives, and the unfinished one
    deadline = time.monotonic() + 60
    while (alive := [one() is not None for one in sent]) != kept and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == kept


@pytest.mark.ranks(2, new_job=True)
def test_the_last_messages_of_a_job_end_with_it():
    """Otherwise, the group's sockets and threads would leak."""
    sent = send(TorchCommunicator(communicator_of(None).group).all_gather)
    dist.destroy_process_group()
    assert sent() is None
