"""Synchronization points for a model's replicas, which torch.nn.DataParallel runs in threads.

Replicas wait for each other only in forward. Backward never waits, because autograd may run several replicas in the
same thread.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakMethod

import torch
from torch import Tensor, nn

TensorSequence: TypeAlias = Sequence[Tensor | None]
Compute: TypeAlias = Callable[[list[TensorSequence]], Sequence[TensorSequence]]

TIMEOUT = 1800.0
"""Seconds to wait for a replica: gloo's default timeout in torch.distributed."""


class ReplicaError(RuntimeError):
    """Raised in waiting replicas. The cause is the error of the failed replica."""


class Sent(NamedTuple):
    """Tensors to hand to another thread, and the CUDA stream that computes them (None on CPU)."""

    tensors: TensorSequence
    stream: torch.cuda.Stream | None

    def receive(self) -> TensorSequence:
        """Returns the tensors, ready for use on this thread's current stream."""
        if self.stream is not None:
            stream = torch.cuda.current_stream(self.stream.device)
            if stream != self.stream:
                stream.wait_stream(self.stream)
                for tensor in self.tensors:
                    if tensor is not None:
                        tensor.record_stream(stream)  # keeps the allocator from reusing the memory too early
        return self.tensors


def stream_of(tensor: Tensor | None) -> torch.cuda.Stream | None:
    """Returns this thread's stream on the device of ``tensor``; None on CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor is not None and tensor.is_cuda else None


@contextmanager
def in_streams(streams: Sequence[torch.cuda.Stream | None]) -> Iterator[None]:
    """Makes ``streams`` current. If several streams are on the same device, the first wins."""
    with ExitStack() as stack:
        for stream in reversed(streams):
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
        yield


class Replicas:
    """Barriers of ``size`` replicas in a forward pass: one per layer call, in the same order in all replicas."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.error: BaseException | None = None  # a replica's first error; ends all waits
        self._changed = Condition()
        # The next barrier: the layer, the tensors of the replicas that have arrived, and their results.
        self._layer = ""
        self._sent: dict[int, Sent] = {}
        self._results: dict[int, Sent] = {}
        self._ended: set[int] = set()

    def watch(self, rank: int, module: nn.Module) -> None:
        """Observes the call of ``module``, replica ``rank``. When the call ends, peers that wait for this replica
        raise."""
        call: Any = WeakMethod(module._call_impl)  # a reference cycle would delay freeing the replica

        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return call()(*args, **kwargs)
            except BaseException as error:
                self.error = self.error or error
                raise
            finally:
                with self._changed:
                    self._ended.add(rank)
                    self._changed.notify_all()

        # If set (by Module.compile), torch calls this attribute instead of forward and hooks. Compiled code would call
        # the original module instead of the replica.
        for child in module.modules():
            vars(child).pop("_compiled_call_impl", None)
        module._compiled_call_impl = watched
        vars(module)["_bagua_syncbn_replicas"] = self

    def meet(self, rank: int, layer: str, tensors: TensorSequence, compute: Compute) -> TensorSequence:
        """Waits until all replicas make the same call; returns this replica's results.

        Replica 0 calls ``compute`` with all replicas' tensors, in all replicas' streams. Results would not be
        deterministic if any replica could call it, because autograd orders nodes by thread.
        """
        with self._changed:
            if rank in self._ended:
                raise RuntimeError(
                    f"{layer}: called after its replica's forward pass; a model in replicas cannot call itself, and "
                    "activation checkpointing cannot recompute its layers; use one process per device"
                )
            if self._sent and self._layer != layer:
                raise RuntimeError(
                    f"replica {min(self._sent)} calls {self._layer}, but replica {rank} calls {layer}; all replicas "
                    "must call the same layers in the same order"
                )
            self._layer, self._sent[rank] = layer, Sent(tensors, stream_of(tensors[0]))
            self._changed.notify_all()
            self._wait(rank)
            if rank == 0:
                sent = [self._sent.pop(other) for other in range(self.size)]
                with in_streams([each.stream for each in sent]):
                    results = compute([each.receive() for each in sent])
                    self._results = {other: Sent(own, stream_of(own[0])) for other, own in enumerate(results)}
                self._changed.notify_all()
            return self._results.pop(rank).receive()

    def _wait(self, rank: int) -> None:
        """Waits for the tensors of all replicas (replica 0) or for the results (peers)."""

        def outcome() -> str:
            if rank in self._results if rank else self.error is None and len(self._sent) == self.size:
                return "ready"
            if self.error is not None:
                return "raised"
            return "ended" if self._ended else ""

        found = self._changed.wait_for(outcome, TIMEOUT)
        if found == "raised":
            text = f"{self._layer}: a different replica raised {type(self.error).__name__}: {self.error}"
            raise ReplicaError(text) from self.error
        if found != "ready":
            missing = [other for other in range(self.size) if other not in self._sent]
            why = found or f"did not make this call within {TIMEOUT:g} seconds"
            raise RuntimeError(f"{self._layer}: replica {rank} waits for replicas {missing}, which {why}")


@dataclass(eq=False)
class CallbackContext:
    """Context that all copies of a submodule share in a forward pass, with any attributes that callbacks set.

    This package sets ``replicas``, and ``layer``, the name of the submodule in messages.
    """

    replicas: Replicas
    layer: str
