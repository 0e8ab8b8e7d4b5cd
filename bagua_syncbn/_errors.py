"""Error handling: makes peers raise too, converts kernel errors to torch's classes, and restores state after Ctrl-C."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from ._torch.autograd import NO_ERRORS, is_recorded, is_without_data

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Peers: TypeAlias = tuple[Any, Any] | None

_NO_MEMORY = re.compile(r"memory: expected (\d+) values of (\d) bytes on (\S+), got none")  # csrc/allocate.h

notify_peers: Callable[[Any, Any, Exception], None] = lambda process_group, layer, error: None  # noqa: E731
"""Makes peers raise too. Called with the process group, the layer or model, and the error of a call on this rank.
Set by ``_reliability``."""


def handle_error(error: Exception, peers_of: Callable[..., _Peers], /, *args: Any, **kwargs: Any) -> None:
    """Notifies the peers of a call with these arguments that it raised ``error``. The caller re-raises the error.

    Calls with meta or fake tensors notify nobody: they send nothing, so ranks may make them in any order.

    Raises:
        RuntimeError: torch's error, if a kernel ran out of memory.
    """
    if is_recorded() or isinstance(error, NO_ERRORS):
        return
    if not any(map(is_without_data, (*args, *kwargs.values()))):
        peers = None
        with suppress(Exception):  # the arguments may be invalid
            peers = peers_of(*args, **kwargs)
        if peers is not None:
            notify_peers(*peers, error)
    raise_if_out_of_memory(error)


def notifies_peers(
    peers_of: Callable[..., _Peers],
) -> Callable[[Callable[_P, _Result]], Callable[_P, _Result]]:
    """Decorator for functions in which ranks communicate: if a call raises, peers raise too.

    Peers also raise if wrong arguments raise before the function body runs.

    Args:
        peers_of: called with the arguments of the failed call. Returns the process group and the layer, model or
            function name; None if the call does not communicate.
    """

    def decorate(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
        @functools.wraps(function)
        def notifying(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                handle_error(error, peers_of, *args, **kwargs)
                raise

        return notifying

    return decorate


def raise_if_out_of_memory(error: Exception) -> None:
    """Raises torch's error instead of a kernel's out-of-memory ``error``; ignores other errors.

    Repeats the allocation to get torch's error. If it succeeds, raises :class:`torch.OutOfMemoryError` with the text of
    ``error`` on devices, and returns on CPU.
    """
    found = _NO_MEMORY.match(str(error))
    if found is None:
        return
    values, itemsize, device = found.groups()
    try:
        torch.empty(int(values), int(itemsize), dtype=torch.uint8, device=device)
    except RuntimeError as torch_error:
        raise torch_error from None
    if device != "cpu":
        raise torch.OutOfMemoryError(str(error)) from None


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Context manager that calls ``undo`` if the block raises, including Ctrl-C."""
    try:
        yield
    except BaseException:
        undo()
        raise


@contextmanager
def restored(restore: Callable[[], object]) -> Iterator[None]:
    """Context manager that calls ``restore`` at the end of the block.

    After an error it calls ``restore`` again, because Ctrl-C may have interrupted the first call; ``restore`` must be
    idempotent. Enter this context before the first change. Ctrl-C in the ``with`` statement itself also restores,
    because Python then closes this generator.
    """
    with undone_on_error(restore):
        try:
            yield
        finally:
            restore()
