"""How the host waits for a collective, so that Ctrl-C ends it; and how it leaves one that it does not wait for."""

import ctypes
from collections import deque
from datetime import timedelta
from typing import Any
from weakref import finalize, ref

from torch import Tensor


class Begun:
    """A collective that this rank has begun and does not wait for now, nor when the process ends."""

    def __init__(self, group: Any, result: Tensor, work: Any, adds_up: bool = False) -> None:
        self._group, self._result, self._work, self._adds_up = ref(group), result, work, adds_up
        if result.is_cpu:
            _keep_to_the_end(group)
            _keep_to_the_end(work)

    def wait(self) -> Tensor:
        """Waits for the other ranks, and returns the result, or the sum of its rows."""
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
                if work.is_completed():  # it has failed, or ended just after the slice
                    break
        work.wait()
        _ended[id(group)].append(work)
    except BaseException:
        if not work.is_completed():
            _keep_to_the_end(group)
        _keep_to_the_end(work)
        raise


_SLICE = timedelta(seconds=0.5)

# The last collectives that have ended, by the id of their group. A thread of gloo lets go of each some time after it
# has told us of the end: if the tensors went with it while the interpreter ends, that thread would ask for the GIL, and
# that aborts the process. They go when their group goes, whose end waits for its threads.
_ended: dict[int, deque[Any]] = {}


def keep_last_works_of(group: Any) -> None:
    """Has the last collectives of ``group`` live as long as it does, of those that :func:`wait_in_slices` waits for."""
    key = id(group)
    if key not in _ended:
        _ended[key] = deque(maxlen=4)
        finalize(group, _ended.pop, key).atexit = False  # type: ignore[misc]  # that would be too early


def _keep_to_the_end(kept: Any) -> None:
    """Has ``kept`` outlive the interpreter.

    The end of a group would wait for a collective that the other ranks do not join; for a collective, see above.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
