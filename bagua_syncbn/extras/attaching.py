"""Attachments of a layer: functions around its calls, see ``SyncBatchNorm._attached``."""

from typing import Any, TypeVar

from ..sync_batchnorm import SyncBatchNorm

_T = TypeVar("_T")


def attached(layer: SyncBatchNorm, kind: type[_T]) -> _T | None:
    """Returns what is attached to ``layer`` of this class; None for nothing."""
    return next((one for one in layer._attached if isinstance(one, kind)), None)


def replace_attached(layer: SyncBatchNorm, kind: type[_T], new: Any) -> None:
    """Attaches ``new`` to ``layer``, around all else, in place of what is attached of this class; None for nothing."""
    others = tuple(one for one in layer._attached if not isinstance(one, kind))
    layer._attached = others if new is None else (*others, new)
