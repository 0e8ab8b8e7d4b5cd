"""SyncBatchNorm where Bagua's code imports it from: ``bagua.torch_api.contrib.sync_batchnorm``."""

from ..sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
