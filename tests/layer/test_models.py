"""Models of other packages, built from configurations: over two ranks against one process on the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_syncbn import SyncBatchNorm, conversion_report, convert_sync_batchnorm, revert_sync_batchnorm

SIZES = (1, 2)


def monai_model(name):
    from monai.networks import nets

    if name == "BasicUNet":
        return nets.BasicUNet(2, 1, 2, features=(4, 4, 8, 8, 8, 4), norm=("batch", {"affine": True}))
    if name == "UNet":
        return nets.UNet(2, 1, 2, channels=(4, 8), strides=(2,), norm="batch", dropout=0)
    return nets.DenseNet(2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2))


def transformers_model(name):
    import transformers

    if name == "ResNet":
        config = transformers.ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
        return transformers.ResNetModel(config)
    config = transformers.MobileNetV2Config(num_channels=1, depth_multiplier=0.1, min_depth=4)
    return transformers.MobileNetV2Model(config)


def timm_model(name):
    import timm

    return timm.create_model(name, in_chans=1, num_classes=3)


def torchvision_model(name):
    import torchvision

    model = torchvision.models.get_model(name, num_classes=3)
    return nn.Sequential(nn.Conv2d(1, 3, 1), model)


MAKERS = {
    "monai": monai_model,
    "transformers": transformers_model,
    "timm": timm_model,
    "torchvision": torchvision_model,
}


def make(package, name):
    torch.manual_seed(0)
    model = MAKERS[package](name).double()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
    return model


def tensor_of(output):
    output = getattr(output, "last_hidden_state", output)
    return output[0] if isinstance(output, (list, tuple)) else output


def run(model, images):
    """Returns the output and the running statistics of one training step."""
    output = tensor_of(model(images))
    output.sin().sum().backward()
    return output.detach(), dict(model.named_buffers())


def batch():
    return torch.randn(sum(SIZES), 1, 64, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def run_share(package, name):
    model = make(package, name)
    classes = [type(module) for module in model.modules()]
    convert_sync_batchnorm(model)
    layers = sum(isinstance(module, SyncBatchNorm) for module in model.modules())
    assert layers == sum(row.action == "converted" for row in conversion_report(model).layers) > 0
    share = batch().split(SIZES)[dist.get_rank()]
    results = *run(model, share), tensor_of(model.eval()(share)).detach()
    revert_sync_batchnorm(model)
    assert [type(module) for module in model.modules()] == classes
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name"), [
    ("monai", "BasicUNet"),
    ("monai", "UNet"),
    ("monai", "DenseNet"),
    ("transformers", "ResNet"),
    ("transformers", "MobileNetV2"),
    ("timm", "resnet10t"),
    ("timm", "efficientnet_lite0"),  # its BatchNormAct2d calls F.batch_norm by itself
    ("timm", "regnetx_002"),
    ("torchvision", "resnet18"),
    ("torchvision", "mobilenet_v3_small"),
])  # fmt: skip
def test_models_of_other_packages_equal_one_process(pool, package, name):
    pytest.importorskip(package)
    model = make(package, name)
    expected, buffers = run(model, batch())
    evaluated = tensor_of(model.eval()(batch())).detach()
    for rank, (output, own_buffers, own_evaluated) in enumerate(pool.run(run_share, 2, package, name)):
        torch.testing.assert_close(own_buffers, buffers, rtol=1e-6, atol=1e-8)
        for own, whole in ((output, expected), (own_evaluated, evaluated)):
            torch.testing.assert_close(own, whole.split(SIZES)[rank], rtol=1e-6, atol=1e-8)
