"""Replaces ``bagua.torch_api.contrib.sync_batchnorm`` in code that also runs without Bagua."""

from ..sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
