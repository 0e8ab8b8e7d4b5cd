"""Under the patch, trainers that call torch's converter or build torch's layer use ours."""

import inspect
from contextlib import suppress

import torch
from torch import nn
from torch.nn import SyncBatchNorm as ImportedBefore

from bagua_syncbn import SyncBatchNorm, patch_torch_converter, revert_sync_batchnorm
from tests.helpers.user_layers import BatchNormReLU, SyncBatchNormAct


def torch_functions():
    functions = vars(nn.SyncBatchNorm)["__init__"], vars(nn.SyncBatchNorm)["convert_sync_batchnorm"]
    return functions, [inspect.signature(f) for f in (nn.SyncBatchNorm, nn.SyncBatchNorm.convert_sync_batchnorm)]


def test_the_patch_keeps_signatures_and_is_undone_by_close():
    before, signatures = torch_functions()
    outer = patch_torch_converter()
    patched = torch_functions()
    assert patched[1] == signatures
    with suppress(KeyError), patch_torch_converter():
        model = nn.Sequential(BatchNormReLU(2), SyncBatchNormAct(2), ImportedBefore(2, process_group=1))
        assert [isinstance(layer, SyncBatchNorm) for layer in model] == [False, True, True]
        assert ImportedBefore.convert_sync_batchnorm(model) is model
        raise KeyError
    assert torch_functions() == patched
    outer.close()
    assert torch_functions() == (before, signatures)
    assert all(isinstance(layer, SyncBatchNorm) for layer in model)
    assert [layer.process_group for layer in model] == [None, None, 1]
    assert model[1](torch.randn(4, 2)).min() == 0
    revert_sync_batchnorm(model)
    assert [type(layer) for layer in model] == [BatchNormReLU, SyncBatchNormAct, nn.SyncBatchNorm]
    assert model[2].process_group == 1
