"""Errors of a call on one rank, of which its peers learn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch

from . import ops

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

# Called with the process group of a call, its layer or model, and the error that it raises: set by others.
at_error: list[Callable[[Any, Any, Exception], None]] = []


def tell_peers(process_group: Any, layer: Any, error: Exception) -> None:
    """Has the ranks of ``process_group`` learn that this one raises ``error`` in a call of ``layer``."""
    for tell in at_error:
        tell(process_group, layer, error)


def raise_for_all(error: Exception, peers: tuple[Any, Any] | None) -> None:
    """Handles the ``error`` of a call: its peers, a process group and a layer or model, are told, and raise too.

    Raises torch's own error in place of ``error``, where that is of memory. Otherwise the caller raises ``error``.
    """
    if torch.compiler.is_compiling():
        return
    if peers is not None:
        tell_peers(*peers, error)
    ops.raise_torchs(error)


def tells_peers(
    peers_of: Callable[..., tuple[Any, Any] | None],
) -> Callable[[Callable[_P, _Result]], Callable[_P, _Result]]:
    """Decorator for a function in which ranks meet: if a call of it raises on one rank, the other ranks raise too.

    It covers calls with wrong arguments, which raise before the body of the function runs.

    Args:
        peers_of: called with the arguments of a call that raised; returns its process group and its layer or model, or
            the name of a function without one; None if the call meets no rank.
    """

    def decorate(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
        @functools.wraps(function)
        def telling(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                peers = None
                with suppress(Exception):  # the arguments may be anything
                    peers = peers_of(*args, **kwargs)
                raise_for_all(error, peers)
                raise

        return telling

    return decorate
