"""``import bagua_syncbn.contrib`` makes scripts for Bagua use this package, whether Bagua is installed or not.

If Bagua is installed, this package's SyncBatchNorm replaces Bagua's for later imports, and Bagua's layers can be
converted. Otherwise modules get a method ``with_bagua``, which calls :func:`~bagua_syncbn.with_bagua`; import from
:mod:`bagua_syncbn.contrib.sync_batchnorm` and :mod:`bagua_syncbn.contrib.algorithms` instead of from Bagua.

Example::

    >>> import bagua_syncbn.contrib
    >>> from bagua_syncbn.contrib.algorithms import gradient_allreduce
    >>> from bagua_syncbn.contrib.sync_batchnorm import SyncBatchNorm
    >>> model = SyncBatchNorm.convert_sync_batchnorm(model)
    >>> model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
"""

from typing import Any

from torch import nn

from ..bagua.with_bagua import with_bagua
from ..conversion import register_converter
from ..sync_batchnorm import SyncBatchNorm

try:
    from bagua.torch_api.contrib import sync_batchnorm as _theirs
except ModuleNotFoundError as error:
    if error.name != "bagua":  # Bagua is installed but broken
        raise
    _theirs = None

has_bagua = _theirs is not None


def _method(module: nn.Module, *args: Any, do_flatten: bool = True, **kwargs: Any) -> nn.Module:
    """Makes this module data parallel in place with :func:`bagua_syncbn.with_bagua`; ignores ``do_flatten``."""
    return with_bagua(module, *args, **kwargs)


if _theirs is None:
    nn.Module.with_bagua = _method
elif _theirs.SyncBatchNorm is not SyncBatchNorm:
    register_converter(_theirs.SyncBatchNorm, lambda layer: SyncBatchNorm)
    _theirs.SyncBatchNorm = SyncBatchNorm
