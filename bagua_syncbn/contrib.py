"""``import bagua_syncbn.contrib`` gives code that imports Bagua's SyncBatchNorm the one of this package.

Import it before that code; what holds Bagua's class by then keeps it. Needs Bagua, which needs NCCL.

Example::

    >>> import bagua_syncbn.contrib
    >>> from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm
    >>> model = SyncBatchNorm.convert_sync_batchnorm(model).with_bagua([optimizer], algorithm)
"""

from typing import Any

from bagua.torch_api.contrib import sync_batchnorm as _theirs

from .conversion import register_converter
from .sync_batchnorm import SyncBatchNorm

_original: Any = _theirs.SyncBatchNorm


def replace() -> None:
    """Puts :class:`SyncBatchNorm` in the place of Bagua's, and lets models with layers of Bagua's be converted.

    The import of this module does it; this is for after :func:`restore`.
    """
    _theirs.SyncBatchNorm = SyncBatchNorm
    register_converter(_original, lambda layer: SyncBatchNorm)


def restore() -> None:
    """Puts Bagua's class back. Models that were made or converted meanwhile stay what they are."""
    _theirs.SyncBatchNorm = _original
    register_converter(_original, None)


replace()
