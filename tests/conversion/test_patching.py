"""Under the patch, trainers that call torch's converter or build torch's layer use ours."""

import inspect
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import SyncBatchNorm as ImportedBefore
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import SyncBatchNorm, patch_torch_converter, revert_sync_batchnorm
from tests.helpers.training import check, make_model, make_optimizer, train
from tests.helpers.user_layers import BatchNormReLU

# Steps of trainers, in order.


def of_nnunet(model):
    model = torch.compile(model, backend="eager")
    optimizer = make_optimizer(model)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return DistributedDataParallel(model), optimizer


class TimmsSyncBatchNormAct(nn.SyncBatchNorm):
    def forward(self, input):
        return self.act(super().forward(input))


def of_mmengine_and_timm(model):
    """These trainers' converters build torch's layer or a subclass."""
    for name, layer in model.named_children():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            cls = TimmsSyncBatchNormAct if isinstance(layer, nn.BatchNorm1d) else nn.modules.batchnorm.SyncBatchNorm
            twin = cls(layer.num_features, momentum=layer.momentum, dtype=torch.float64)
            twin.load_state_dict(layer.state_dict())
            twin.act = nn.Identity()
            setattr(model, name, twin)
    model = DistributedDataParallel(model)
    return model, make_optimizer(model)


def train_in(trainer, sizes):
    with patch_torch_converter():
        model, optimizer = trainer(make_model())
    return train(model, optimizer, sizes, dist.get_rank())


@pytest.mark.parametrize(("trainer", "prefix"), [(of_nnunet, "module._orig_mod."), (of_mmengine_and_timm, "module.")])
def test_trainers_train_synchronized(pool, trainer, prefix):
    check(pool.run(train_in, 2, trainer, (1, 3)), (1, 3), prefix)


def torchs():
    functions = vars(nn.SyncBatchNorm)["__init__"], vars(nn.SyncBatchNorm)["convert_sync_batchnorm"]
    return functions, [inspect.signature(f) for f in (nn.SyncBatchNorm, nn.SyncBatchNorm.convert_sync_batchnorm)]


def test_the_patch_keeps_signatures_and_ends():
    before, signatures = torchs()
    outer = patch_torch_converter()
    patched = torchs()
    assert patched[1] == signatures
    with suppress(KeyError), patch_torch_converter():
        model = nn.Sequential(BatchNormReLU(2), nn.SyncBatchNorm(2), ImportedBefore(2, process_group=1))
        assert ImportedBefore.convert_sync_batchnorm(model) is model
        raise KeyError
    assert torchs() == patched
    outer.undo()
    assert torchs() == (before, signatures)
    assert all(isinstance(layer, SyncBatchNorm) for layer in model)
    assert [layer.process_group for layer in model] == [None, None, 1]
    revert_sync_batchnorm(model)
    assert [type(layer) for layer in model] == [BatchNormReLU, nn.SyncBatchNorm, nn.SyncBatchNorm]
    assert model[2].process_group == 1
