"""Bagua's communicator for layers: exact, once a layer each way, ordered by streams alone, among members alone."""

import copy
import gc
import pickle
import weakref

import bagua.torch_api.communication as communication
import pytest
import torch
import torch.distributed as dist
from native import HostCommunicator
from own_groups import communicator_of, mean_over
from streams import Watch, current_stream, timeline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile
from training import through_file

from bagua_syncbn import SyncBatchNorm, SyncBatchNorm1d, convert_sync_batchnorm, sync_batch_norm, with_bagua
from bagua_syncbn.communicators import LOCAL, Communicator, RankGroup, bagua
from bagua_syncbn.communicators.c10d import TorchCommunicator


def rank():
    return dist.get_rank()


# Bits that arithmetic would change or lose: signed zero, subnormal, infinity, a NaN with a payload, 2^53 + 1 as int64.
PATTERNS = [-(2**63), 1, 0x7FF0000000000000, 0x7FF8000000000123, 2**53 + 1, 0x3FF0000000000001]


def exchange_bits():
    communicator = communicator_of()
    assert isinstance(communicator, bagua.BaguaCommunicator)
    assert isinstance(communicator, Communicator)
    assert (communicator.size, communicator.rank) == (3, rank())
    wide = torch.tensor(PATTERNS).roll(rank())
    narrow = torch.tensor([-(2**31), 1, 0x7F800000, 0x7FC00123, 2**24 + 1, 7], dtype=torch.int32).roll(rank())
    rows = communicator.all_gather(wide.view(torch.float64)), communicator.all_gather(narrow.view(torch.float32))
    assert [tuple(row.shape) for row in rows] == [(3, 6), (3, 6)]
    for row, sent in zip(rows, (wide, narrow), strict=True):
        whole = torch.stack([sent.roll(other - rank()) for other in range(3)])
        assert torch.equal(row.view(sent.dtype), whole)
    values = torch.tensor([1.0, 1e-17, -1.0, 2.0**60], dtype=torch.float64)
    total = communicator.all_reduce(values * (rank() + 1))
    assert torch.equal(total, (values + 2 * values) + 3 * values)
    assert total.dtype == torch.float64
    assert communicator.all_reduce(torch.full((5,), rank() + 1.0)).tolist() == [6.0] * 5
    collectives = [(what, dtype) for what, _, _, dtype in timeline.collectives]
    strided = torch.arange(6.0).view(3, 2)[:, 0] + rank(), torch.tensor(1.0 + rank()).expand(3)
    for tensor in (*strided, *(tensor.double() for tensor in strided), torch.arange(6.0).double()[::2]):
        assert torch.equal(communicator.all_gather(tensor)[rank()], tensor)
    assert communicator.all_reduce(strided[1]).tolist() == [6.0] * 3
    assert communicator.all_reduce(torch.arange(6.0)[::2]).tolist() == [0.0, 6.0, 12.0]
    return collectives


def test_every_bit_crosses(pool):
    for collectives in pool.run(exchange_bits, 3):
        assert collectives == [
            ("allgather", "torch.int64"),
            ("allgather", "torch.float32"),
            ("allgather", "torch.int64"),  # the float64 sum
            ("allreduce", "torch.float32"),
        ]


def train_watched(dtype, layers):
    torch.manual_seed(rank())
    # A Linear first: a layer whose input needs no gradient has no all-reduce.
    model = nn.Sequential(nn.Linear(4, 4), *(nn.BatchNorm1d(4) for _ in range(layers))).to(dtype)
    convert_sync_batchnorm(model)
    for _ in range(2):  # makes the communicator, and the ranks agree on what they send
        output = model(torch.randn(3, 4, dtype=dtype))
        output.backward(torch.randn_like(output))
    timeline.clear()
    with Watch(), profile() as profiler:
        output = model(torch.randn(3 + rank(), 4, dtype=dtype))
        forward = [what for what, *_ in timeline.collectives]
        output.backward(torch.randn_like(output))
    streams = {stream for _, stream, *_ in timeline.collectives}
    layer_stream = communicator_of().group.stream
    assert streams == {layer_stream.cuda_stream}
    assert layer_stream is not current_stream()
    assert layer_stream is not communication._get_default_group().stream
    assert layer_stream.priority < 0
    assert {stream for _, stream in timeline.recorded} == streams
    return (
        forward,
        [what for what, *_ in timeline.collectives][len(forward) :],
        len(timeline.recorded),
        timeline.races,
        timeline.host_waits,
        [event.name for event in profiler.events() if event.name.startswith("c10d::")],
        len(HostCommunicator.made),
        [numel for _, _, numel, _ in timeline.collectives],
    )


@pytest.mark.parametrize(("dtype", "layers"), [(torch.float32, 3), (torch.float64, 1)], ids=str)
def test_one_collective_each_way_in_order_and_no_host_wait(pool, dtype, layers):
    backward = "allreduce" if dtype == torch.float32 else "allgather"
    recorded = (2 + 1) if dtype == torch.float32 else (2 + 2)
    for result in pool.run(train_watched, 2, dtype, layers):
        forward, back, streams, races, waits, others, communicators, numels = result
        assert forward == ["allgather"] * layers
        assert back == [backward] * layers
        assert streams == recorded * layers
        assert (races, waits, others) == ([], [], [])
        assert communicators == 1
        if dtype == torch.float32:  # as docs/bagua.md has it: of two ranks in forward
            assert numels == [2 * (2 * 4 + 5)] * layers + [2 * 4 + 6] * layers


def call_settled_layer():
    layer, seen = SyncBatchNorm1d(4), []
    for _ in range(3):
        layer(torch.randn(3, 4)).backward(torch.randn(3, 4))
        seen.append(vars(layer).get("_cached_call"))
    world = communication._default_pg
    try:
        communication._default_pg = copy.copy(world)  # as in another job
        found = layer._group_spec.found()
    finally:
        communication._default_pg = world
    return seen[0] is not None, seen[0] is seen[1] is seen[2], found


def test_a_layer_checks_its_calls_once(pool):
    assert pool.run(call_settled_layer, 2) == [(True, True, None)] * 2


def what_stays():
    communicator = communicator_of()
    views = []
    to_bagua_tensor = torch.Tensor.to_bagua_tensor

    def noted(tensor, *args):
        views.append(to_bagua_tensor(tensor, *args))
        return views[-1]

    torch.Tensor.to_bagua_tensor = noted
    try:
        communicator.all_gather(torch.ones(4))
        communicator.all_reduce(torch.ones(4))
    finally:
        torch.Tensor.to_bagua_tensor = to_bagua_tensor
    alive = [weakref.ref(view) for view in views]
    views.clear()
    gc.collect()
    return [view() is None for view in alive]


def test_nothing_that_was_sent_stays(pool):
    assert pool.run(what_stays, 2) == [[True] * 3] * 2


def in_groups():
    """Some ranks meanwhile do other things, and all meet again."""
    low, odd = communication.new_group([0, 1]), communication.new_group([3, 1])
    results = {}
    if rank() in (0, 1):
        results["low"] = mean_over(low)
    if rank() in (1, 3):
        results["odd"] = mean_over(odd)
        results["odd again"] = mean_over(communication.BaguaProcessGroup([3, 1], None, "another"))
        assert communicator_of(RankGroup((3, 1))) is communicator_of(odd)
        assert communicator_of(odd).rank == [1, 3].index(rank())
    if rank() == 2:
        for use in (communicator_of, lambda group: SyncBatchNorm(1, process_group=group), mean_over):
            with pytest.raises(ValueError, match=r"include this one, rank 2 of 4, got \(1, 3\)"):
                use(odd)
        with pytest.raises(ValueError, match=r"rank 2 of 4, got \(2, 5\)"):
            communicator_of(RankGroup((2, 5)))
        model = nn.Sequential(nn.BatchNorm1d(1))
        with pytest.raises(ValueError, match="rank 2 of 4"):
            convert_sync_batchnorm(model, odd)
        assert type(model[0]) is nn.BatchNorm1d
    results["all"] = mean_over(None)
    # Bagua numbers its groups: those that ranks made meanwhile must not count.
    whole = communication.new_group()
    whole.get_global_communicator()
    results["whole"] = mean_over(whole)
    assert communicator_of(whole) is communicator_of()
    return results, communication._group_count


def test_groups_concern_their_members_alone(pool):
    expected = [{"low": 0.5}, {"low": 0.5, "odd": 2.0, "odd again": 2.0}, {}, {"odd": 2.0, "odd again": 2.0}]
    for result, own in zip(pool.run(in_groups, 4), expected, strict=True):
        assert result == ({**own, "all": 1.5, "whole": 1.5}, 4)


def by_other_names():
    pair = rank() // 2
    torch_group = [dist.new_group([0, 1]), dist.new_group([2, 3])][pair]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    groups = [torch_group, 2, [[1, 0], [2, 3]], mesh["local"], RankGroup((2 * pair, 2 * pair + 1))]
    means = [mean_over(group) for group in groups]
    communicators = {id(communicator_of(group)) for group in groups}
    assert isinstance(communicator_of(groups[0]), bagua.BaguaCommunicator)
    assert mean_over("node") == mean_over(4) == mean_over(dist.group.WORLD) == 1.5
    assert communicator_of(1) is communicator_of([[0], [1], [2], [3]]) is LOCAL
    through_torch = TorchCommunicator(torch_group)  # a communicator is what it is
    assert communicator_of(through_torch) is through_torch
    assert {dtype for *_, dtype in timeline.collectives} == {"torch.float32"}
    return means, len(communicators)


def test_torch_groups_and_descriptions_lead_to_the_same_communicator(pool):
    for rank, result in enumerate(pool.run(by_other_names, 4)):
        assert result == ([rank // 2 * 2 + 0.5] * 5, 1)


def travel():
    group = [communication.new_group([0, 2]), communication.new_group([1, 3])][rank() % 2]
    layer = SyncBatchNorm(1, momentum=1.0, process_group=group)
    loaded = through_file(nn.Sequential(layer))[0]
    means = []
    for net in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        net(torch.full((2, 1), float(rank())))
        means.append(net.running_mean.item())
    assert copy.deepcopy(SyncBatchNorm(1, process_group=communication._get_default_group())).process_group is None
    return loaded.process_group, means


def test_copies_and_files_keep_the_ranks(pool):
    for rank, result in enumerate(pool.run(travel, 4)):
        assert result == (RankGroup((rank % 2, rank % 2 + 2)), [rank % 2 + 1.0] * 4)


def on_another_device():
    device, bagua._device = bagua._device, lambda: torch.device("cuda", 0)
    communicators, bagua._communicators = bagua._communicators, {}
    layer = SyncBatchNorm(2, process_group=2)  # whose communicator no other test uses
    try:
        layer(torch.randn(4, 2))
    except RuntimeError as error:
        evaluated = layer.eval()(torch.randn(4, 2))
        return str(error), layer.num_batches_tracked.item(), evaluated.shape
    finally:
        bagua._device, bagua._communicators = device, communicators


def test_a_tensor_of_another_device_never_reaches_nccl(pool):
    for error, batches, shape in pool.run(on_another_device, 2):
        assert "input: expected a tensor on cuda:0, the device of this rank in the Bagua job, got one on cpu" in error
        assert batches == 0
        assert shape == (4, 2)


def test_a_bagua_group_without_a_job_is_named():
    group = communication.BaguaProcessGroup([0], None, "early")
    layer = SyncBatchNorm1d(2)
    for use in (
        lambda: setattr(layer, "process_group", group),
        lambda: SyncBatchNorm1d(2, process_group=group),
        lambda: convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), group),
        lambda: sync_batch_norm(torch.randn(4, 2), None, None, process_group=group),
        lambda: with_bagua(nn.Sequential(layer), [], process_group=group),
    ):
        with pytest.raises(RuntimeError, match=r"got a BaguaProcessGroup before bagua\.torch_api\.init_process_group"):
            use()


def test_bagua_that_runs_nothing_changes_nothing():
    assert not bagua.is_initialized()
    assert communicator_of() is LOCAL
    assert bagua.installed_version()


def compiled():
    torch._dynamo.config.do_not_emit_runtime_asserts = True  # else it meets the properties that Bagua gives modules
    torch.manual_seed(0)
    batch = torch.randn(6, 4)[rank() :: 2].clone()
    results = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), convert_sync_batchnorm(nn.BatchNorm1d(4)), nn.ReLU())
        step = model if backend is None else torch.compile(model, backend=backend)
        for _ in range(3):  # at first the ranks agree on what they send
            model.zero_grad()
            timeline.clear()
            output = step(batch)
            output.square().sum().backward()
        collectives = [what for what, *_ in timeline.collectives]
        results.append((collectives, output.detach(), model[0].weight.grad, model[1].running_var))
    return results


def test_a_compiled_model_leaves_the_communicator_to_python(pool):
    for eager, traced in pool.run(compiled, 2):
        assert eager[0] == traced[0] == ["allgather", "allreduce"]
        torch.testing.assert_close(traced[1:], eager[1:])
