"""Tensor subclasses: outputs have the class and metadata of the input, as with torch's layers."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_syncbn
from bagua_syncbn.communicators import LOCAL
from tests.helpers.cases import CLASSES, WAYS, within
from tests.helpers.steps import draw, step


class Tagged(torch.Tensor):
    """Passes its tag on to results, as MONAI's MetaTensor passes its affine matrix."""

    tag = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs)
        if isinstance(output, Tagged):
            output.tag = next((value.tag for value in args if isinstance(value, Tagged)), None)
        return output


def tagged(values, tag="from the input"):
    tensor = values.as_subclass(Tagged)
    tensor.tag = tag
    return tensor


LAYERS = {"layer": nn.BatchNorm2d, **CLASSES}

AROUND = {
    **{name: WAYS[name] for name in ("forward", "compiled", "checkpointed", "accumulated", "recomputed")},
    "reentrant checkpoint": lambda model: partial(checkpoint, model, use_reentrant=True),
    "evaluation": nn.Module.eval,
    "frozen": bagua_syncbn.freeze_statistics,
    "data parallel": nn.parallel.DistributedDataParallel,
    "masked": within(lambda model: bagua_syncbn.masked(model, torch.tensor([True, True, False]).view(1, 1, 1, 3))),
}


def compare(layer, around, order=1):
    """Compares a step with tagged tensors with a step with plain tensors."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = nn.Sequential(LAYERS[layer](4), nn.ReLU(inplace=True)).double()
    bagua_syncbn.convert_sync_batchnorm(model, None if dist.is_initialized() else LOCAL)
    results, outputs = [], []
    for own, of_class in ((copy.deepcopy(model), torch.clone), (model, lambda input: tagged(input * 1))):
        call = AROUND[around](own)

        def run(input, call=call, of_class=of_class):
            outputs.append(call(of_class(input)))
            return outputs[-1]

        results.append(step(own, draw(5 - rank, 4, 2, 3, seed=rank), order=order, call=run))
    torch.testing.assert_close(*(plain_tensors(each) for each in results), rtol=1e-12, atol=1e-12)
    assert type(outputs[1]) is Tagged
    if around != "compiled":  # outputs have no attributes in this mode
        assert outputs[1].tag == "from the input"


def plain_tensors(results):
    return {name: value.as_subclass(torch.Tensor) for name, value in results.items()}


@pytest.mark.parametrize(("layer", "around", "order"), [
    ("layer", "forward", 2),
    *((layer, "forward", 1) for layer in LAYERS),
    *(("layer", around, 1) for around in AROUND if around != "compiled"),  # unsupported by Dynamo over ranks
])  # fmt: skip
@pytest.mark.ranks(2)
def test_ranks_treat_subclasses_like_plain_tensors(layer, around, order):
    compare(layer, around, order)


@pytest.mark.parametrize("around", [name for name in AROUND if name != "data parallel"])
def test_one_process_treats_subclasses_like_plain_tensors(around):
    compare("layer", around)
