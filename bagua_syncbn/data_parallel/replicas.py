"""Replicas of one model in threads of one process, as torch.nn.DataParallel runs them.

Replicas wait for each other in forward only. In backward no thread waits for another one, however many threads autograd
uses and in whatever order it runs the replicas.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

TensorSequence: TypeAlias = Sequence[Tensor | None]
Compute: TypeAlias = Callable[[list[TensorSequence]], Sequence[Sequence[Tensor]]]

TIMEOUT = 1800.0
"""Seconds that a replica waits for one that neither arrives nor ends: gloo's default time-out in torch.distributed."""


class ReplicaError(RuntimeError):
    """Raised in a replica that waits for another replica which raised an error; that error is the cause."""


class _Sent(NamedTuple):
    """Tensors of one device that are passed to another thread, their CUDA stream, and the event that ends its work."""

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
    first = tensors[0]
    if first is None or not first.is_cuda:
        return _Sent(tensors, None, None)
    stream = torch.cuda.current_stream(first.device)
    return _Sent(tensors, stream, stream.record_event())


@contextmanager
def in_streams(streams: Sequence[torch.cuda.Stream | None]) -> Iterator[None]:
    """Makes ``streams`` the current ones of their devices; of several for one device, the first."""
    with ExitStack() as stack:
        for stream in reversed(streams):
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
        yield


@dataclass
class _Meeting:
    layer: str = ""
    sent: dict[int, _Sent] = field(default_factory=dict)
    results: list[_Sent] | None = None


class Replicas:
    """Replicas of a model in one forward pass: which of them run, which have ended, and where they meet.

    A meeting takes place in one layer, and all replicas come to the same meetings in the same order.

    Args:
        size: number of replicas.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.error: BaseException | None = None  # first error that a replica raised
        self._changed = Condition()
        self._meeting = _Meeting()
        self._calls: list[Counter[str]] = [Counter() for _ in range(size)]
        # Numbers of passes. A replica may begin the next pass before the others have ended theirs.
        self._begun = [0] * size
        self._ended = [0] * size

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """Marks the pass of one replica. Its end, or an error in it, frees waiting replicas with an error."""
        with self._changed:
            nested = self._begun[rank] > self._ended[rank]  # a module that calls itself
            self._begun[rank] += not nested
        try:
            yield
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            with self._changed:
                self._ended[rank] += not nested
                self._changed.notify_all()

    def meet(self, rank: int, layer: str, tensors: TensorSequence, compute: Compute) -> Any:
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
        try:
            meeting = self._arrive(rank, layer, _send(tensors))
            if rank == 0:
                self._wait(meeting, lambda: len(meeting.sent) == self.size)
                brought = [meeting.sent[other] for other in range(self.size)]
                with in_streams([sent.stream for sent in brought]):
                    results = [_send(own) for own in compute([sent.receive() for sent in brought])]
                with self._changed:
                    meeting.results = results
                    self._changed.notify_all()
            self._wait(meeting, lambda: meeting.results is not None)
        except BaseException as error:
            self._stop(error)
            raise
        assert meeting.results is not None
        return meeting.results[rank].receive()

    def _arrive(self, rank: int, layer: str, sent: _Sent) -> _Meeting:
        with self._changed:
            if self._begun[rank] and self._begun[rank] == self._ended[rank]:
                raise RuntimeError(
                    f"{layer}: expected calls during the forward pass of its replica only, got one after replica "
                    f"{rank} had ended; activation checkpointing, which repeats the pass in backward, cannot be "
                    "combined with replicas"
                )
            self._calls[rank][layer] += 1
            meeting = self._meeting
            if meeting.sent and meeting.layer != layer:
                raise RuntimeError(
                    f"{layer}: expected every replica to call the same layers in the same order, got "
                    f"{self._describe_call(rank, layer)}, where {self._describe_call(min(meeting.sent), meeting.layer)}"
                )
            meeting.layer = layer
            meeting.sent[rank] = sent
            if len(meeting.sent) == self.size:
                self._meeting = _Meeting()
                self._changed.notify_all()
            return meeting

    def _wait(self, meeting: _Meeting, is_done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_done() or self.error is not None or self._gone(meeting), TIMEOUT)
            if is_done():
                return
            if self.error is not None:
                raise ReplicaError(
                    f"{meeting.layer}: expected all replicas, got an error in another one: "
                    f"{type(self.error).__name__}: {self.error}"
                ) from self.error
            calls = [counter[meeting.layer] for counter in self._calls]
            gone = self._gone(meeting)
            reason = f"when replica {gone[0]} ended" if gone else f"and no more in {TIMEOUT:g} seconds"
            raise RuntimeError(
                f"{meeting.layer}: expected the same number of calls by every replica, got {calls} by replicas 0 to "
                f"{self.size - 1} {reason}"
            )

    def _gone(self, meeting: _Meeting) -> list[int]:
        """Returns the replicas that have ended the pass of the replicas in ``meeting`` without coming to it."""
        now = max(1, *(self._begun[rank] for rank in meeting.sent))
        return [rank for rank in range(self.size) if rank not in meeting.sent and self._ended[rank] >= now]

    def _describe_call(self, rank: int, layer: str) -> str:
        return f"replica {rank} in its call {self._calls[rank][layer]} of {layer}"

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()


class CallbackContext:
    """Context that all copies of a submodule share in one forward pass. Copies may set any attributes on it.

    This package sets two: ``replicas``, and ``layer``, the name of the submodule in messages.
    """

    def __init__(self, replicas: Replicas, layer: str) -> None:
        self.replicas = replicas
        self.layer = layer
