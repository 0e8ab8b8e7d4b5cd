"""Meetings of the replicas of a model, which torch.nn.DataParallel runs in threads of one process.

Replicas wait for each other in forward only. In backward no thread waits for another, however many threads autograd
uses and in whichever order it runs the replicas.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn

TensorSequence: TypeAlias = Sequence[Tensor | None]
Compute: TypeAlias = Callable[[list[TensorSequence]], Sequence[TensorSequence]]

TIMEOUT = 1800.0
"""Seconds to wait for a replica that neither arrives nor ends: gloo's default time-out in torch.distributed."""


class ReplicaError(RuntimeError):
    """Raised in a replica that waits if another replica raises an error, which is the cause."""


class _Sent(NamedTuple):
    """Tensors for another thread, the CUDA stream that computes them, and the event after its work."""

    tensors: TensorSequence
    stream: torch.cuda.Stream | None
    event: torch.cuda.Event | None

    def receive(self) -> TensorSequence:
        """Returns the tensors, for use in this thread's streams."""
        for tensor in self.tensors:
            if self.event is not None and tensor is not None:
                # The stream may differ from the sender's, where the memory would be given to other work as soon as no
                # thread holds the tensor.
                stream = torch.cuda.current_stream(tensor.device)
                stream.wait_event(self.event)
                tensor.record_stream(stream)
        return self.tensors


def _send(tensors: TensorSequence) -> _Sent:
    stream = stream_of(tensors[0])
    return _Sent(tensors, stream, None if stream is None else stream.record_event())


def stream_of(tensor: Tensor | None) -> torch.cuda.Stream | None:
    """Returns this thread's stream on the device of ``tensor``; None on CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor is not None and tensor.is_cuda else None


@contextmanager
def in_streams(streams: Sequence[torch.cuda.Stream | None]) -> Iterator[None]:
    """Makes ``streams`` current on their devices. The first of several streams on one device wins."""
    with ExitStack() as stack:
        for stream in reversed(streams):
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
        yield


class Replicas:
    """Meetings of replicas, and the number of passes that each has ended.

    A meeting takes place in one layer. All replicas come to the same meetings in the same order.

    Args:
        size: number of replicas.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.error: BaseException | None = None  # first error of a replica; there are no meetings after it
        self._changed = Condition()
        # The next meeting: its layer, and the replicas that have arrived. A replica waits for its results.
        self._layer = ""
        self._sent: dict[int, _Sent] = {}
        self._results: dict[int, _Sent] = {}
        self._calls: Counter[tuple[int, str]] = Counter()
        self._running: set[int] = set()
        # Passes ended per replica. A replica may begin the next pass before the others have ended theirs.
        self._ended = [0] * size

    def watch(self, rank: int, module: nn.Module) -> None:
        """Makes each call of ``module``, including its hooks, a pass of replica ``rank``.

        If the pass ends or raises, replicas that still wait for it raise.
        """
        reference = ref(module)  # a cycle would keep the copies of the parameters until the next garbage collection

        def call(*args: Any, **kwargs: Any) -> Any:
            replica = reference()
            assert replica is not None
            if rank in self._running:  # a module that calls itself
                return replica._call_impl(*args, **kwargs)
            self._running.add(rank)
            try:
                return replica._call_impl(*args, **kwargs)
            except BaseException as error:
                self._stop(error)
                raise
            finally:
                with self._changed:
                    self._running.remove(rank)
                    self._ended[rank] += 1
                    self._changed.notify_all()

        # torch calls this attribute of Module.compile instead of forward and hooks, so class and forward stay the same.
        # Compiled code would call the original module instead of the replica.
        for child in module.modules():
            vars(child).pop("_compiled_call_impl", None)
        module._compiled_call_impl = call
        vars(module)["_bagua_syncbn_replicas"] = self

    def meet(self, rank: int, layer: str, tensors: TensorSequence, compute: Compute) -> TensorSequence:
        """Waits until every replica has made this call; returns the results of ``compute`` for this replica.

        Args:
            rank: index of this replica.
            layer: the name of the layer, the same in all replicas.
            tensors: the tensors of this replica, on its device.
            compute: turns the tensors of all replicas, in their order, into the results for each replica, on its
                device. Replica 0 calls its own ``compute``, on its thread, in the streams of all replicas.

        Raises:
            ReplicaError: another replica raised.
            RuntimeError: another replica ended without this call or calls another layer; the pass of this replica has
                ended; some replicas did not arrive in :data:`TIMEOUT` seconds.
        """
        with self._changed:
            try:
                self._arrive(rank, layer, _send(tensors))
                self._wait(rank, layer)
                if rank == 0:
                    sent = [self._sent.pop(other) for other in range(self.size)]
                    with in_streams([one.stream for one in sent]):
                        results = compute([one.receive() for one in sent])
                        self._results = {other: _send(own) for other, own in enumerate(results)}
                    self._changed.notify_all()
            except BaseException as error:
                self._stop(error)
                raise
            return self._results.pop(rank).receive()

    def _arrive(self, rank: int, layer: str, sent: _Sent) -> None:
        if self._ended[rank] and rank not in self._running:
            raise RuntimeError(
                f"{layer}: expected calls during the forward pass of its replica only, got one after replica "
                f"{rank} had ended; activation checkpointing, which repeats the pass in backward, cannot be "
                "combined with replicas"
            )
        self._calls[rank, layer] += 1
        if self._sent and self._layer != layer:
            raise RuntimeError(
                f"{layer}: expected every replica to call the same layers in the same order, got "
                f"{self._describe_call(rank, layer)}, where {self._describe_call(min(self._sent), self._layer)}"
            )
        self._layer = layer
        self._sent[rank] = sent
        if len(self._sent) == self.size:
            self._changed.notify_all()

    def _wait(self, rank: int, layer: str) -> None:
        """Waits until all replicas have arrived (replica 0), or until there are results (the others)."""
        deadline = time.monotonic() + TIMEOUT
        # After an error, tensors of an earlier meeting may be left.
        while rank not in self._results if rank else self.error is not None or len(self._sent) < self.size:
            if self.error is not None:
                raise ReplicaError(
                    f"{layer}: expected all replicas, got an error in another one: "
                    f"{type(self.error).__name__}: {self.error}"
                ) from self.error
            ended = max(self._ended)
            if ended > self._ended[rank]:  # this pass
                reason = f"when replica {self._ended.index(ended)} ended"
            elif self._changed.wait(deadline - time.monotonic()):
                continue
            else:
                reason = f"and no more in {TIMEOUT:g} seconds"
            calls = [self._calls[other, layer] for other in range(self.size)]
            raise RuntimeError(
                f"{layer}: expected the same number of calls by every replica, got {calls} by replicas 0 to "
                f"{self.size - 1} {reason}"
            )

    def _describe_call(self, rank: int, layer: str) -> str:
        return f"replica {rank} in its call {self._calls[rank, layer]} of {layer}"

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()


@dataclass(eq=False)
class CallbackContext:
    """Context that all copies of a submodule share in one forward pass. Copies may set any attributes on it.

    This package sets two: ``replicas``, and ``layer``, the name of the submodule in messages.
    """

    replicas: Replicas
    layer: str
