"""Bagua's lines: ``import bagua_syncbn.contrib`` makes them use this package, with Bagua and without.

Where Bagua is installed, the SyncBatchNorm of this package replaces Bagua's, for code that imports it afterwards.
Elsewhere modules get a method ``with_bagua``, which is :func:`~bagua_syncbn.with_bagua`, and Bagua's imports are here:
:mod:`bagua_syncbn.contrib.sync_batchnorm` and :mod:`bagua_syncbn.contrib.algorithms`.

Example::

    >>> import bagua_syncbn.contrib
    >>> from bagua_syncbn.contrib.algorithms import gradient_allreduce
    >>> from bagua_syncbn.contrib.sync_batchnorm import SyncBatchNorm
    >>> model = SyncBatchNorm.convert_sync_batchnorm(model)
    >>> model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..conversion import register_converter
from ..sync_batchnorm import SyncBatchNorm
from ..with_bagua import with_bagua

try:
    from bagua.torch_api.contrib import sync_batchnorm as _theirs
except ModuleNotFoundError as error:
    if error.name != "bagua":  # an installation of Bagua that is not whole
        raise
    _theirs = None

has_bagua = _theirs is not None
_original: Any = _theirs.SyncBatchNorm if has_bagua else None


def _method(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    algorithm: Any = None,
    process_group: Any = None,
    do_flatten: bool = True,
) -> nn.Module:
    """Makes this module data parallel in place, as :func:`bagua_syncbn.with_bagua` does.

    ``do_flatten``, an option of Bagua's buckets, changes nothing: torch has buckets of its own.
    """
    return with_bagua(module, optimizers, algorithm, process_group)


def replace() -> None:
    """Puts :class:`SyncBatchNorm` in the place of Bagua's, and lets models with layers of Bagua's be converted.

    Without Bagua, gives modules the method ``with_bagua``. The import of this module calls it; call it again only after
    :func:`restore`.
    """
    if has_bagua:
        _theirs.SyncBatchNorm = SyncBatchNorm
        register_converter(_original, lambda layer: SyncBatchNorm)
    else:
        nn.Module.with_bagua = _method  # type: ignore[attr-defined]


def restore() -> None:
    """Puts Bagua's class back, or takes the method away. Models that were changed meanwhile stay as they are."""
    if has_bagua:
        _theirs.SyncBatchNorm = _original
        register_converter(_original, None)
    elif hasattr(nn.Module, "with_bagua"):
        del nn.Module.with_bagua


replace()
