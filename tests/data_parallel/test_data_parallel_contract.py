"""Replicas in threads equal a single layer on the whole batch."""

import copy
import gc
import pickle
from weakref import ref

import pytest
import torch
from torch import nn

import bagua_syncbn
from bagua_syncbn import vacancy
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.data_parallel import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, convert_model
from tests.helpers.one_rank import Twin
from tests.helpers.replicated import PLACES, Steps, build, draw_step, parallel, run
from tests.helpers.steps import assert_same_bits, draw

pytestmark = pytest.mark.usefixtures("single_threaded")


# For 4 devices, 7 samples make chunks of 2, 2, 2, 1; for 3, 8 make 3, 3, 2. tests/contract/test_ways.py has the rest.
@pytest.mark.parametrize(("count", "samples"), [(1, 7), (2, 1), (3, 8), (4, 7)])
@pytest.mark.parametrize("place", PLACES)
def test_replicas_equal_the_full_batch(place, count, samples):
    torch.manual_seed(1)
    expected = build(eps=1e-3)
    actual = parallel(convert_model(copy.deepcopy(expected)), place, count)
    for step in range(3):
        given = draw_step(samples, step)
        torch.testing.assert_close(run(actual, *given), run(expected, *given))
    batch, _ = given
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = actual(batch)
            torch.testing.assert_close(output.cpu(), expected(batch))
        assert not output.requires_grad
    torch.testing.assert_close(actual.eval()(batch).cpu(), expected.eval()(batch))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("detached", ["input", "output", "forward"])
@pytest.mark.parametrize("place", PLACES)
def test_a_partly_detached_replica_still_takes_part_in_the_statistics(place, detached, rank):
    """In a single replica, the layer's input or output is detached, or gradients are disabled."""

    def script(module, copy_id, input):
        what = detached if copy_id == rank else ""
        with torch.set_grad_enabled(what != "forward"):
            output = module.late(input.detach() if what == "input" else input)
        return output.detach() if what == "output" else output

    expected = nn.BatchNorm1d(2).double()
    actual = parallel(Steps(script).double(), place, 2)
    batch = draw(6, 2)
    parts = [part.clone().requires_grad_() for part in batch.split(3)]
    inputs = [part.detach() if other == rank and detached != "output" else part for other, part in enumerate(parts)]
    outputs = expected(torch.cat(inputs)).split(3)
    sum(output.sin().sum() for other, output in enumerate(outputs) if other != rank or detached == "input").backward()

    whole = batch.clone().requires_grad_()
    actual(whole).sin().sum().backward()
    for grad, part in zip(whole.grad.split(3), parts, strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(part) if part.grad is None else part.grad)
    torch.testing.assert_close(actual.module.late.weight.grad.cpu(), expected.weight.grad)


@pytest.mark.parametrize("place", PLACES)
def test_forward_frees_the_replicas_and_changes_only_the_users_buffers(place):
    seen = []

    def script(module, copy_id, input):
        seen.append((ref(module), module.late.running_mean.data_ptr()))
        return module.late(input)

    model = Steps(script)
    wrapped, buffers = parallel(model, place, 3), dict(model.late.named_buffers())
    gc.collect()
    gc.disable()
    try:
        output = wrapped(torch.randn(6, 2))
        if place != "several GPUs":  # there, torch's class runs the replicas
            assert [replica() for replica, _ in seen] == [None] * 3
        output.sum().backward()
    finally:
        gc.enable()
    pointers = {pointer for _, pointer in seen}
    assert len(pointers) == 3
    assert buffers["running_mean"].data_ptr() in pointers
    assert all(getattr(model.late, name) is buffer for name, buffer in buffers.items())
    assert model.late.num_batches_tracked == 1


def test_results_have_the_same_bits_every_time():
    def step():
        torch.manual_seed(0)
        return run(parallel(build(SynchronizedBatchNorm2d), "cpu", 4), *draw_step(8))

    first = step()
    for _ in range(5):
        assert_same_bits(step(), first)


def test_backward_can_be_repeated_and_takes_a_batch_of_gradients():
    model, (batch, _) = convert_model(parallel(build(), "cpu", 2)), draw_step(4)
    output = model(batch.requires_grad_())
    grad_outputs = draw(3, *output.shape)
    grads = [torch.autograd.grad(output, batch, each, retain_graph=True)[0] for each in grad_outputs]
    together = torch.autograd.grad(output, batch, grad_outputs, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(together[0], torch.stack(grads))
    assert torch.equal(torch.autograd.grad(output, batch, grad_outputs[0])[0], grads[0])


def test_a_weight_that_changes_before_backward_raises():
    layer = SynchronizedBatchNorm1d(3)
    output = parallel(layer, "cpu", 2)(torch.randn(6, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_compiled_modules_run_uncompiled_as_replicas():
    model = nn.Sequential(nn.Sequential(SynchronizedBatchNorm1d(3)))
    model[0].compile(backend="eager")  # compiled code refers to this object
    model.compile(backend="eager")
    batch = torch.randn(6, 3)
    torch.testing.assert_close(parallel(model, "cpu", 2)(batch), nn.BatchNorm1d(3)(batch))
    assert model[0][0].num_batches_tracked == 1


def test_wrappers_of_torch_compile_raise_and_keep_the_model():
    model, batch = nn.Sequential(SynchronizedBatchNorm1d(3)), torch.randn(6, 3)
    compiled = torch.compile(model, backend="eager")
    for network, name in ((compiled, "OptimizedModule"), (nn.Sequential(compiled), "OptimizedModule '0'")):
        message = f"module: cannot replicate {name}, .* call model.compile\\(\\) instead of torch.compile\\(model\\)"
        with pytest.raises(TypeError, match=message):
            parallel(network, "cpu", 2)(batch)
    torch.testing.assert_close(parallel(model, "cpu", 2)(batch), nn.BatchNorm1d(3)(batch))


def test_replicas_cannot_synchronize_over_ranks():
    layer = SynchronizedBatchNorm1d(3)
    layer.process_group = Twin()
    model = parallel(layer, "cpu", 2)
    with pytest.raises(RuntimeError, match="SyncBatchNorm1d: replicas cannot synchronize over several ranks"):
        model(torch.randn(4, 3))
    layer.process_group = LOCAL
    model(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1


# bagua_syncbn.vacancy has the names and the numerics of Synchronized-BatchNorm-PyTorch.

CLASSES = [vacancy.SynchronizedBatchNorm1d, vacancy.SynchronizedBatchNorm2d, vacancy.SynchronizedBatchNorm3d]
TORCHS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]


def test_only_replicas_in_training_clamp_the_variance():
    model, given = build(eps=1e-3), draw_step(7)
    synchronized = vacancy.convert_model(copy.deepcopy(model))
    clamped = bagua_syncbn.convert_sync_batchnorm(copy.deepcopy(model))
    clamped[0].eps_mode = clamped[1][1][0].eps_mode = "clamp"
    in_training = run(parallel(synchronized, "cpu", 2), *given)
    torch.testing.assert_close(in_training, run(clamped, *given))
    assert not torch.allclose(in_training["output"], run(model, *given)["output"])
    model.load_state_dict(synchronized.state_dict())
    expected = run(model.eval(), *given)
    for each in (synchronized.eval(), parallel(synchronized, "cpu", 2)):
        torch.testing.assert_close(run(each, *given), expected)
    torch.testing.assert_close(run(synchronized.train(), *given), run(model.train(), *given))


def test_models_are_built_converted_pickled_and_reverted():
    built = nn.Sequential(*(cls(3) for cls in CLASSES))
    converted = vacancy.convert_model(nn.DataParallel(nn.Sequential(*(cls(3) for cls in TORCHS))))
    assert isinstance(converted, vacancy.DataParallelWithCallback)
    assert [type(layer) for layer in pickle.loads(pickle.dumps(converted.module))] == CLASSES
    assert [type(layer) for layer in bagua_syncbn.revert_sync_batchnorm(built)] == TORCHS
    assert all(hasattr(vacancy, name) for name in vacancy.__all__)
