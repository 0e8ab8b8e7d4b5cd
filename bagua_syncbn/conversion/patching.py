"""Replaces torch's converter and layer, for trainers that call them directly."""

import functools
from contextlib import ExitStack
from typing import Any
from unittest import mock

from torch import nn

from .._groups import ProcessGroupLike
from .classes import synchronized_class
from .convert import change_class, convert_sync_batchnorm

_original_init = nn.SyncBatchNorm.__init__


def patch_torch_converter() -> ExitStack:
    """Makes trainers that call torch's converter, or build torch's layer, use this package.

    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` becomes :func:`convert_sync_batchnorm`, with torch's arguments,
    and ``torch.nn.SyncBatchNorm(...)`` or a subclass constructs a :class:`SyncBatchNorm`. The class itself is changed,
    so code that imported it earlier also uses the patch. As in every conversion, ``isinstance(layer,
    torch.nn.SyncBatchNorm)`` is False.

    The patch applies to all threads, until ``close()`` or the end of the ``with`` statement. Patches may be nested;
    converted models stay converted.

    Returns:
        The patch. Its method ``close()`` restores torch's converter and layer, or the outer patch if patches are
        nested.

    Example::

        >>> bagua_syncbn.patch_torch_converter()
        >>> lightning.Trainer(sync_batchnorm=True, ...).fit(model)

        >>> with bagua_syncbn.patch_torch_converter():
        ...     trainer.initialize()
    """
    patch = ExitStack()
    patch.enter_context(mock.patch.multiple(nn.SyncBatchNorm, __init__=_init, convert_sync_batchnorm=_convert))
    return patch


@functools.wraps(_original_init)
def _init(layer: nn.SyncBatchNorm, *args: Any, **kwargs: Any) -> None:
    _original_init(layer, *args, **kwargs)
    change_class(layer, synchronized_class(type(layer)))


@classmethod  # pyrefly: ignore[invalid-decorator]
@functools.wraps(vars(nn.SyncBatchNorm)["convert_sync_batchnorm"].__func__)
def _convert(cls: type[nn.SyncBatchNorm], module: nn.Module, process_group: ProcessGroupLike = None) -> nn.Module:
    return convert_sync_batchnorm(module, process_group)
