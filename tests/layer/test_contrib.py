"""Scripts for Bagua run without Bagua; tests/bagua_job/test_bagua_contrib.py runs them with it."""

import sys
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # cannot be imported again if it is imported while sys.modules is patched
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from tests.helpers.steps import check_training, make_model, make_optimizer, train


class NoBagua:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "bagua":
            raise ModuleNotFoundError("No module named 'bagua'", name="bagua")


@contextmanager
def imported(**bagua):
    """Imports bagua_syncbn.contrib in a process where only the modules in ``bagua`` (by name) exist of Bagua."""
    with patch.dict(sys.modules), patch.object(sys, "meta_path", [NoBagua, *sys.meta_path]):
        for name in [name for name in sys.modules if f"{name}.".startswith(("bagua.", "bagua_syncbn.contrib."))]:
            del sys.modules[name]
        sys.modules.update(bagua)
        import_module("bagua_syncbn.contrib")
        try:
            yield
        finally:
            del nn.Module.with_bagua


@pytest.mark.ranks(3)
def test_code_from_baguas_tutorials_trains_like_one_process():
    rank = dist.get_rank()
    model = make_model(seed=rank)  # rank 0's parameters and buffers must be broadcast to peers
    for buffer in model.buffers():
        buffer.add_(rank)
    optimizer = make_optimizer(model)
    with imported():
        from bagua_syncbn.contrib.algorithms import gradient_allreduce
        from bagua_syncbn.contrib.sync_batchnorm import SyncBatchNorm

        model = SyncBatchNorm.convert_sync_batchnorm(model)
        model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm(), do_flatten=False)
    check_training([train(model, optimizer, (2, 1, 3), rank)], (2, 1, 3))


def test_algorithms_that_need_bagua_cannot_be_imported_without_it():
    with imported():
        algorithms = import_module("bagua_syncbn.contrib.algorithms")
        for name in ("bytegrad", "q_adam"):
            with pytest.raises(ImportError, match=f"the algorithm {name} needs Bagua, .* only gradient_allreduce"):
                getattr(algorithms, name)
        assert not hasattr(algorithms, "another")


def test_a_broken_bagua_installation_raises():
    with pytest.raises(ModuleNotFoundError, match=r"bagua\.torch_api"), imported(bagua=ModuleType("bagua")):
        pass
    assert not hasattr(nn.Module, "with_bagua")


class ByteGradAlgorithm:
    pass


def test_only_supported_algorithms_are_accepted():
    model = bagua_syncbn.SyncBatchNorm(2)
    with imported():
        gradient_allreduce = import_module("bagua_syncbn.contrib.algorithms.gradient_allreduce")
        cls = gradient_allreduce.GradientAllReduceAlgorithm
        assert gradient_allreduce.GradientAllReduce is cls
        for algorithm in (cls, cls(), cls(hierarchical=True), "gradient_allreduce", None):
            assert bagua_syncbn.with_bagua(model, [], algorithm) is model
        for algorithm, name in [
            (cls(average=False), "GradientAllReduceAlgorithm with average=False"),
            (type("MyAllReduce", (cls,), {})(), "MyAllReduce"),
            (ByteGradAlgorithm, "ByteGradAlgorithm"),
            (ByteGradAlgorithm(), "ByteGradAlgorithm"),
            ("bytegrad", "'bytegrad'"),
            (3, "int"),
        ]:
            with pytest.raises(ValueError, match=f'algorithm: expected None, "gradient_allreduce" .*, got {name};'):
                model.with_bagua([torch.optim.SGD(model.parameters())], algorithm)
