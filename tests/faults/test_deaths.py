"""Ranks that end during a step: their peers raise an error that names their layer, and do not abort."""

import gc
import os
import re
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn._groups import spec_of
from bagua_syncbn.communicators import TorchCommunicator
from tests.faults.programs import message_of, own_group
from tests.helpers.own_groups import needs_shared_memory
from tests.helpers.workers import join_job, start_ranks

SECONDS = 300.0  # timeout of the group; peers must detect a death long before it


def end_process(how, *_):
    if how == "asleep":
        time.sleep(2 * SECONDS)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("on this rank only")


def press_ctrl_c_soon():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()


def train_until_a_death(store: str, rank: int, size: int, how: str, ending: int, answers: Any) -> None:
    """Trains a rank of a job; rank ``ending`` ends in the second step. Peers answer with their errors."""
    join_job(store, rank, size, SECONDS)
    middle = nn.Identity()
    model = bagua_syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), middle, nn.BatchNorm1d(4)))
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward()
    if rank != ending:
        answers.put((message_of(lambda: model(x).square().sum().backward()), message_of(model, x)))
        return
    register = middle.register_forward_hook if how == "killed" else middle.register_full_backward_hook
    register(partial(end_process, how))
    model(x).square().sum().backward()


@pytest.mark.parametrize(("how", "layer", "size", "ending", "exit_code"), [
    ("killed", "forward of SyncBatchNorm1d '2'", 2, 1, -signal.SIGKILL),
    ("killed", "forward of SyncBatchNorm1d '2'", 3, 0, -signal.SIGKILL),  # rank 0 created the shared memory
    ("exception", "backward of SyncBatchNorm1d '0'", 3, 2, 1),
])  # fmt: skip
def test_peers_of_a_dead_rank_name_their_layer(tmp_path, how, layer, size, ending, exit_code):
    ranks, answers = start_ranks(tmp_path / "store", train_until_a_death, size, how, ending)
    begin = time.monotonic()
    for process in ranks:
        process.join(2 * SECONDS)
        if process.is_alive():
            process.kill()
    assert time.monotonic() - begin < SECONDS
    assert [process.exitcode for process in ranks] == [exit_code if rank == ending else 0 for rank in range(size)]
    for _ in range(size - 1):
        message, again = answers.get()
        assert f"sync_batch_norm: collective failed in the {layer}" in message
        assert re.search(f" of {size}: RuntimeError: .* is in eval\\(\\), .* can no longer be used$", message)
        assert "process_group: this group failed before" in again


def exchange_until_a_death(store: str, rank: int, size: int, how: str, answers: Any) -> None:
    """Calls the op of compiled code twice; rank 1 ends before its second call. Rank 0 answers with its errors."""
    join_job(store, rank, size, SECONDS)
    exchange = partial(torch.ops.bagua_syncbn.exchange, torch.ones(3), spec_of(None).communicator().name, size, False)
    exchange()
    if rank == 1:
        end_process(how)
    if how == "asleep":
        press_ctrl_c_soon()
    for _ in range(2):
        try:
            exchange()
        except (RuntimeError, KeyboardInterrupt) as error:
            answers.put(f"{type(error).__name__}: {error}")


@needs_shared_memory
@pytest.mark.parametrize("how", ["killed", "asleep"])
def test_a_wait_in_compiled_code_ends_promptly_with_the_reason(tmp_path, how):
    ranks, answers = start_ranks(tmp_path / "store", exchange_until_a_death, 2, how)
    begin = time.monotonic()
    ranks[0].join(2 * SECONDS)
    assert time.monotonic() - begin < SECONDS / 4
    for process in ranks:
        process.kill()
    first, again = answers.get(), answers.get()
    failed = "RuntimeError: sync_batch_norm: collective failed in compiled code, on rank 0 of 2: RuntimeError: "
    assert first.startswith(f"{failed}rank 1 of" if how == "killed" else "KeyboardInterrupt")
    assert ("rank 1 of the group has ended or closed its files" in first) is (how == "killed")
    assert again.startswith(failed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["shared memory", "gloo", "first use"])
def test_a_forked_child_raises_and_its_parent_continues(kind):
    with own_group() as communicator:
        group = TorchCommunicator(communicator.group) if kind == "gloo" else communicator
        layer, x = bagua_syncbn.SyncBatchNorm(4, process_group=group), torch.ones(3, 4)
        layer(x)
        new = bagua_syncbn.SyncBatchNorm(4, process_group=dist.new_group())
        gc.collect()  # a child that frees torch's gloo group crashes
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # terminates a waiting child
            message = message_of(lambda: (new if kind == "first use" else layer)(x))
            group.leave("in a child")  # like at the group's end
            os._exit("cannot synchronize in a forked process, such as a DataLoader worker" not in message)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        time.sleep(0.8 * dist.get_rank())  # one rank waits, and checks whether ranks have left
        for used in (layer, new):
            used(x)
        assert (layer.num_batches_tracked, new.num_batches_tracked) == (2, 1)


def leave_a_collective(store: str, rank: int, size: int, how: str, answers: Any) -> None:
    """Rank 0 ends its job after a collective that rank 1, which is alive, does not join."""
    join_job(store, rank, size, SECONDS)
    if rank == 1:
        end_process("asleep")
    communicator = TorchCommunicator(dist.group.WORLD)
    if how == "begun":
        communicator.begin(torch.ones(3), False)
    else:
        press_ctrl_c_soon()
        with suppress(KeyboardInterrupt):
            communicator.all_gather(torch.ones(3))
    dist.destroy_process_group()  # a group's destructor waits for the group's collectives


@pytest.mark.parametrize("how", ["begun", "interrupted"])
def test_a_rank_with_an_unfinished_collective_ends_its_job_without_waiting(tmp_path, how):
    (rank, peer), _ = start_ranks(tmp_path / "store", leave_a_collective, 2, how)
    rank.join(SECONDS / 4)
    assert peer.is_alive()
    peer.kill()
    assert rank.exitcode == 0
