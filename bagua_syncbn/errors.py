"""Errors of a call on one rank, which its peers raise too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch

from . import ops
from .registry import Registry
from .torch_internals.autograd import NO_ERRORS

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

error_handlers: Registry[Callable[[Any, Any, Exception], None]] = Registry()
"""Called with the process group of a call, its layer or model, and the error that it raises."""


def notify_peers(process_group: Any, layer: Any, error: Exception) -> None:
    """Makes the other ranks of ``process_group`` raise, because this rank raises ``error`` in a call of ``layer``."""
    for handle in error_handlers:
        handle(process_group, layer, error)


def handle_error(error: Exception, peers: tuple[Any, Any] | None) -> None:
    """Notifies ``peers``, a process group and a layer or model, of the ``error`` of a call. The caller re-raises it.

    Raises:
        Exception: torch's own error instead of ``error``, if that is an out-of-memory error of a kernel.
    """
    if torch.compiler.is_compiling():
        return
    if peers is not None:
        notify_peers(*peers, error)
    ops.raise_torchs(error)


def notifies_peers(
    peers_of: Callable[..., tuple[Any, Any] | None],
) -> Callable[[Callable[_P, _Result]], Callable[_P, _Result]]:
    """Decorator for functions in which ranks communicate: if a call raises on one rank, its peers raise too.

    This includes calls with wrong arguments, which raise before the body of the function runs.

    Args:
        peers_of: called with the arguments of a call that raised. Returns its process group and its layer or model, or
            the name of a function instead of a layer; None if the call does not communicate.
    """

    def decorate(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
        @functools.wraps(function)
        def notifying(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except NO_ERRORS:
                raise
            except Exception as error:
                peers = None
                with suppress(Exception):  # the arguments may be anything
                    peers = peers_of(*args, **kwargs)
                handle_error(error, peers)
                raise

        return notifying

    return decorate
