"""Bagua's native edge on the host: its communicators over gloo in place of NCCL.

What is replaced is what needs a CUDA driver. Bagua's Python, its tensors (``BaguaTensorPy``) and its store stay.
"""

import functools
import itertools
import os
import threading
from datetime import timedelta
from typing import ClassVar

import scheduler
import torch
import torch.distributed as dist
import workers
from scheduler import memory_of
from streams import Event, Stream, current_stream, record_stream, stream, timeline
from torch.utils._python_dispatch import _disable_current_modes

_ids = itertools.count()


def off_the_device(method):
    """Hides work of NCCL, which is none on the caller's stream."""

    @functools.wraps(method)
    def call(*args, **kwargs):
        with _disable_current_modes():
            return method(*args, **kwargs)

    return call


class TorchWithDevice:
    """torch, as Bagua's functions see it that refuse tensors of a CPU."""

    def __getattr__(self, name):
        return (lambda *args: None) if name == "device" else getattr(torch, name)


def backend_tensor(name, torch_tensor):
    handle = _backend_tensor_class(name=name, torch_tensor=torch_tensor)
    if name.startswith("bagua_padding_tensor"):
        scheduler.padding.append(handle)
    return handle


class HostCommunicator:
    """``bagua_core.BaguaSingleCommunicatorPy``, which its members make together and nobody else."""

    made: ClassVar[list] = []

    def __init__(self, rank, nranks, device_id, stream_ptr, nccl_unique_id_str):
        import bagua.torch_api.communication as communication

        assert device_id == int(os.environ["LOCAL_RANK"])
        store = dist.PrefixStore(nccl_unique_id_str, communication._default_store)
        self._gloo = dist.ProcessGroupGloo(store, rank, nranks, timedelta(seconds=60))
        self._rank, self._nranks = rank, nranks
        self.stream = Stream.all[stream_ptr]
        HostCommunicator.made.append(self)

    @staticmethod
    def generate_nccl_unique_id_str():
        return f"{os.getpid()}-{next(_ids)}"

    def rank(self):
        return self._rank

    def nranks(self):
        return self._nranks

    def device_id(self):
        return int(os.environ["LOCAL_RANK"])

    @off_the_device
    def allgather(self, send, recv):
        sent, received = memory_of(send), memory_of(recv)
        assert received.numel() == sent.numel() * self._nranks
        assert received.dtype == sent.dtype
        self._note("allgather", [sent], [received])
        self._gloo.allgather([list(received.chunk(self._nranks))], [sent]).wait()

    @off_the_device
    def allgather_inplace(self, tensor):
        received = memory_of(tensor)
        self._note("allgather", [], [received])
        parts = list(received.chunk(self._nranks))
        self._gloo.allgather([parts], [parts[self._rank].clone()]).wait()

    @off_the_device
    def allreduce(self, send, recv, op):
        sent, received = memory_of(send), memory_of(recv)
        self._note("allreduce", [sent], [received])
        received.copy_(sent)
        self._sum(received, op)

    @off_the_device
    def allreduce_inplace(self, tensor, op):
        reduced = memory_of(tensor)
        self._note("allreduce", [], [reduced])
        self._sum(reduced, op)

    @off_the_device
    def broadcast(self, tensor, src):
        sent = memory_of(tensor)
        self._note("broadcast", [], [sent])
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([sent], options).wait()

    def sum(self, tensor, average):
        """An operation of the scheduler."""
        self._gloo.allreduce([tensor]).wait()
        if average:
            tensor /= self._nranks

    def _sum(self, tensor, op):
        assert op in (0, 10), op  # SUM, AVG
        self.sum(tensor, op == 10)

    def _note(self, what, read, written):
        name = f"{what} of {self._nranks} ranks"
        numel, dtype = written[0].numel(), written[0].dtype
        timeline.collectives.append((what, self.stream.cuda_stream, numel, str(dtype)))
        self.stream.use({tensor.data_ptr() for tensor in read}, False, name)
        self.stream.use({tensor.data_ptr() for tensor in written}, True, name)


def join_job(store, rank, world_size):
    """Starts a Bagua job, also in a process that was in another one, over torch's default group on gloo."""
    workers.join_job(store, rank, world_size)
    install()
    reset()
    import bagua.torch_api.communication as communication

    communication.init_process_group(dist.FileStore(f"{store}_bagua", world_size), rank, world_size, world_size)
    timeline.clear()


def reset():
    """Makes Bagua and this package forget the job that they were in."""
    import bagua.torch_api.communication as communication

    import bagua_syncbn.communicators.bagua as ours

    ours._communicators.clear()
    HostCommunicator.made.clear()
    communication._default_pg = communication._default_store = communication._autotune_service_port = None
    communication._pg_map.clear()
    communication._pg_group_ranks.clear()
    communication._group_count = 0
    for cached in (
        communication.get_communicator,
        communication._get_rank_mappings,
        communication.get_hyperparameters_service_client,
        communication.get_backend,
    ):
        cached.cache_clear()


def join_job_on_a_gpu(store, rank, world_size):
    """Starts the real thing, over NCCL; once in a process."""
    import bagua.torch_api.communication as communication

    communication.start_autotune_server = _start_autotune_thread
    torch.cuda.set_device(rank)
    communication.init_process_group(dist.FileStore(store, world_size), rank, world_size, world_size)


def install():
    """Replaces the native edge in this process."""
    import bagua_core

    if bagua_core.BaguaSingleCommunicatorPy is HostCommunicator:
        return
    import torch._dynamo  # looks at torch.cuda.Stream when it is imported

    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream, torch.cuda.stream = current_stream, stream
    torch.cuda.LongTensor = torch.LongTensor
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: timeline.host_waits.append("device")
    torch.Tensor.record_stream = record_stream
    torch.Tensor.cuda = lambda tensor, *args: tensor
    global _backend_tensor_class
    _backend_tensor_class = bagua_core.BaguaTensorPy
    bagua_core.BaguaTensorPy = backend_tensor
    bagua_core.BaguaSingleCommunicatorPy = HostCommunicator
    bagua_core.BaguaCommBackendPy = scheduler.HostBackend
    bagua_core.BaguaBucketPy = scheduler.HostBucket

    import bagua.torch_api.communication as communication

    import bagua_syncbn.communicators.bagua as ours

    # In this process rather than in a child, which these processes may not have and which would survive them.
    communication.start_autotune_server = _start_autotune_thread
    communication.torch = TorchWithDevice()
    ours._device = lambda: torch.device("cpu")


def _start_autotune_thread(port):
    import bagua.torch_api.communication as communication

    threading.Thread(target=communication.run_flask_app, args=(port,), daemon=True).start()
