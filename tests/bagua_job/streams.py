"""CUDA streams and events on the host: what comes after what, and whether it had to.

Each stream counts its work, and knows how much of each other stream's work comes before what it gets next, as vector
clocks do. :class:`Watch` finds a tensor that one stream uses while another one may be at it, and lists what the host
waits for.
"""

import itertools
from collections import Counter
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_numbers = itertools.count(1)


class Event:
    def __init__(self, *args, **kwargs):
        self.before = Counter()
        self.cuda_event = next(_numbers)

    def record(self, stream=None):
        self.before = Counter((stream or current_stream()).before)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        timeline.host_waits.append("event")

    def query(self):
        return True


class Stream:
    all: ClassVar[dict[int, "Stream"]] = {}

    def __init__(self, device=None, priority=0, **kwargs):
        self.cuda_stream = next(_numbers)
        self.priority = priority
        self.before = Counter()  # by stream, how much of its work comes before what this one gets next
        Stream.all[self.cuda_stream] = self

    def launch(self):
        self.before[self.cuda_stream] += 1

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.before |= event.before

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        timeline.host_waits.append("stream")

    def query(self):
        return True

    def use(self, storages, writes, what):
        """Puts work on this stream that reads, or writes, these addresses."""
        self.launch()
        for address in storages:
            uses = timeline.uses.setdefault(address, [])
            for other, number, wrote, by in uses:
                if (writes or wrote) and self.before[other] < number:
                    timeline.races.append(f"{what} may run before {by} is done")
            uses[:] = [use for use in uses if use[0] != self.cuda_stream or not writes]
            uses.append((self.cuda_stream, self.before[self.cuda_stream], writes, what))


class Timeline:
    """Events so far in this process."""

    def __init__(self):
        self.clear()

    def clear(self):
        self.uses = {}
        self.races = []
        self.host_waits = []
        self.copies = []
        self.collectives = []
        self.recorded = []


timeline = Timeline()
_default = Stream()
_current = [_default]


def current_stream(device=None):
    return _current[-1]


@contextmanager
def stream(stream):
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class Watch(TorchDispatchMode):
    """Puts every operation within on the current stream, as CUDA does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        inputs = {address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        outputs = {address(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        written = {
            address(value)
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor)
        }
        current_stream().use(inputs - {0}, False, str(func))
        current_stream().use((outputs - inputs | written) - {0}, True, str(func))
        return result


def record_stream(tensor, stream):
    timeline.recorded.append((address(tensor), stream.cuda_stream))
