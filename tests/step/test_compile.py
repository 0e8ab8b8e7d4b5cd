"""torch.compile in one graph: compiled models on ranks equal eager ones."""

import copy
import pickle
import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import SyncBatchNorm, SyncBatchNorm2d, convert_sync_batchnorm, with_bagua
from tests.helpers.cases import laid_out
from tests.helpers.checkpoints import CHECKPOINTS
from tests.helpers.observed import MESSAGE_IN_GRAPH
from tests.helpers.own_groups import forget_groups, mean_by
from tests.helpers.rows import rows
from tests.helpers.steps import step
from tests.helpers.user_layers import BatchNormAct


class Checkpointed(nn.Sequential):
    checkpoint = staticmethod(CHECKPOINTS["non-reentrant"])

    def forward(self, input):
        return self.checkpoint(super().forward, input)


class SelectivelyCheckpointed(Checkpointed):
    checkpoint = staticmethod(CHECKPOINTS["selective, some"])


IF_TRACED = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.compile traces the redirection from 2.13 on")
CHECKPOINTED = {"checkpointed": Checkpointed, "selectively checkpointed": SelectivelyCheckpointed}


def make_model(kind="plain"):
    """Returns a block and a convolution; usually one layer, because each takes seconds to compile."""
    torch.manual_seed(0)
    fused = partial(SyncBatchNorm2d, activation="silu", eps=0.5, eps_mode="clamp")
    norm = {"own forward": BatchNormAct, "fused": fused}.get(kind, partial(nn.BatchNorm2d, momentum=None))
    block = CHECKPOINTED.get(kind, nn.Sequential)(nn.Conv2d(2, 4, 3), norm(4), nn.Sigmoid())
    last = [nn.BatchNorm2d(3)] if kind == "two layers" else []
    return convert_sync_batchnorm(nn.Sequential(block, nn.Conv2d(4, 3, 3), *last))


def draw(batch, seed):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    return torch.randn(batch, 2, 8, 8, generator=generator), torch.randn(batch, 3, 4, 4, generator=generator)


def compare(backend, *, kind="plain", wrap=None, wrap_first=False, autocast=False, batches=(9, 9)):
    """Trains a compiled and an eager model; returns the number of compiled graphs."""
    counters.clear()
    eager = make_model(kind)
    original = copy.deepcopy(eager)
    if wrap_first:  # code of wrappers around the forward breaks the graph
        original = wrap(original)
    compiled = torch.compile(original, backend=backend, fullgraph=not wrap_first)
    if wrap is not None:
        eager, compiled = wrap(eager), compiled if wrap_first else wrap(compiled)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-3, "atol": 3e-4}  # gradients of sums cancel
    more = 0 if backend == "inductor" else dist.get_rank()  # for equal sizes, ranks share the compiled kernels
    for number, batch in enumerate(batches):
        input, grad_output = draw(batch + more, number)
        context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        results = [[*step(each, input, grad_output, call=context(each)).values()] for each in (compiled, eager)]
        torch.testing.assert_close(*results, **tolerance)
        assert results[0][0].stride() == results[1][0].stride()
    graphs = counters["stats"]["unique_graphs"]
    if kind not in ("plain", "two layers") and backend != "inductor":
        torch.testing.assert_close(compiled.eval()(input), eager.eval()(input), **tolerance)
    return graphs


def test_changing_batch_sizes_compile_at_most_twice(pool):
    assert pool.run(partial(compare, "aot_eager", batches=(20, 21, 29)), 2) == [2, 2]


SCALAR = {"cpp.simdlen": 1}  # detecting vector instructions takes long


@pytest.mark.ranks(2)
def test_inductor_equals_eager():
    """Statistics read the convolution's channels_last output (chosen by inductor) rather than a planar copy."""
    # Cache keys do not contain the tags of ops.
    settings = SCALAR | {"fx_graph_cache": False}
    with torch._inductor.config.patch(settings), torch._functorch.config.patch(enable_autograd_cache=False):
        _, (forward, *_) = run_and_get_code(partial(compare, "inductor", kind="fused"))
    first, _ = re.findall(r"(\w+) = extern_kernels\.convolution", forward)
    assert re.findall(r"batch_norm_stats\.default\((\w+),", forward) == [first]


class ReadsBuffers(nn.Module):
    """Reads the buffers before and after the layer updates them."""

    def __init__(self, **options):
        super().__init__()
        self.bn = SyncBatchNorm2d(2, **options)
        self.bn.running_var = laid_out(self.bn.running_var, "sliced")

    def forward(self, input):
        before = self.bn.running_mean * 2 + self.bn.running_var + self.bn.num_batches_tracked
        output = self.bn(input) * before.view(1, -1, 1, 1)
        after = self.bn.running_mean - self.bn.running_var * 3 + self.bn.num_batches_tracked
        return output + after.view(1, -1, 1, 1)


ALL_OPTIONS = {"momentum": None, "skip_nonfinite": True, "dtype": torch.float64}


@pytest.mark.parametrize("options", rows([{}, ALL_OPTIONS], [ALL_OPTIONS]), ids=str)
@pytest.mark.ranks(2)
def test_compiled_code_reads_buffers_before_and_after_their_update(options):
    eager = ReadsBuffers(**options)
    compiled = torch.compile(copy.deepcopy(eager), backend="inductor", fullgraph=True, options=SCALAR)
    for number in range(3):
        input = draw(5, number)[0].to(eager.bn.weight.dtype)
        torch.testing.assert_close(compiled(input), eager(input), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(compiled._orig_mod.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.parametrize(("backend", "wrap", "wrap_first"), [
    ("aot_eager", DistributedDataParallel, True), ("eager", partial(with_bagua, optimizers=[]), False)
])  # fmt: skip
def test_compiled_data_parallel_models_equal_eager(pool, backend, wrap, wrap_first):
    pool.run(partial(compare, backend, kind="two layers", wrap=wrap, wrap_first=wrap_first), 2)


@pytest.mark.parametrize("kind", [
    pytest.param("own forward", marks=IF_TRACED), *rows(CHECKPOINTED, ["selectively checkpointed"]), "autocast"
])  # fmt: skip
def test_compiled_models_of_other_kinds_equal_eager(pool, kind):
    pool.run(partial(compare, "aot_eager", kind=kind, autocast=kind == "autocast"), 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", rows(["eager", "aot_eager"], ["eager"]))
def test_second_derivatives_of_compiled_code_raise(backend):
    layer = SyncBatchNorm(3)
    input = torch.randn(4, 3, requires_grad=True)
    loss = torch.compile(layer, backend=backend, fullgraph=True)(input).sin().sum()
    with pytest.raises(RuntimeError, match=r"sync_batch_norm: compiled code|not currently support double backward"):
        (torch.autograd.grad(loss, layer.weight, create_graph=True)[0] + input).sum().backward()


def layer_in(kind):
    """Returns a layer that stores the mean of the last batch, with a kind of process group."""
    kinds = {"group": lambda: dist.new_group([0, 1]), "mesh": lambda: init_device_mesh("cpu", (2,))}
    process_group = kinds[kind]() if isinstance(kind, str) and kind in kinds else kind
    return SyncBatchNorm(1, momentum=1.0, process_group=process_group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "is_loaded"), rows([
    *((kind, False) for kind in (None, "group", "mesh", "node", 2, [[1, 0]], [[0], [1]])), ("group", True), (None, True)
], [None, "group", "mesh", "node", [[0], [1]]], 2), ids=str)  # fmt: skip
def test_every_kind_of_group_compiles_in_one_graph(kind, is_loaded):
    forget_groups()  # tracing creates them
    layer = pickle.loads(pickle.dumps(layer_in(kind))) if is_loaded else layer_in(kind)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    mean = dist.get_rank() if kind == [[0], [1]] else 0.5
    assert [mean_by(compiled), mean_by(layer, 10)] == [mean, mean + 10]
    if kind == "group":
        layer.process_group = 1
        assert mean_by(compiled) == dist.get_rank()


compiled_once, jobs = {}, []


def compiled_in_an_earlier_job(kind):
    jobs.append(dist.group.WORLD)  # as torch does, if it is imported completely only after the job began
    if kind not in compiled_once:
        layer = layer_in(kind)
        # Compiled code first: an eager call would replace the communicator of the earlier job.
        compiled_once[kind] = torch.compile(layer, backend="eager", fullgraph=True), layer
    return [mean_by(layer, offset) for offset, layer in enumerate(compiled_once[kind])]


@pytest.mark.parametrize("kind", rows([None, "node"], ["node"]))
def test_a_compiled_layer_uses_the_groups_of_the_next_job(pool, kind):
    for world_size in (2, 3, 2):
        mean = (world_size - 1) / 2
        assert pool.run(compiled_in_an_earlier_job, world_size, kind) == [[mean, mean + 1]] * world_size


def names_of(graph):
    # A mutating op appears as an argument of the node that calls it.
    called = (target for node in graph.nodes for target in (node.target, *node.args[:1]))
    return Counter(target.overloadpacket.__name__ for target in called if hasattr(target, "overloadpacket"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", rows(["two layers", "fused", "selectively checkpointed"], ["fused", *CHECKPOINTED]))
def test_collectives_and_sums_are_in_the_graph(kind):
    """Elementwise ops are decomposed, so that the compiler can fuse them. A saved message is not recomputed."""
    graphs = []  # the forward and backward graphs that inductor would get

    def keep(graph_module, _):
        graphs.append(names_of(graph_module.graph))
        return graph_module.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    input, grad_output = draw(9, 0)
    step(torch.compile(make_model(kind), backend=backend, fullgraph=True), input, grad_output)
    layers = 2 if kind == "two layers" else 1
    forward, backward = graphs
    assert forward[MESSAGE_IN_GRAPH] == backward[MESSAGE_IN_GRAPH] == layers
    assert forward["batch_norm_stats"] <= layers
    assert forward["batch_norm_gather_stats"] <= 2 * layers  # merges in the graph, and updates of the buffers
    assert backward["batch_norm_backward_reduce"] <= layers
    assert not {"batch_norm_elemt", "batch_norm_backward_elemt"} & {*forward, *backward}


@pytest.mark.parametrize("backend", rows(["eager", "aot_eager"], ["aot_eager"]))
@pytest.mark.ranks(2)
def test_a_checkpoint_around_a_compiled_layer_updates_running_statistics_once(backend):
    layer, twin = (SyncBatchNorm(3, momentum=None, process_group=None) for _ in range(2))
    call = partial(CHECKPOINTS["non-reentrant"], torch.compile(layer, backend=backend))
    for _ in range(2):
        input, grad_output = torch.randn(2, 4, 3)
        for each in (call, twin):
            each(input.requires_grad_()).backward(grad_output)
        torch.testing.assert_close(layer.state_dict(), twin.state_dict())
        twin(input.detach())  # no recomputation remains active in this thread
        layer(input.detach())
    torch.testing.assert_close(layer.state_dict(), twin.state_dict())
    torch.testing.assert_close([p.grad for p in layer.parameters()], [p.grad for p in twin.parameters()])
