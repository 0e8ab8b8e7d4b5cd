"""A destroyed process group is kept alive by nothing here, and no thread of a live one aborts a process that ends."""

import time
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from own_groups import communicator_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import bagua_syncbn


def groups_of_each_kind():
    """Returns process groups as a layer may be given them, each with the group behind it."""
    everyone, again = dist.new_group(), dist.new_group()
    return {
        "default": (None, dist.group.WORLD),
        "explicit": (everyone, everyone),
        "communicator": (bagua_syncbn.communicators.TorchCommunicator(again), again),
        "description": (2, bagua_syncbn.sync_group(2)),
        "mesh": (mesh := init_device_mesh("cpu", (2,)), mesh.get_group()),
    }


def destroy_while_everything_lives(kind, compiles):
    process_group, group = groups_of_each_kind()[kind]
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = bagua_syncbn.convert_sync_batchnorm(model, process_group)
    before = torch.nn.SyncBatchNorm(3)
    before.process_group = group
    converted = bagua_syncbn.convert_sync_batchnorm(nn.Sequential(before))
    if compiles:
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = [model(torch.randn(5, 4)).square().sum() for _ in range(2)]
    losses[0].backward()
    own = communicator_of(process_group).group
    # torch's compiler keeps the default group by itself, whatever model it compiles.
    watched = [ref(one) for one in (group, own) if not (compiles and one is dist.group.WORLD)]
    group = own = process_group = None
    dist.destroy_process_group()
    assert [one() for one in watched] == [None] * len(watched), "something keeps a destroyed group alive"
    messages = []
    for attempt in (losses[1].backward, lambda: model(torch.randn(5, 4))):
        try:
            attempt()
        except Exception as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages, len(converted)


@pytest.mark.parametrize(("kind", "compiles"), [
    *((kind, False) for kind in ("default", "explicit", "communicator", "description", "mesh")),
    ("default", True), ("explicit", True),
])  # fmt: skip
def test_outputs_layers_graphs_and_compiled_models_keep_no_group_alive(pool, kind, compiles):
    pool.forget_job()  # tests before this one may hold the group of its job
    results = pool.run(destroy_while_everything_lives, 2, kind, compiles)
    pool.forget_job()
    for messages, _ in results:
        assert "destroyed" in messages[0] or (compiles and "resolve" in messages[0]), messages


def messages_that_outlive_their_callers():
    communicator = bagua_syncbn.communicators.TorchCommunicator(communicator_of(None).group)

    def send(collective):
        message = torch.ones(3)
        collective(message)
        return ref(message)

    sent = [send(communicator.all_gather), send(communicator.all_reduce), send(communicator.begin_all_gather)]
    time.sleep(0.2)  # in which the threads of gloo let go of them
    held = [one() is not None for one in sent]
    for _ in range(5):
        send(communicator.all_gather)
    time.sleep(0.2)
    return held, [one() is not None for one in sent]


def last_message_after_the_job():
    message = torch.ones(3)
    bagua_syncbn.communicators.TorchCommunicator(communicator_of(None).group).all_gather(message)
    sent, message = ref(message), None
    dist.destroy_process_group()
    return sent() is None


def test_what_is_kept_of_a_job_ends_with_it(pool):
    # Else sockets and threads of the group would live on.
    pool.forget_job()
    ended = pool.run(last_message_after_the_job, 2)
    pool.forget_job()
    assert ended == [True, True]


def test_no_thread_of_gloo_is_the_last_to_hold_a_message(pool):
    # One that was would ask for the GIL, and that aborts a process whose interpreter ends at that time.
    for held, held_later in pool.run(messages_that_outlive_their_callers, 2):
        assert held == [True, True, True]
        assert held_later == [False, False, True]  # only the last messages that have ended are kept
