"""Layers with a forward of their own: their calls of torch's batch normalization run over all ranks.

A forward of its own may call ``super().forward``, torch's forward by its name, or ``F.batch_norm``. The first reaches
:class:`SyncBatchNorm` by method resolution. A mode that intercepts torch's functions redirects the two others; it is
active only while the forward of such a layer runs in training. Synchronized layers that are parts of the layer tell it
of their calls.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from .. import ops
from ..groups import ALONE
from ..step.call import Call
from ..sync_batchnorm import SyncBatchNorm, as_one_node, options_of, through_attachments
from ..threads import this_thread
from ..torch_internals.autograd import unseen_by_selective_checkpointing
from .hooks import own_forward_contexts


class ObservedSyncBatchNorm(SyncBatchNorm):
    """Base class of layers with a forward of their own, which records whether it synchronized the layer or a part."""

    # Exists only while the layer's forward runs in training. An attribute of the layer and not of the mode, because
    # torch.compile traces with another mode object.
    was_synchronized: bool

    def forward(self, input: Tensor, residual: Tensor | None = None, **masks: Any) -> Tensor:
        self.note_synchronization()
        return _synchronized_forward(self, input, residual, masks)

    def note_synchronization(self) -> None:
        if not vars(self).get("was_synchronized", True):
            self.was_synchronized = True


def observed_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``forward``, a method of a class of layers, with its batch normalization synchronized in training.

    The returned method raises RuntimeError if a call computed no batch normalization by the layer's own statistics, or
    used statistics that belong to no layer, which this rank alone would have computed.
    """

    @functools.wraps(forward)
    def observed(layer: ObservedSyncBatchNorm, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Proxy):
                return as_one_node(layer, argument, args, kwargs)
        if not layer.training:
            with _Redirect(layer) if _differs_from_torch(layer) else nullcontext():
                return forward(layer, *args, **kwargs)
        with ExitStack() as contexts:
            contexts.enter_context(_Redirect(layer))
            for make in own_forward_contexts:
                context = make(layer)
                if context is not None:
                    contexts.enter_context(context)
            if "was_synchronized" in vars(layer):  # a nested or concurrent call of the layer does the check
                return forward(layer, *args, **kwargs)
            layer.was_synchronized = False
            try:
                with _observed_parts(layer):
                    output = forward(layer, *args, **kwargs)
                was_synchronized = layer.was_synchronized
            finally:
                del layer.was_synchronized
        if not was_synchronized:
            raise _unsynchronized(layer, "called neither torch's forward, F.batch_norm nor a converted part of it")
        return output

    return observed


def _differs_from_torch(layer: SyncBatchNorm) -> bool:
    """Whether ``layer`` may differ from F.batch_norm in evaluation with the same running statistics."""
    if not torch.compiler.is_compiling() and this_thread.has_hooks:  # as in the recomputation of a checkpoint
        return True
    return layer.eps_mode != "plus" or layer.fused_activation is not None or bool(layer._sync_state.attachments)


@dataclass(frozen=True, eq=False)
class _Observer:
    """Attachment of a part of a layer: notes that the part was called in training."""

    layer: ObservedSyncBatchNorm

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        output = go(call)
        if call.synchronizes:
            self.layer.note_synchronization()
        return output


@contextmanager
def _observed_parts(layer: ObservedSyncBatchNorm) -> Iterator[None]:
    """Context in which ``layer`` notes the training calls of its synchronized parts."""
    parts = [part for part in layer.modules() if isinstance(part, SyncBatchNorm) and part is not layer]
    for part in parts:
        part._sync_state.attachments = (*part._sync_state.attachments, _Observer(layer))
    try:
        yield
    finally:
        for part in parts:
            part._sync_state.attachments = tuple(
                one for one in part._sync_state.attachments if not (isinstance(one, _Observer) and one.layer is layer)
            )


@contextmanager
def restored_counter(counter: Tensor) -> Iterator[None]:
    """Context after which ``counter``, a layer's ``num_batches_tracked``, has its old value.

    Use it around an own ``forward`` that counts a batch which must not count.
    """
    with unseen_by_selective_checkpointing():
        before = counter.clone()
    try:
        yield
    finally:  # checkpointing ends a recomputation by an exception once it has all tensors that it needs
        with unseen_by_selective_checkpointing():
            counter.copy_(before)


class _TorchsCall(NamedTuple):
    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    def uses(self, modules: Iterable[nn.Module]) -> bool:
        """Whether a tensor of ``modules`` is among the parameters and buffers of the call."""
        # Replicas of DataParallel and layers in FullyShardedDataParallel have their parameters in vars(module).
        held = (values for module in modules for values in (module._parameters, module._buffers, vars(module)))
        ids = {id(value) for values in held for value in values.values() if value is not None}
        return any(id(tensor) in ids for tensor in self[1:5])


BATCH_NORMS: Mapping[Any, Callable[..., _TorchsCall]] = {
    F.batch_norm: _TorchsCall,
    torch.batch_norm: lambda input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled: (
        _TorchsCall(input, running_mean, running_var, weight, bias, training, momentum, eps)
    ),
}


class _Redirect(TorchFunctionMode):
    """Sends calls of batch normalization with tensors of ``layer`` to :func:`batch_norm`, with its group."""

    def __init__(self, layer: ObservedSyncBatchNorm) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BATCH_NORMS:
            call = BATCH_NORMS[func](*args, **kwargs)
            if not any(isinstance(tensor, Tensor) for tensor in call[1:5]) or call.uses([self.layer]):
                self.layer.note_synchronization()
                # A layer with frozen statistics calls for evaluation in training, where nothing is to synchronize.
                if call.training or _differs_from_torch(self.layer):
                    layer = self.layer
                    # The forward counts the batches itself, as torch's does before this call.
                    buffers = ops.Buffers(call.running_mean, call.running_var)
                    options = options_of(layer)._replace(eps=call.eps, momentum=call.momentum)
                    group = layer._sync_state.group if call.training else ALONE
                    tensors = call.input, call.weight, call.bias, None
                    return through_attachments(layer, Call(*tensors, buffers, options, call.training, group, layer))
            elif self.layer.training and call.training and not call.uses(list(self.layer.modules())[1:]):
                raise _unsynchronized(self.layer, "called F.batch_norm with tensors that are not the layer's")
        return func(*args, **kwargs)


def _synchronized_forward(
    layer: SyncBatchNorm, input: Tensor, residual: Tensor | None, masks: dict[str, Any]
) -> Tensor:
    """Calls the forward of :class:`SyncBatchNorm` as a function that the mode sees, without the calls inside it."""
    if has_torch_function((input,)):
        output: Tensor = handle_torch_function(_synchronized_forward, (input,), layer, input, residual, masks)
        return output
    return SyncBatchNorm.forward(layer, input, residual, **masks)


def _unsynchronized(layer: nn.Module, what: str) -> RuntimeError:
    cls = type(layer).__dict__.get("local_class", type(layer))
    return RuntimeError(
        f"{cls.__module__}.{cls.__qualname__}: expected its forward to normalize, in training, by the layer's own "
        f"statistics through super().forward or F.batch_norm, but it {what}: the layer would not be synchronized. "
        "Leave it out of conversion with filter, or register_converter a class for it"
    )
