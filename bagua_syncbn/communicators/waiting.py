"""Waits of the host for a collective, which Ctrl-C can end, and collectives that the host does not wait for."""

import ctypes
import os
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import finalize, ref

from torch import Tensor


class AsyncCollective:
    """A collective that this rank has started; neither the start nor the end of the process waits for other ranks."""

    def __init__(self, group: Any, result: Tensor, work: Any, adds_up: bool = False) -> None:
        self._group, self._result, self._work, self._adds_up = ref(group), result, work, adds_up
        if result.is_cpu:
            _keep_to_the_end(group)
            _keep_to_the_end(work)

    def wait(self) -> Tensor:
        """Waits for the other ranks and returns the result; the sum of its rows with ``adds_up``."""
        group = self._group()
        wait_in_slices(self._work, group)
        if self._result.is_cpu:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._work))
        return self._result.sum(0) if self._adds_up else self._result


def wait_in_slices(work: Any, group: Any) -> None:
    """Waits for a collective. Between slices Python looks for signals, so that Ctrl-C ends the wait."""
    try:
        while True:
            try:
                work.wait(_SLICE)
                _ended[id(group)].append(work)
                return
            except RuntimeError:
                if work.is_completed():  # the collective failed, or ended just after the slice
                    break
            raise_if_left(group)
        work.wait()
        _ended[id(group)].append(work)
    except BaseException:
        if not work.is_completed():
            _keep_to_the_end(group)
        _keep_to_the_end(work)
        raise


_SLICE = timedelta(seconds=0.5)

# Last collectives that have ended, by the id of their group. A gloo thread drops its reference to a collective some
# time after the collective is reported done: if it then freed the tensors while the interpreter ends, the thread would
# ask for the GIL, which aborts the process. The end of the group drops these collectives, after it joined its threads.
_ended: dict[int, deque[Any]] = {}


def keep_last_works_of(group: Any) -> None:
    """Keeps the last collectives of ``group`` that :func:`wait_in_slices` waited for alive as long as ``group``."""
    key = id(group)
    if key not in _ended:
        _ended[key] = deque(maxlen=4)
        finalize(group, _ended.pop, key).atexit = False  # type: ignore[misc]  # atexit would be too early


# Stores by which the ranks of a group learn that one of them has left, by the id of the group, each with the process
# that may use it: a forked child has the same connection.
_stores: dict[int, tuple[Any, int]] = {}


def leave_through(group: Any, store: Any) -> None:
    """Has the ranks of ``group`` say in ``store`` that they have left, and look there while they wait."""
    key = id(group)
    if key not in _stores:
        finalize(group, _stores.pop, key).atexit = False  # type: ignore[misc]
    _stores[key] = store, os.getpid()


def leave(group: Any, why: str) -> None:
    """Tells the ranks that wait in a collective of ``group`` that this rank does not come."""
    store, process = _stores.get(id(group), (None, 0))
    if store is not None and process == os.getpid():
        with suppress(RuntimeError):  # the store ends with the rank that keeps it
            store.compare_set("left", "", why)


def raise_if_left(group: Any) -> None:
    """Raises RuntimeError if a rank of ``group`` has left."""
    store, _ = _stores.get(id(group), (None, None))
    why = ""
    if store is not None:
        with suppress(RuntimeError):
            why = store.get("left").decode() if store.check(["left"]) else ""
    if why:
        raise RuntimeError(why)


def _keep_to_the_end(kept: Any) -> None:
    """Keeps ``kept`` alive beyond the end of the interpreter.

    The destructor of a group would wait for a collective that the other ranks never join. For collectives, see the
    comment at ``_ended``.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
