"""Replaces torch's converter and layer, for trainers that call them directly."""

import functools
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from .classes import synchronized_class
from .convert import change_class, convert_sync_batchnorm

_TORCHS = {name: vars(nn.SyncBatchNorm)[name] for name in ("__init__", "convert_sync_batchnorm")}


def patch_torch_converter() -> "TorchConverterPatch":
    """Makes trainers that call torch's converter, or build torch's layer, use this package.

    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` becomes :func:`convert_sync_batchnorm`, with torch's arguments,
    and ``torch.nn.SyncBatchNorm(...)`` or a subclass constructs a :class:`SyncBatchNorm`. The class itself is changed,
    so code that imported it earlier also uses the patch. As in every conversion, ``isinstance(layer,
    torch.nn.SyncBatchNorm)`` is False.

    The patch applies to all threads, until ``undo()`` or the end of the ``with`` statement. Patches may be nested;
    converted models stay converted.

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


class TorchConverterPatch(AbstractContextManager["TorchConverterPatch"]):
    """A patch returned by :func:`patch_torch_converter`."""

    def __init__(self) -> None:
        self._before = {name: vars(nn.SyncBatchNorm)[name] for name in _TORCHS}
        self._set(_OURS)

    def undo(self) -> None:
        """Restores the converter and layer from before this patch: torch's, or an outer patch's."""
        self._set(self._before)

    def __exit__(self, *error: object) -> None:
        self.undo()

    def _set(self, functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            setattr(nn.SyncBatchNorm, name, function)
