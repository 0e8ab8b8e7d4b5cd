"""If a replica fails, all replicas raise, and no replica hangs."""

import copy
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import masked
from bagua_syncbn.data_parallel import SynchronizedBatchNorm1d, execute_replication_callbacks, replicas
from tests.helpers.replicated import Steps, parallel, promptly

pytestmark = pytest.mark.usefixtures("single_threaded")


class OwnError(Exception):
    """Requires a keyword argument, so that re-raising works only with the same object."""

    def __init__(self, *, detail):
        super().__init__(7)
        self.detail = detail


@pytest.mark.parametrize(("failing", "after"), [(0, "nothing"), (0, "early"), (2, "early"), (0, "late")])
def test_a_replica_that_raises_frees_the_others(failing, after):
    def script(module, copy_id, input):
        for name in ("nothing", "early", "late"):
            if name != "nothing":
                input = getattr(module, name)(input)
            if name == after and copy_id == failing:
                raise OwnError(detail=copy_id) from KeyError("cause")
        return input

    module = Steps(script)
    model = parallel(module, "cpu", 3)
    with pytest.raises(OwnError) as caught:
        promptly(model, torch.randn(6, 2))
    assert caught.value.detail == failing
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__context__ is None
    assert any(entry.name == "script" for entry in caught.traceback)
    assert len(module.freed) == (0 if after == "late" else 2)
    for error in module.freed:
        assert error.__cause__ is caught.value
        assert "SyncBatchNorm1d '" in str(error)
        assert "OwnError: 7" in str(error)
    module.script = lambda module, copy_id, input: module.late(input)
    assert model(torch.randn(6, 2)).shape == (6, 2)  # no state remains


def test_an_invalid_input_raises_an_error_that_names_the_layer():
    model = parallel(Steps(lambda module, copy_id, input: module.late(input.long())), "cpu", 2)
    with pytest.raises(TypeError, match=r"^SyncBatchNorm1d: input: expected .*, got torch.int64"):
        promptly(model, torch.randn(4, 2))


@pytest.mark.parametrize("is_argument", [True, False])
def test_masks_raise(is_argument):
    def script(module, copy_id, input):
        mask = torch.ones(1, 1, dtype=torch.bool)
        if is_argument:
            return module.late(input, mask=mask)
        with masked(module, mask):
            return module.late(input)

    with pytest.raises(RuntimeError, match="SyncBatchNorm1d 'late': masks are not supported in replicas"):
        promptly(parallel(Steps(script), "cpu", 2), torch.randn(6, 2))


def test_a_hook_of_the_model_that_raises_frees_the_others():
    def fail(module, args):
        if module.copy_id == 1:
            raise SystemExit("mine")

    module = Steps(lambda module, copy_id, input: module.late(input))
    module.register_forward_pre_hook(fail)
    with pytest.raises(SystemExit, match="mine"):
        promptly(parallel(module, "cpu", 2), torch.randn(4, 2))
    assert len(module.freed) == 1


def other_channels(module, copy_id, input):
    module.late.weight = module.late.bias = module.late.running_mean = module.late.running_var = None
    module.late.track_running_stats = False
    return module.late(input[:, : copy_id + 1])


def more_calls(more, goes_on, module, copy_id, input):
    for _ in range(2 + (copy_id == more)):
        input = module.early(input)
    return module.late(input) if goes_on else input


def skips(wait, module, copy_id, input):
    if copy_id < 2:
        return module.late(input)
    time.sleep(wait)  # the other two arrive first
    return input


def other_order(module, copy_id, input):
    first, second = (module.early, module.late)[:: 1 - 2 * copy_id]
    return second(first(input))


ORDER = "replica .*'(early.*late|late.*early)'; all replicas must call the same layers in the same order"


@pytest.mark.parametrize(("count", "script", "told"), [
    (2, other_channels, "equal size"),
    (2, partial(more_calls, 0, False), r"'early': replica 0 waits for replicas \[1\], which ended"),
    (2, partial(more_calls, 1, False), r"'early': replica 1 waits for replicas \[0\], which ended"),
    (2, partial(more_calls, 1, True), ORDER),
    (3, partial(skips, 0), r"'late': replica [01] waits for replicas \[.*2\], which ended"),
    (3, partial(skips, 0.1), r"'late': replica [01] waits for replicas \[2\], which ended"),
    (2, other_order, ORDER),
])  # fmt: skip
def test_replicas_that_call_different_layers_raise(count, script, told):
    with pytest.raises(RuntimeError, match=told) as caught:
        promptly(parallel(Steps(script), "cpu", count), torch.randn(2 * count, 2))
    assert not isinstance(caught.value, replicas.ReplicaError)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_in_backward_raises(use_reentrant):
    def script(module, copy_id, input):
        return checkpoint(module.late, input, use_reentrant=use_reentrant)

    output = parallel(Steps(script), "cpu", 2)(torch.randn(4, 2, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"'late': called after its replica's forward.*checkpointing"):
        promptly(output.sum().backward)


@pytest.mark.parametrize(("first", "then", "count", "use_reentrant"), [
    (True, True, 2, True), (True, True, 1, False), (True, False, 2, False), (False, True, 2, True),
    (False, False, 2, False),
])  # fmt: skip
def test_checkpoints_around_replicas_never_update_running_statistics_twice(first, then, count, use_reentrant):
    layer = SynchronizedBatchNorm1d(2).train(first)
    model = parallel(nn.Sequential(layer), "cpu", 2)

    def region(input):
        return model(input[:count]).sin()  # sin saves its input, so the checkpoint reruns the replicas

    before = copy.deepcopy(layer.state_dict())
    refusal = pytest.raises(RuntimeError, match=r"'0': activation checkpointing cannot recompute replicas")
    with refusal if first or then else nullcontext():
        output = checkpoint(region, torch.randn(4, 2, 3, requires_grad=True), use_reentrant=use_reentrant)
        layer.train(then)
        output.sum().backward()
    torch.testing.assert_close(layer.state_dict(), before)


def test_one_value_per_channel_in_one_replica_raises():
    with pytest.raises(ValueError, match="expected more than 1 value per channel"):
        parallel(SynchronizedBatchNorm1d(4), "cpu", 3)(torch.randn(1, 4))


def test_a_replica_that_never_runs_makes_the_others_raise(monkeypatch):
    monkeypatch.setattr(replicas, "TIMEOUT", 0.1)
    model = parallel(nn.Sequential(SynchronizedBatchNorm1d(2)), "cpu", 2)
    first, _ = model.replicate(model.module, model.device_ids)
    with pytest.raises(
        RuntimeError, match=r"'0': replica 0 waits for .*\[1\], which did not make this call within 0.1"
    ):
        first(torch.randn(4, 2))


def test_each_replica_runs_once():
    model = parallel(nn.Sequential(SynchronizedBatchNorm1d(2)), "cpu", 3)
    copies, batch = model.replicate(model.module, model.device_ids)[:2], torch.randn(4, 2)
    execute_replication_callbacks(copies)  # from now on, they do not wait for the third
    promptly(model.parallel_apply, copies, [(batch,)] * 2, [{}] * 2)
    with pytest.raises(RuntimeError, match="'0': called after its replica's forward pass; a model in replicas"):
        promptly(model.parallel_apply, copies, [(batch,)] * 2, [{}] * 2)
