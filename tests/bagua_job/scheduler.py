"""Bagua's gradient scheduler on the host: ``bagua_core.BaguaCommBackendPy`` and ``BaguaBucketPy``.

As the native one it runs the operations of a bucket once all of its tensors are ready, bucket by bucket in the order
that was registered; but at once, where that has a thread for it. Each operation is an exact average or sum.
"""

import ctypes
import threading

import torch

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "U8": torch.uint8, "I64": torch.int64}
padding = []  # handles of the tensors that fill a bucket up, which nobody marks as ready


def memory_of(bagua_tensor):
    """The memory that Bagua's handle names, as NCCL would be given it."""
    dtype = _DTYPES[bagua_tensor.dtype()]
    size = bagua_tensor.num_elements() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(bagua_tensor.data_ptr()), dtype=dtype)


class HostBucket:
    def __init__(self, name, tensors):
        self.name, self.tensors, self.operations = name, tensors, []

    def append_centralized_synchronous_op(self, inter, intra, hierarchical, average=True, *_, **__):
        return self._append(Reduction(self, intra if hierarchical else inter, average))

    def append_decentralized_synchronous_op(self, inter, intra, hierarchical, *_, **__):
        return self.append_centralized_synchronous_op(inter, intra, hierarchical)

    append_low_precision_decentralized_synchronous_op = append_decentralized_synchronous_op

    def append_decentralized_asynchronous_op(self, inter, *_, **__):
        return self._append(AsynchronousAverage(self, inter))

    def append_python_op(self, function):
        return self._append(lambda: function(self.name))

    def _append(self, operation):
        self.operations.append(operation)
        return operation

    def clear_ops(self):
        self.operations.clear()

    def memories(self):
        return [memory_of(tensor) for tensor in self.tensors]


class Reduction:
    def __init__(self, bucket, communicator, average):
        self.bucket, self.communicator, self.average = bucket, communicator, average

    def __call__(self):
        for memory in self.bucket.memories():
            self.communicator.sum(memory, self.average)

    def copy_back_peer_weight(self, bucket):
        """Does nothing: the average of the weights is in their place already."""


class AsynchronousAverage:
    """As Bagua's: the lock that a training step holds is not held while ranks wait for each other."""

    def __init__(self, bucket, communicator):
        self.bucket, self.communicator, self.lock = bucket, communicator, threading.Lock()
        self.lock_weight, self.unlock_weight = self.lock.acquire, self.lock.release
        self.aborted, self.status, self.runs = False, True, 0

    def __call__(self):
        aborted = torch.tensor([float(self.aborted)])
        self.communicator.sum(aborted, False)
        if aborted.item():
            self.status = False
            return
        for memory in self.bucket.memories():
            before, average = memory.clone(), memory.clone()
            self.communicator.sum(average, True)
            with self.lock:
                memory += average - before
        self.runs += 1

    def get_status(self):
        return self.status

    def abort(self):
        self.aborted = True


class HostBackend:
    def __init__(self, channel_capacity, device_id):
        self.buckets, self.ready, self.next = [], set(), 0

    def register_ordered_buckets(self, buckets):
        self.buckets, self.next = buckets, 0
        self.ready.clear()

    def mark_communication_ready(self, tensor, event):
        self.ready.add(id(tensor))
        while self.buckets and self._waits_for(self.buckets[self.next]) <= self.ready:
            bucket = self.buckets[self.next]
            self.ready -= self._waits_for(bucket)
            self.next = (self.next + 1) % len(self.buckets)
            for operation in list(bucket.operations):
                operation()

    def wait_pending_comm_ops(self):
        pass

    def _waits_for(self, bucket):
        return {id(tensor) for tensor in bucket.tensors if not any(tensor is filler for filler in padding)}
