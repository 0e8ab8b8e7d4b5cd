"""``import bagua_syncbn.contrib`` replaces Bagua's SyncBatchNorm by that of this package, for code that imports it.

Import this module before that code; code that imported Bagua's class earlier keeps it. Needs Bagua, which needs NCCL.

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

    The import of this module calls it; call it again only after :func:`restore`.
    """
    _theirs.SyncBatchNorm = SyncBatchNorm
    register_converter(_original, lambda layer: SyncBatchNorm)


def restore() -> None:
    """Puts Bagua's class back. Models that were made or converted meanwhile do not change."""
    _theirs.SyncBatchNorm = _original
    register_converter(_original, None)


replace()
