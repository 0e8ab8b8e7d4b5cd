"""Waits of the host for a collective, which Ctrl-C can end, and collectives that the host does not wait for."""

import ctypes
from collections import deque
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


def _keep_to_the_end(kept: Any) -> None:
    """Keeps ``kept`` alive beyond the end of the interpreter.

    The destructor of a group would wait for a collective that the other ranks never join. For collectives, see the
    comment at ``_ended``.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
