"""The layers' communicator over Bagua: exact, one collective each way, ordered by streams, only among members."""

import copy
import gc
import time
import weakref
from unittest.mock import patch

import bagua.torch_api.communication as communication
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

from bagua_syncbn import SyncBatchNorm, SyncBatchNorm1d, convert_sync_batchnorm, with_bagua
from bagua_syncbn.bagua import engine
from bagua_syncbn.communicators import LOCAL, Communicator, RankGroup
from tests.bagua_job.native import HostCommunicator, Watch, current_stream, log
from tests.helpers.own_groups import check_refused, communicator_of, forget_groups, mean_over
from tests.helpers.steps import step

COLLECTIVES = ("allgather", "allreduce", "broadcast")


def sent():
    """Returns the messages logged since the last call: collective, number of elements and dtype."""
    found = [entry[1:] for entry in log if entry[1] in COLLECTIVES]
    log.clear()
    return found


# Bits that arithmetic would change: signed zero, subnormal, infinity, a NaN with a payload, 2^53 + 1 as int64.
WIDE = [-(2**63), 1, 0x7FF0000000000000, 0x7FF8000000000123, 2**53 + 1, 0x3FF0000000000001]
NARROW = [-(2**31), 1, 0x7F800000, 0x7FC00123, 2**24 + 1, 7]


@pytest.mark.ranks(3)
def test_messages_keep_every_bit():
    communicator, rank = communicator_of(), dist.get_rank()
    assert isinstance(communicator, engine.BaguaCommunicator)
    assert isinstance(communicator, Communicator)
    assert (communicator.size, communicator.rank) == (3, rank)
    log.clear()
    for patterns, bits, dtype in [(WIDE, torch.int64, torch.float64), (NARROW, torch.int32, torch.float32)]:
        values = torch.tensor(patterns, dtype=bits)
        rows = communicator.all_gather(values.roll(rank).view(dtype))
        assert torch.equal(rows.view(bits), torch.stack([values.roll(other) for other in range(3)]))
    values = torch.tensor([1.0, 1e-17, -1.0, 2.0**60], dtype=torch.float64)
    assert torch.equal(communicator.all_reduce(values * (rank + 1)), (values + 2 * values) + 3 * values)
    assert communicator.all_reduce(torch.full((5,), rank + 1.0)).tolist() == [6.0] * 5
    kinds = ("allgather", "torch.int64"), ("allgather", "torch.float32"), ("allgather", "torch.int64")
    assert [(what, dtype) for what, _, dtype in sent()] == [*kinds, ("allreduce", "torch.float32")]
    for tensor in (torch.arange(6.0).view(3, 2)[:, 0] + rank, torch.tensor(1.0 + rank).expand(3)):
        for strided in (tensor, tensor.double()):
            assert torch.equal(communicator.all_gather(strided)[rank], strided)
    assert communicator.all_reduce(torch.tensor(1.0 + rank).expand(3)).tolist() == [6.0] * 3
    assert communicator.all_reduce(torch.arange(6.0)[::2]).tolist() == [0.0, 6.0, 12.0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("dtype", "layers"), [(torch.float32, 3), (torch.float64, 1)], ids=str)
def test_one_collective_each_way_in_stream_order_without_host_waits(dtype, layers):
    # Begins with a Linear, because a layer sends no sums if its input needs no gradient.
    model = nn.Sequential(nn.Linear(4, 4), *(nn.BatchNorm1d(4) for _ in range(layers))).to(dtype)
    convert_sync_batchnorm(model)
    for _ in range(2):  # creates the communicator, and lets ranks agree on messages
        output = model(torch.randn(3, 4, dtype=dtype))
        output.backward(torch.randn_like(output))
    log.clear()
    with Watch(), profile() as profiler:
        output = model(torch.randn(3 + dist.get_rank(), 4, dtype=dtype))
        output.backward(torch.randn_like(output))
    stream = communicator_of().group.stream
    assert stream not in (current_stream(), communication._get_default_group().stream)
    assert stream.priority < 0
    assert len(HostCommunicator.made) == 1
    assert not [event.name for event in profiler.events() if event.name.startswith("c10d::")]
    own, caller = stream.cuda_stream, current_stream().cuda_stream
    for index, entry in enumerate(log):  # no other work is enqueued between the waits
        if entry[1] in COLLECTIVES:
            assert log[index - 1] == (own, "waits for", caller)
            assert log[index + 1] == (caller, "waits for", own)
    assert "host waits" not in log
    # The message sizes in docs/bagua.md.
    name, sum_by = ("torch.float32", "allreduce") if dtype == torch.float32 else ("torch.int64", "allgather")
    assert sent() == [("allgather", 2 * 4 + 5, name)] * layers + [(sum_by, 2 * 4 + 6, name)] * layers


@pytest.mark.ranks(2)
def test_ranks_wait_in_python_until_all_members_make_the_first_use(tmp_path):
    """Bagua's constructor holds the GIL while it waits, but its scheduler thread needs the GIL to serve peers."""
    store, constructor = dist.FileStore(str(tmp_path / "store"), 2), HostCommunicator.__init__

    def construct(*args, **kwargs):
        assert store.check(["rank 1 is there"])
        constructor(*args, **kwargs)

    layer = SyncBatchNorm(2, process_group=communication.BaguaProcessGroup([0, 1], None, "another"))
    forget_groups()
    with patch.object(HostCommunicator, "__init__", construct):
        if dist.get_rank() == 1:
            time.sleep(0.5)
            store.set("rank 1 is there", "")
        layer(torch.randn(4, 2))


@pytest.mark.ranks(2)
def test_sent_messages_are_freed():
    communicator, views = communicator_of(), []
    to_bagua_tensor = torch.Tensor.to_bagua_tensor

    def noted(tensor, *args):
        views.append(to_bagua_tensor(tensor, *args))
        return views[-1]

    with patch.object(torch.Tensor, "to_bagua_tensor", noted):
        communicator.all_gather(torch.ones(4))
        communicator.all_reduce(torch.ones(4))
    alive = [weakref.ref(view) for view in views]
    views.clear()
    gc.collect()
    assert [view() for view in alive] == [None] * 3


@pytest.mark.ranks(4)
def test_only_members_use_a_group():
    """Other ranks run different code in between, then all ranks communicate again."""
    rank = dist.get_rank()
    low, odd = communication.new_group([0, 1]), communication.new_group([3, 1])
    if rank in (0, 1):
        assert mean_over(low) == 0.5
    if rank in (1, 3):
        assert mean_over(odd) == mean_over(communication.BaguaProcessGroup([3, 1], None, "another")) == 2
        assert communicator_of(RankGroup((3, 1))) is communicator_of(odd)
        assert communicator_of(odd).rank == [1, 3].index(rank)
    if rank == 2:
        check_refused(odd, ValueError, r"include this one, rank 2 of 4, got \(1, 3\)")
        check_refused(RankGroup((2, 5)), ValueError, r"rank 2 of 4, got \(2, 5\)")
    assert mean_over(None) == 1.5
    assert copy.deepcopy(SyncBatchNorm(1, process_group=communication._get_default_group())).process_group is None
    # Bagua numbers its groups, and the layers' groups must not change these numbers.
    whole = communication.new_group()
    whole.get_global_communicator()
    assert mean_over(whole) == 1.5
    assert communicator_of(whole) is communicator_of()
    assert communication._group_count == 4


@pytest.mark.ranks(2)
def test_a_tensor_on_another_device_raises():
    layer = SyncBatchNorm(2, process_group=2)
    on_cuda = patch.object(engine, "_device", lambda: torch.device("cuda", 0))
    forget_groups()
    with on_cuda, pytest.raises(RuntimeError, match="input: expected a tensor on cuda:0, this rank's device, got cpu"):
        layer(torch.randn(4, 2))
    forget_groups()
    assert layer.num_batches_tracked == 0
    assert layer.eval()(torch.randn(4, 2)).shape == (4, 2)


def test_a_bagua_group_without_a_job_raises():
    group = communication.BaguaProcessGroup([0], None, "early")
    layer, message = SyncBatchNorm1d(2), r"Bagua does not run yet; call bagua\.torch_api\.init_process_group"
    check_refused(group, RuntimeError, message)
    with pytest.raises(RuntimeError, match=message):
        layer.process_group = group
    with pytest.raises(RuntimeError, match=message):
        with_bagua(nn.Sequential(layer), [], process_group=group)
    assert communicator_of() is LOCAL
    assert engine.installed_version()


@pytest.mark.ranks(2)
def test_a_compiled_model_calls_the_communicator_in_python():
    torch._dynamo.config.do_not_emit_runtime_asserts = True  # they fail on properties that Bagua adds to modules
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))[dist.get_rank() :: 2].clone()
    results = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), convert_sync_batchnorm(nn.BatchNorm1d(4)), nn.ReLU())
        call = model if backend is None else torch.compile(model, backend=backend)
        for _ in range(3):  # the first call also agrees on messages
            log.clear()
            result = step(model, batch, call=call)
        assert [what for what, *_ in sent()] == ["allgather", "allreduce"]
        results.append(result)
    torch.testing.assert_close(results[1], results[0])
