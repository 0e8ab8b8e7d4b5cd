"""accumulate_statistics: buffers are updated once, as if all micro-batches were one batch."""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import SyncBatchNorm, accumulate_statistics, convert_sync_batchnorm, ops, sync_batch_norm
from bagua_syncbn.data_parallel import convert_model
from bagua_syncbn.options import Options
from bagua_syncbn.running_statistics import accumulation
from bagua_syncbn.running_statistics.accumulation import accumulation_of
from benchmarks.one_rank import Twin
from tests.helpers.observed import collectives
from tests.helpers.replicated import parallel
from tests.helpers.user_layers import BatchNormAct1d


class Beside(nn.Module):
    """Layers of every kind in parallel, so that all buffers depend on the same input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.BatchNorm1d(3),
                nn.BatchNorm1d(3, momentum=None),
                BatchNormAct1d(3),
                nn.BatchNorm1d(3, momentum=0.5).float(),
                nn.BatchNorm1d(3, track_running_stats=False),
                nn.BatchNorm1d(3).eval(),
            ]
        ).double()
        self.convolution = nn.Conv1d(3, 3, 1).double()

    def forward(self, input):
        return sum(layer(self.convolution(input)) for layer in self.layers)


def draw(split, seed=0):
    """Returns the micro-batches of a step, and the whole batch."""
    batch = torch.randn(sum(split), 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return batch.split(split), batch


def step(model, batches):
    outputs = []
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
            outputs.append(model(batch))
            outputs[-1].backward(batch.cos())
    return [output.detach() for output in outputs], [parameter.grad for parameter in model.parameters()]


def expected_buffers(model, steps):
    """Trains ``model`` on the whole batch of each step."""
    for batches in steps:
        with torch.no_grad():
            model(batches)
    return dict(model.named_buffers())


SPLITS = [[(2, 0, 5), (3, 4, 0)], [(1, 3, 2), (0, 6, 1)], [(1, 1, 1), (2, 1, 3)]]  # by step and rank


@pytest.mark.ranks(2)
def test_accumulation_takes_uneven_and_empty_micro_batches():
    torch.manual_seed(0)
    model = convert_sync_batchnorm(Beside())
    plain, alone = DistributedDataParallel(copy.deepcopy(model)), Beside()
    alone.load_state_dict(model.state_dict())
    model = DistributedDataParallel(model)
    everything, accumulated = [], []
    for number, splits in enumerate(SPLITS):
        drawn = [draw(split, 10 * number + rank) for rank, split in enumerate(splits)]
        everything.append(torch.cat([batch for _, batch in drawn]))
        batches, _ = drawn[dist.get_rank()]
        before = copy.deepcopy(model.state_dict())
        model.zero_grad()
        with collectives() as counted, accumulate_statistics(model):
            accumulated.append((batches, *step(model, batches)))
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for batches, *results in accumulated:
        plain.zero_grad()
        with collectives() as expected:
            torch.testing.assert_close(tuple(results), step(plain, batches), rtol=0, atol=0)
    assert counted == expected
    buffers = dict(model.module.named_buffers())
    torch.testing.assert_close(buffers, expected_buffers(alone, everything))


@pytest.mark.ranks(2, new_job=True)  # layers that were compiled in a job say less since
@pytest.mark.parametrize("calls", [0, 3])
def test_accumulating_on_one_rank_raises_on_all(calls):
    layer = SyncBatchNorm(3)
    for _ in range(calls):  # until the ranks expect the message and send no probe
        layer(torch.randn(4, 3))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="in accumulate_statistics"):  # noqa: SIM117
        with accumulate_statistics(layer) if dist.get_rank() else nullcontext():
            layer(torch.randn(4, 3))
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(8))
def test_drawn_micro_batches_equal_the_whole_batch(seed):
    drawn = random.Random(seed)
    steps = [drawn.choices([0, 1, 2, 5], k=drawn.randint(1, 5)) for _ in range(3)]
    model = convert_sync_batchnorm(Beside())
    model.layers[2].momentum = None
    whole = copy.deepcopy(model)
    for number, split in enumerate(steps):
        batches, batch = draw(split, number)
        with accumulate_statistics(model):
            step(model, batches)
        expected = expected_buffers(whole, [batch])
        torch.testing.assert_close(dict(model.named_buffers()), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("repeated", ["within", "after"])
def test_recomputed_calls_are_not_counted(reentrant, repeated):
    model = convert_sync_batchnorm(Beside())
    plain = copy.deepcopy(model)
    batches, batch = draw((3, 4))
    outputs = []
    with accumulate_statistics(model):
        for own in batches:
            output = checkpoint(model, own.clone().requires_grad_(), use_reentrant=reentrant)
            if repeated == "within":
                output.backward(own.cos())
            outputs.append(output)
    if repeated == "after":
        torch.autograd.backward(outputs, [own.cos() for own in batches])
    _, grads = step(plain, batches)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], grads)
    plain.load_state_dict(Beside().state_dict() | plain.state_dict())
    for layer in plain.layers:
        layer.reset_running_stats()
    torch.testing.assert_close(dict(model.named_buffers()), expected_buffers(plain, [batch]))


@pytest.mark.parametrize(("make", "wrap"), [
    (nn.BatchNorm1d, lambda model: parallel(model, "cpu", 2)),
    (lambda _, **options: nn.LazyBatchNorm1d(**options), lambda model: model),
], ids=["replicas", "lazy layers"])  # fmt: skip
def test_replicas_and_lazy_layers_accumulate(make, wrap):
    whole, model = nn.BatchNorm1d(3, momentum=None), nn.Sequential(make(3, momentum=None), make(3))
    model = wrap(convert_model(model) if make is nn.BatchNorm1d else convert_sync_batchnorm(model))
    for number in range(2):
        batches, batch = draw((3, 5), number)
        with accumulate_statistics(model):
            step(model, [own.float() for own in batches])
        whole(batch.float())
    first, second = (layer for layer in model.modules() if isinstance(layer, SyncBatchNorm))
    torch.testing.assert_close(first.state_dict(), whole.state_dict())
    assert second.num_batches_tracked == 2


def test_any_number_of_micro_batches_compiles_once():
    counters.clear()
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3, momentum=None)).double()
    model, eager = (convert_sync_batchnorm(copy.deepcopy(model), process_group=twins) for twins in (Twin(), Twin()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for number in range(3):
        batches, _ = draw((4,) * (number + 1), number)
        with accumulate_statistics(model), accumulate_statistics(eager):
            torch.testing.assert_close(step(compiled, batches), step(eager, batches))
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert counters["stats"]["unique_graphs"] == 1


def test_errors_and_evaluation_leave_the_buffers_unchanged():
    model = convert_sync_batchnorm(Beside())
    skipping = SyncBatchNorm(3, skip_nonfinite=True).double()
    before = copy.deepcopy([model.state_dict(), skipping.state_dict()])
    batches, batch = draw((3, 4))
    with pytest.raises(ValueError, match="size"), accumulate_statistics(model):  # noqa: PT012
        model(batches[0])
        model(batch[:1, :, :1])
    with accumulate_statistics(skipping), accumulate_statistics(model):
        skipping(batches[0])
        skipping(batches[1] * torch.inf)
        model.eval()(batch)
    torch.testing.assert_close([model.state_dict(), skipping.state_dict()], before, rtol=0, atol=0)
    skipping(batch)  # and afterwards each batch counts
    sync_batch_norm(batch, skipping.running_mean, skipping.running_var)
    assert skipping.num_batches_tracked == 1
    assert not torch.equal(skipping.running_mean, before[1]["running_mean"])


def test_invalid_accumulation_raises(monkeypatch):
    class Views(nn.BatchNorm1d):
        def forward(self, input):
            return F.batch_norm(input, self.running_mean[:], self.running_var[:], self.weight, self.bias, True)

    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    nested = r"'0' is inside another accumulate_statistics"
    with accumulate_statistics(model), pytest.raises(RuntimeError, match=nested), accumulate_statistics(model):
        pass
    views = convert_sync_batchnorm(Views(3))
    with pytest.raises(RuntimeError, match="running_mean: expected the layer's buffer"), accumulate_statistics(views):
        views(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="buffers of '0' were replaced inside"), accumulate_statistics(model):  # noqa: PT012
        model(torch.randn(4, 3))
        model.double()
    assert model[0].num_batches_tracked == 0
    monkeypatch.setattr(accumulation, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a CUDA graph cannot be captured"), accumulate_statistics(model):
        model(torch.randn(4, 3).double())


@pytest.mark.parametrize("adds_up", [False, True])
@pytest.mark.parametrize("differ", [False, True])
def test_a_step_in_which_headers_differ_updates_no_buffer(adds_up, differ):
    """Unless an op notices: on CPU it raises, on CUDA a later call does."""
    layer = SyncBatchNorm(1)
    with accumulate_statistics(layer):
        for call in range(2):
            headers = [[1, 2, call], [1, 2, call + differ * call]]
            gathered = torch.tensor([[3.0, 1, 2, 0, *header] for header in headers])
            if adds_up:
                parts = [[word for part in header for word in (part, part**2)] for header in headers]
                gathered = torch.tensor([[6.0, 20, 2, *header] for header in parts], dtype=torch.float64).sum(0)
            accumulation_of(layer).take(gathered, 2, ops.Buffers(*layer.buffers()), Options())
    assert [*layer.running_mean.tolist(), layer.num_batches_tracked] == ([0, 0] if differ else [pytest.approx(0.3), 1])
