"""Replaces the parts of Bagua that need a CUDA driver, and keeps its Python code, tensors and store.

Communicators run over gloo instead of NCCL. Streams are no-ops; :data:`log` lists enqueued work, waits between streams
and waits of the host, in order.
"""

import ctypes
import itertools
import os
import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.helpers import workers

log = []
_numbers = itertools.count(1)


class Event:
    def __init__(self, *args, **kwargs):
        self.cuda_event = next(_numbers)

    def record(self, stream=None):
        pass

    wait, query = record, (lambda self: True)

    def synchronize(self):
        log.append("host waits")


class Stream(Event):
    all: ClassVar[dict[int, "Stream"]] = {}

    def __init__(self, device=None, priority=0, **kwargs):
        self.cuda_stream, self.priority = next(_numbers), priority
        Stream.all[self.cuda_stream] = self

    def record_event(self, event=None):
        return event or Event()

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        log.append((self.cuda_stream, "waits for", stream.cuda_stream))


_current = [Stream()]


def current_stream(device=None):
    return _current[-1]


@contextmanager
def enter_stream(stream):
    _current.append(stream)
    yield
    _current.pop()


class Watch(TorchDispatchMode):
    """Also logs operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            log.append(str(func))
        return func(*args, **(kwargs or {}))


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "U8": torch.uint8, "I64": torch.int64}


def memory_of(bagua_tensor):
    """Returns the memory that a Bagua handle passes to NCCL."""
    dtype = _DTYPES[bagua_tensor.dtype()]
    size = bagua_tensor.num_elements() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(bagua_tensor.data_ptr()), dtype=dtype)


class HostCommunicator:
    """``bagua_core.BaguaSingleCommunicatorPy``, which all members (and only they) create together."""

    made: ClassVar[list] = []

    def __init__(self, rank, nranks, device_id, stream_ptr, nccl_unique_id_str):
        import bagua.torch_api.communication as communication

        assert device_id == int(os.environ["LOCAL_RANK"])
        store = dist.PrefixStore(nccl_unique_id_str, communication._default_store)
        self._gloo = dist.ProcessGroupGloo(store, rank, nranks, timedelta(seconds=60))
        self.rank, self.nranks, self.device_id = (lambda: rank), (lambda: nranks), (lambda: device_id)
        self.stream = Stream.all[stream_ptr]
        HostCommunicator.made.append(self)

    @staticmethod
    def generate_nccl_unique_id_str():
        return f"{os.getpid()}-{next(_numbers)}"

    def allgather(self, send, recv):
        sent, received = memory_of(send), memory_of(recv)
        assert (received.numel(), received.dtype) == (sent.numel() * self.nranks(), sent.dtype)
        with self._noted("allgather", sent):
            self._gloo.allgather([list(received.chunk(self.nranks()))], [sent]).wait()

    def allgather_inplace(self, tensor):
        with self._noted("allgather", received := memory_of(tensor)):
            parts = list(received.chunk(self.nranks()))
            self._gloo.allgather([parts], [parts[self.rank()].clone()]).wait()

    def allreduce_inplace(self, tensor, op):
        assert op in (0, 10), op  # SUM, AVG
        with self._noted("allreduce", reduced := memory_of(tensor)):
            self.sum(reduced, op == 10)

    def broadcast(self, tensor, src):
        options = dist.BroadcastOptions()
        options.rootRank = src
        with self._noted("broadcast", sent := memory_of(tensor)):
            self._gloo.broadcast([sent], options).wait()

    def sum(self, tensor, average):
        self._gloo.allreduce([tensor]).wait()
        if average:
            tensor /= self.nranks()

    @contextmanager
    def _noted(self, what, sent):
        log.append((self.stream.cuda_stream, what, sent.numel(), str(sent.dtype)))
        with _disable_current_modes():  # NCCL's work is not on the caller's stream
            yield


class HostBucket:
    """``bagua_core.BaguaBucketPy``: exact averages or sums. Asynchronous operations are no-ops."""

    def __init__(self, name, tensors):
        self.name, self.tensors, self.operations = name, tensors, []

    def append_centralized_synchronous_op(self, inter, intra, hierarchical, average=True, **_):
        communicator = intra if hierarchical else inter
        return self._append(lambda: [communicator.sum(memory_of(tensor), average) for tensor in self.tensors])

    def append_decentralized_asynchronous_op(self, *_, **__):
        return self._append(lambda: None)

    def append_python_op(self, function):
        return self._append(lambda: function(self.name))

    def _append(self, run):
        operation = Mock(side_effect=run)  # the other methods are no-ops
        operation.get_status = lambda: not operation.abort.called
        self.operations.append(operation)
        return operation

    def clear_ops(self):
        self.operations.clear()


class HostBackend:
    """``bagua_core.BaguaCommBackendPy``, the scheduler: runs all buckets in order when Bagua waits for them.

    Only if tensors are ready: Bagua names a backend after its module's id, which on one rank may be the id of an
    earlier module. This rank would run the earlier module's buckets, alone and on memory that was freed.
    """

    def __init__(self, channel_capacity, device_id):
        self.buckets, self.is_ready = [], False

    def register_ordered_buckets(self, buckets):
        self.buckets = buckets

    def mark_communication_ready(self, tensor, event):
        self.is_ready = True

    def wait_pending_comm_ops(self):
        is_ready, self.is_ready = self.is_ready, False
        for bucket in self.buckets if is_ready else ():
            for operation in list(bucket.operations):
                operation()


def join_job(store, rank, world_size):
    """Starts a Bagua job over torch's default group on gloo, even in a process that was in another job."""
    workers.join_job(store, rank, world_size)
    install()
    reset()
    import bagua.torch_api.communication as communication

    communication.init_process_group(dist.FileStore(f"{store}_bagua", world_size), rank, world_size, world_size)


def reset():
    """Makes Bagua and this package forget their job."""
    import bagua.torch_api.communication as communication

    from bagua_syncbn.communicators import torch_engine

    communication._default_pg = communication._default_store = communication._autotune_service_port = None
    communication._group_count = 0
    for known in (torch_engine._jobs, HostCommunicator.made, communication._pg_map, communication._pg_group_ranks):
        known.clear()
    for name in ("get_communicator", "_get_rank_mappings", "get_hyperparameters_service_client", "get_backend"):
        getattr(communication, name).cache_clear()


def install():
    """Replaces the native core in this process."""
    import bagua_core

    if bagua_core.BaguaSingleCommunicatorPy is HostCommunicator:
        return
    import torch._dynamo  # reads torch.cuda.Stream on import

    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream, torch.cuda.stream = current_stream, enter_stream
    torch.cuda.LongTensor = torch.LongTensor
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: log.append("host waits")
    torch.Tensor.cuda = lambda tensor, *args: tensor
    bagua_core.BaguaSingleCommunicatorPy = HostCommunicator
    bagua_core.BaguaCommBackendPy, bagua_core.BaguaBucketPy = HostBackend, HostBucket

    import bagua.torch_api.communication as communication

    import bagua_syncbn.bagua.engine as ours

    # Starts a thread instead of a process, which could outlive this one.
    communication.start_autotune_server = start_autotune_thread
    # Bagua's functions reject tensors on torch.device("cpu").
    communication.torch = SimpleNamespace(**vars(torch) | {"device": lambda *_: None})
    ours._device = lambda: torch.device("cpu")


def start_autotune_thread(port):
    import bagua.torch_api.communication as communication

    threading.Thread(target=communication.run_flask_app, args=(port,), daemon=True).start()
