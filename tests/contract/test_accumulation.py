"""accumulate_statistics updates buffers once, as if all micro-batches were one batch."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import SyncBatchNorm, accumulate_statistics, convert_sync_batchnorm
from bagua_syncbn._ops import NO_BUFFERS, Received
from bagua_syncbn._ops.options import Options
from bagua_syncbn.data_parallel import convert_model
from bagua_syncbn.statistics import accumulation
from bagua_syncbn.statistics.accumulation import Accumulation
from tests.helpers import steps
from tests.helpers.observed import collectives
from tests.helpers.one_rank import Twin
from tests.helpers.replicated import parallel
from tests.helpers.user_layers import BatchNormAct1d


class Parallel(nn.Module):
    """Layers of every kind in parallel, so that all buffers depend on the same input."""

    def __init__(self):
        super().__init__()
        layers = (
            nn.BatchNorm1d(3),
            nn.BatchNorm1d(3, momentum=None),
            BatchNormAct1d(3),
            BatchNormAct1d(3, momentum=None),
            nn.BatchNorm1d(3, momentum=0.5).float(),
            nn.BatchNorm1d(3, track_running_stats=False),
            nn.BatchNorm1d(3).eval(),
        )
        self.layers = nn.ModuleList(layers).double()
        self.convolution = nn.Conv1d(3, 3, 1).double()

    def forward(self, input):
        return sum(layer(self.convolution(input)) for layer in self.layers)


def draw(split, seed=0):
    """Returns the micro-batches of a step, and the whole batch."""
    batch = steps.draw(sum(split), 3, 4, seed=seed)
    return batch.split(split), batch


def train_batches(model, batches):
    outputs = []
    for batch in batches:
        outputs.append(model(batch))
        outputs[-1].backward(batch.cos())
    return [output.detach() for output in outputs], [parameter.grad for parameter in model.parameters()]


def check_buffers(model, reference, batches):
    """Compares the buffers of ``model`` with those of ``reference`` after the forward of each whole batch."""
    with torch.no_grad():
        for batch in batches:
            reference(batch)
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))


SPLITS = [[(2, 0, 5), (3, 4, 0)], [(1, 3, 2), (0, 6, 1)], [(1, 1, 1), (2, 1, 3)]]  # by step and rank


@pytest.mark.ranks(2)
def test_uneven_and_empty_micro_batches_update_buffers_once_without_more_messages():
    torch.manual_seed(0)
    alone = Parallel()
    model = DistributedDataParallel(convert_sync_batchnorm(copy.deepcopy(alone)))
    plain = copy.deepcopy(model)
    everything, accumulated = [], []
    for number, splits in enumerate(SPLITS):
        drawn = [draw(split, 10 * number + rank) for rank, split in enumerate(splits)]
        everything.append(torch.cat([batch for _, batch in drawn]))
        batches, _ = drawn[dist.get_rank()]
        before = copy.deepcopy(model.state_dict())
        model.zero_grad()
        with collectives() as counted, accumulate_statistics(model):
            accumulated.append((batches, *train_batches(model, batches)))
            steps.assert_same_bits(model.state_dict(), before)
    for batches, *results in accumulated:
        plain.zero_grad()
        with collectives() as expected:
            steps.assert_same_bits(tuple(results), train_batches(plain, batches))
    assert counted == expected
    check_buffers(model.module, alone, everything)


@pytest.mark.ranks(2, new_job=True)  # layers that were compiled in this job have shorter error messages
@pytest.mark.parametrize("calls", [0, 3])
def test_accumulating_on_one_rank_raises_on_all(calls):
    layer, input = SyncBatchNorm(3), torch.randn(4, 3)
    for _ in range(calls):  # until the ranks expect the message and send no probe
        layer(input)
    with steps.unchanged(layer), pytest.raises(RuntimeError, match="in accumulate_statistics"):  # noqa: SIM117
        with accumulate_statistics(layer) if dist.get_rank() else nullcontext():
            layer(input)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_are_not_counted(reentrant):
    whole, (batches, batch) = Parallel(), draw((3, 4))
    model = convert_sync_batchnorm(copy.deepcopy(whole))
    with accumulate_statistics(model):
        first, second = (checkpoint(model, own.requires_grad_(), use_reentrant=reentrant) for own in batches)
        first.sum().backward()
    second.sum().backward()  # recomputes after the context
    check_buffers(model, whole, [batch])


@pytest.mark.parametrize("is_lazy", [False, True])
def test_replicas_and_lazy_layers_accumulate(is_lazy):
    whole = nn.BatchNorm1d(3, momentum=None)
    if is_lazy:
        model = convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d(momentum=None), nn.LazyBatchNorm1d()))
    else:
        model = parallel(convert_model(nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3))), "cpu", 2)
    for number in range(2):
        batches, batch = draw((3, 5), number)
        with accumulate_statistics(model):
            train_batches(model, [own.float() for own in batches])
        whole(batch.float())
    first, second = (layer for layer in model.modules() if isinstance(layer, SyncBatchNorm))
    torch.testing.assert_close(first.state_dict(), whole.state_dict())
    assert second.num_batches_tracked == 2


def test_any_number_of_micro_batches_compiles_once():
    counters.clear()
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3, momentum=None)).double()
    model, eager = (convert_sync_batchnorm(copy.deepcopy(model), process_group=twins) for twins in (Twin(), Twin()))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for number in range(3):
        batches, _ = draw((4,) * (number + 1), number)
        with accumulate_statistics(model), accumulate_statistics(eager):
            torch.testing.assert_close(train_batches(compiled, batches), train_batches(eager, batches))
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert counters["stats"]["unique_graphs"] == 1


def test_errors_evaluation_and_nonfinite_batches_leave_the_buffers_unchanged():
    model = convert_sync_batchnorm(Parallel())
    skipping = SyncBatchNorm(3, skip_nonfinite=True).double()
    batches, batch = draw((3, 4))
    before = copy.deepcopy([model.state_dict(), skipping.state_dict()])
    with pytest.raises(ValueError, match="size"), accumulate_statistics(model):  # noqa: PT012
        model(batches[0])
        model(batch[:1, :, :1])
    with accumulate_statistics(skipping), accumulate_statistics(model):
        skipping(batches[0])
        skipping(batches[1] * torch.inf)
        model(batch[:0])
        model.eval()(batch)
    steps.assert_same_bits([model.state_dict(), skipping.state_dict()], before)
    skipping(batch)  # after the context, each batch counts
    assert skipping.num_batches_tracked == 1


def test_nested_contexts_and_replaced_buffers_update_once():
    whole, (batches, batch) = nn.BatchNorm1d(3).double(), draw((3, 4))
    model = nn.Sequential(SyncBatchNorm(3))
    with accumulate_statistics(model):
        for own in batches:
            with accumulate_statistics(model[0]):
                model.double()(own)
    check_buffers(model[0], whole, [batch])


class Views(nn.BatchNorm1d):
    def forward(self, input):
        return F.batch_norm(input, self.running_mean[:], self.running_var[:], self.weight, self.bias, True)


def test_calls_that_cannot_accumulate_raise(monkeypatch):
    layer = convert_sync_batchnorm(Views(3))
    with pytest.raises(RuntimeError, match="running_mean: while statistics accum"), accumulate_statistics(layer):
        layer(torch.randn(4, 3))
    monkeypatch.setattr(accumulation, "is_capturing", lambda: True)
    layer = SyncBatchNorm(3)
    with pytest.raises(RuntimeError, match="a CUDA graph cannot be captured"), accumulate_statistics(layer):
        layer(torch.randn(4, 3))


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("differ", [False, True])
def test_a_step_in_which_headers_differ_updates_no_buffer(is_sum, differ):
    """On CPU, the call's op also raises; on CUDA, a later call does."""
    layer, accumulated = SyncBatchNorm(1), Accumulation(SyncBatchNorm(1))
    for number in range(3):
        headers = [[1, 2, number], [1, 2, number + differ * (number == 1)]]
        gathered = torch.tensor([[3.0, 1, 2, 0, *header] for header in headers])
        if is_sum:
            parts = [[word for part in header for word in (part, part**2)] for header in headers]
            gathered = torch.tensor([[6.0, 20, 2, *header] for header in parts], dtype=torch.float64).sum(0)
        accumulated.take(Received(gathered, 2), NO_BUFFERS, Options())
    accumulated.update_buffers(layer)
    assert [*layer.running_mean.tolist(), layer.num_batches_tracked] == ([0, 0] if differ else [pytest.approx(0.3), 1])
