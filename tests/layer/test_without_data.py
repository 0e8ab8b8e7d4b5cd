"""Tensors without data (meta and fake tensors): shapes as in torch, no message, no counted call."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm2d, convert_sync_batchnorm
from tests.helpers.steps import check_ranks, draw

CHANNELS = 3


def on_meta(model, call):
    meta = convert_sync_batchnorm(plain_model(), model[0].process_group).to("meta")
    return call(meta, torch.empty(2, CHANNELS, 4, 4, device="meta", dtype=torch.float64, requires_grad=True))


def of_fake_tensors(model, call):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return call(model, mode.from_tensor(draw(2, CHANNELS, 4, 4).requires_grad_()))


def of_real_tensors_in_fake_mode(model, call):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return call(model, X)


X = draw(2, CHANNELS, 4, 4).requires_grad_()
WITHOUT_DATA = [on_meta, of_fake_tensors, of_real_tensors_in_fake_mode]


def plain_model():
    layers = (nn.BatchNorm2d(CHANNELS, momentum=momentum, dtype=torch.float64) for momentum in (0.1, None))
    return nn.Sequential(next(layers), nn.ReLU(), next(layers))


def backward(model, input):
    output = model(input)
    output.sum().backward()
    return output


def second_order(model, input):
    input = input.detach().requires_grad_()
    output = model(input)
    (grad,) = torch.autograd.grad(output.square().sum(), input, create_graph=True)
    grad.square().sum().backward()
    return output


def recomputed(model, input):
    return backward(partial(checkpoint, model, use_reentrant=False), input)


def accumulated(model, input):
    with bagua_syncbn.accumulate_statistics(model):
        return model(input)


def single_value_per_channel(model, input):
    return model(input[:1, :, :1, :1])


def mean_loss(model, input):
    bagua_syncbn.mean_over_ranks(input.detach().flatten(), process_group=model[0].process_group)
    return model(input)


def merged(model, input):
    bagua_syncbn.merge_statistics(model)
    return model(input)


def wrong_size(model, input):
    with pytest.raises(RuntimeError, match="expected 3 channels, got 4"):
        model(input[:, [0, 0, 1, 2]])
    return model(input)


CALLS = [backward, second_order, recomputed, accumulated, single_value_per_channel, mean_loss, merged, wrong_size]


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("without_data", WITHOUT_DATA)
def test_a_call_without_data_on_one_rank_sends_nothing_and_is_not_counted(without_data, call, is_first):
    """Before the first step, which creates the layers' group, or between steps."""
    torch.manual_seed(0)
    group = dist.new_group()
    model, plain = convert_sync_batchnorm(plain_model(), group), plain_model()
    steps = [(draw(5, CHANNELS, 4, 4, seed=seed), draw(5, CHANNELS, 4, 4, seed=seed + 9)) for seed in range(3)]
    for input, grad_output in steps[: 0 if is_first else 2]:
        check_ranks(model, plain, input, grad_output, (2, 3))
    if dist.get_rank() == 1:
        output = without_data(model, call)
        assert output.shape[1:] == (X[:1, :, :1, :1] if call is single_value_per_channel else X).shape[1:]
        assert output.dtype == torch.float64
    model.zero_grad(set_to_none=True)
    for input, grad_output in steps:
        check_ranks(model, plain, input, grad_output, (2, 3))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("without_data", WITHOUT_DATA)
def test_a_call_without_data_does_not_accumulate(without_data):
    model, plain = convert_sync_batchnorm(plain_model()), plain_model()
    with bagua_syncbn.accumulate_statistics(model):
        without_data(model, nn.Module.__call__)
        model(X)
    plain(X)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_shapes_are_those_of_torch(memory_format):
    input = torch.empty(2, 3, 4, 4, device="meta").to(memory_format=memory_format)
    output = SyncBatchNorm2d(3, device="meta")(input)
    expected = nn.BatchNorm2d(3, device="meta")(input)
    assert (output.shape, output.dtype, output.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_a_fake_gpu_needs_no_gpu():
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        output = SyncBatchNorm2d(3)(torch.randn(2, 3, 4, 4))
    assert (output.shape, output.device.type) == ((2, 3, 4, 4), "cuda")


def test_a_masked_layer_forgets_the_mask_of_a_fake_call():
    layer, input = SyncBatchNorm2d(CHANNELS).double(), draw(2, CHANNELS, 4, 4)
    with bagua_syncbn.masked(layer, input[:, :1] > 0):
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer(input)
        output = layer(input)
    torch.testing.assert_close(output, SyncBatchNorm2d(CHANNELS).double()(input, mask=input[:, :1] > 0))
