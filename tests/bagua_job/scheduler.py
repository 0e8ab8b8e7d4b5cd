"""Bagua's gradient scheduler on the host: ``bagua_core.BaguaCommBackendPy`` and ``BaguaBucketPy``.

As the native one it runs the operations of a bucket once all of its tensors are ready, bucket by bucket in the order
that was registered; but at once, where that has a thread for it. Compression is left out: what passes through is exact.
"""

import threading

import torch
from memory import memory_of

padding = []  # handles of the tensors that fill a bucket up, which nobody marks as ready


class HostBucket:
    def __init__(self, name, tensors):
        self.name, self.tensors = name, tensors
        self.operations = []

    def append_centralized_synchronous_op(self, inter, intra, hierarchical, average, scattergather, compression):
        def average_all():
            for memory in self.memories():
                if hierarchical:
                    intra.sum(memory, average)
                    if inter is not None and inter.nranks() > 1:
                        raise NotImplementedError("more than one node")
                else:
                    inter.sum(memory, average)

        self.operations.append(average_all)

    def append_python_op(self, function):
        self.operations.append(lambda: function(self.name))

    def append_decentralized_synchronous_op(self, inter, intra, hierarchical, peer_selection_mode, peer_weight):
        operation = PeerAverage(self, intra if hierarchical else inter, peer_weight)
        self.operations.append(operation)
        return operation

    def append_low_precision_decentralized_synchronous_op(self, inter, intra, hierarchical, **weights):
        def average_all():
            for memory in self.memories():
                (intra if hierarchical else inter).sum(memory, True)

        self.operations.append(average_all)

    def append_decentralized_asynchronous_op(self, inter, intra, peer_selection_mode, torch_stream):
        operation = AsynchronousAverage(self, inter)
        self.operations.append(operation)
        return operation

    def clear_ops(self):
        self.operations.clear()

    def memories(self):
        return [memory_of(tensor) for tensor in self.tensors]


class PeerAverage:
    def __init__(self, bucket, communicator, peer_weight):
        self.bucket, self.communicator, self.peer_weight = bucket, communicator, peer_weight

    def __call__(self):
        peer = memory_of(self.peer_weight)
        peer.copy_(torch.cat(self.bucket.memories()))
        self.communicator.sum(peer, True)

    def copy_back_peer_weight(self, bucket):
        parts = memory_of(self.peer_weight).split([tensor.num_elements() for tensor in bucket.tensors])
        for memory, part in zip(bucket.memories(), parts, strict=True):
            memory.copy_(part)


class AsynchronousAverage:
    """As Bagua's: the lock that a training step holds is not held while ranks wait for each other."""

    def __init__(self, bucket, communicator):
        self.bucket, self.communicator = bucket, communicator
        self.lock = threading.Lock()
        self.aborted, self.status = False, True
        self.runs = 0

    def __call__(self):
        aborted = torch.tensor([float(self.aborted)])
        self.communicator.sum(aborted, False)
        if aborted.item():
            self.status = False
            return
        memories = self.bucket.memories()
        before = torch.cat(memories)
        average = before.clone()
        self.communicator.sum(average, True)
        with self.lock:
            for memory, change in zip(memories, (average - before).split([len(m) for m in memories]), strict=True):
                memory += change
        self.runs += 1

    def lock_weight(self):
        self.lock.acquire()

    def unlock_weight(self):
        self.lock.release()

    def get_status(self):
        return self.status

    def abort(self):
        self.aborted = True


class HostBackend:
    def __init__(self, channel_capacity, device_id):
        self.buckets = []
        self.ready = set()
        self.next = 0

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
