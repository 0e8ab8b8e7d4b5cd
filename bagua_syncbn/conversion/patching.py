"""Replacement of torch's converter and layer, for trainers that call these themselves."""

import functools
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from .classes import synchronized_class
from .convert import change_class, convert_sync_batchnorm

_TORCHS = {name: vars(nn.SyncBatchNorm)[name] for name in ("__init__", "convert_sync_batchnorm")}

_patches: list["TorchConverterPatch"] = []


class TorchConverterPatch(AbstractContextManager["TorchConverterPatch"]):
    """Patch made by :func:`patch_torch_converter`, in force until ``undo()`` or the end of the ``with`` statement."""

    def __init__(self) -> None:
        _patches.append(self)
        _give_torch(_OURS)

    def undo(self) -> None:
        """Ends this patch. torch gets its own converter and layer back when no other patch is in force."""
        if self in _patches:
            _patches.remove(self)
        if not _patches:
            _give_torch(_TORCHS)

    def __exit__(self, *error: object) -> None:
        self.undo()


def patch_torch_converter() -> TorchConverterPatch:
    """Makes trainers that call torch's converter, or build torch's layer, use this package.

    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` becomes :func:`convert_sync_batchnorm`, with torch's arguments,
    and layers built as ``torch.nn.SyncBatchNorm(...)``, or as a subclass of it, are :class:`SyncBatchNorm`. The class
    itself is changed, so code that imported it before is included. As in every conversion
    ``isinstance(layer, torch.nn.SyncBatchNorm)`` is False.

    The patch holds for all threads from the call on, for good or for the ``with`` statement that makes the call. Calls
    may be nested and repeated; converted models stay converted.

    Returns:
        The patch, with a method ``undo()``.

    Example::

        >>> bagua_syncbn.patch_torch_converter()
        >>> lightning.Trainer(sync_batchnorm=True, ...).fit(model)

        >>> with bagua_syncbn.patch_torch_converter():
        ...     trainer.initialize()
    """
    return TorchConverterPatch()


@functools.wraps(_TORCHS["__init__"])
def _init(layer: nn.SyncBatchNorm, *args: Any, **kwargs: Any) -> None:
    _TORCHS["__init__"](layer, *args, **kwargs)
    change_class(layer, synchronized_class(type(layer)))


@functools.wraps(_TORCHS["convert_sync_batchnorm"].__func__)
def _convert(cls: type[nn.SyncBatchNorm], module: nn.Module, process_group: Any = None) -> nn.Module:
    return convert_sync_batchnorm(module, process_group)


_OURS = {"__init__": _init, "convert_sync_batchnorm": classmethod(_convert)}


def _give_torch(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        setattr(nn.SyncBatchNorm, name, function)
