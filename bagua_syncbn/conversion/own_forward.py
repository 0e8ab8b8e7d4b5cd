"""Layers with a custom forward: calls of torch's batch normalization are synchronized.

A custom forward may call ``super().forward``, torch's forward through its class, or ``F.batch_norm``.
``super().forward`` reaches :class:`SyncBatchNorm` by method resolution. The other two calls are redirected by a mode
that intercepts torch's functions and is active only inside such a forward.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from .. import _ops as ops
from .._ops.options import options_of, unlike_torch
from .._step.call import Call
from .._step.hooks import hooks
from .._torch.autograd import current_mode, unseen_by_selective_checkpointing
from ..sync_batchnorm import SyncBatchNorm, as_one_node, through_attachments


class ObservedSyncBatchNorm(SyncBatchNorm):
    """Base class of layers with a custom forward, which records whether it synchronized the layer."""

    # Exists only while the layer's forward runs in training. Stored on the layer, not on the mode, because
    # torch.compile traces with a different mode object.
    was_synchronized: bool

    def forward(self, input: Tensor, residual: Tensor | None = None, **masks: Any) -> Tensor:
        self.note_synchronization()
        if has_torch_function((input,)):  # one torch function, so that the mode does not intercept the calls inside
            forward = ObservedSyncBatchNorm.forward
            output: Tensor = handle_torch_function(forward, (input,), self, input, residual, **masks)
            return output
        return SyncBatchNorm.forward(self, input, residual, **masks)

    def note_synchronization(self) -> None:
        if not vars(self).get("was_synchronized", True):
            self.was_synchronized = True


def observed_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``forward``, a method of a layer class, with its batch normalization synchronized in training.

    The returned method raises RuntimeError if a call did not normalize with the layer's own statistics, or used
    statistics that belong to no layer and would be local to this rank.
    """

    @functools.wraps(forward)
    def observed(layer: ObservedSyncBatchNorm, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Proxy):
                return as_one_node(layer, argument, args, kwargs)
        if not layer.training:
            with _Redirect(layer) if _differs_from_torch(layer) else nullcontext():
                return forward(layer, *args, **kwargs)
        with _Redirect(layer), _counted_once(layer):
            if "was_synchronized" in vars(layer):  # an outer or concurrent call checks this
                return forward(layer, *args, **kwargs)
            # A submodule may normalize for the layer.
            parts = (part for part in layer.modules() if part is not layer)
            layer.was_synchronized = any(isinstance(part, SyncBatchNorm) for part in parts)
            try:
                output = forward(layer, *args, **kwargs)
                if not layer.was_synchronized:
                    raise _unsynchronized(layer, "called neither torch's forward nor F.batch_norm")
            finally:
                del layer.was_synchronized
        return output

    return observed


def _differs_from_torch(layer: SyncBatchNorm) -> bool:
    """Returns whether ``layer`` may differ from F.batch_norm in evaluation with the same running statistics."""
    if not torch.compiler.is_compiling() and hooks.are_set:  # e.g. in a checkpoint
        return True
    return bool(unlike_torch(layer)) or bool(layer._sync_state.attachments)


@contextmanager
def _counted_once(layer: SyncBatchNorm) -> Iterator[None]:
    """Context manager that keeps a custom forward from counting a batch twice.

    Restores ``num_batches_tracked`` if the first run of a checkpoint has counted the batch, or if
    ``accumulate_statistics`` will.
    """
    counter = layer.num_batches_tracked
    is_counted = not torch.compiler.is_compiling() and ops.this_thread.is_repeating
    is_counted |= any(hasattr(attachment, "counts_batches") for attachment in layer._sync_state.attachments)
    if counter is None or not is_counted:
        yield
        return
    with unseen_by_selective_checkpointing():
        before = counter.clone()
    try:
        yield
    finally:  # checkpointing stops a recomputation with an exception once it has all the tensors it needs
        with unseen_by_selective_checkpointing():
            counter.copy_(before)


class _BatchNormCall(NamedTuple):
    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    def uses(self, modules: Iterable[nn.Module]) -> bool:
        """Returns whether a parameter or buffer in the call belongs to ``modules``."""
        # Replicas of DataParallel and layers in FullyShardedDataParallel have their parameters in vars(module).
        held = (values for module in modules for values in (module._parameters, module._buffers, vars(module)))
        ids = {id(value) for values in held for value in values.values() if value is not None}
        return any(id(tensor) in ids for tensor in self[1:5])


_BATCH_NORMS: Mapping[Any, Callable[..., _BatchNormCall]] = {
    F.batch_norm: _BatchNormCall,
    torch.batch_norm: lambda input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled: (
        _BatchNormCall(input, running_mean, running_var, weight, bias, training, momentum, eps)
    ),
}


class _Redirect(TorchFunctionMode):
    """Redirects calls of torch's batch normalization with tensors of ``layer`` to :func:`batch_norm`."""

    def __init__(self, layer: ObservedSyncBatchNorm) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, layer = kwargs or {}, self.layer
        if func in _BATCH_NORMS:
            call = _BATCH_NORMS[func](*args, **kwargs)
            if not any(isinstance(tensor, Tensor) for tensor in call[1:5]) or call.uses([layer]):
                layer.note_synchronization()
                # Excludes frozen layers, which use running statistics in training.
                if call.training or _differs_from_torch(layer):
                    # The custom forward counts batches itself, as torch's does before this call.
                    buffers = call.running_mean, call.running_var, None
                    options = options_of(layer)._replace(eps=call.eps, momentum=call.momentum)
                    group = layer._sync_state.group if call.training else None
                    tensors, mode = (call.input, call.weight, call.bias, None), current_mode()
                    observed = Call(*tensors, buffers, options, call.training, group, layer, mode)
                    return through_attachments(layer, observed)
            elif layer.training and call.training and not call.uses(list(layer.modules())[1:]):
                raise _unsynchronized(layer, "called F.batch_norm with tensors that are not the layer's")
        return func(*args, **kwargs)


def _unsynchronized(layer: nn.Module, what: str) -> RuntimeError:
    cls = type(layer).__dict__.get("local_class", type(layer))
    return RuntimeError(
        f"{cls.__module__}.{cls.__qualname__}: cannot synchronize this forward: in training, it {what}; exclude the "
        "layer from conversion with filter, or register a class with register_converter"
    )
