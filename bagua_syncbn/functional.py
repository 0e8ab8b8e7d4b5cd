"""Synchronized batch normalization as a function: checks, and the choice of statistics."""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.overrides import handle_torch_function, has_torch_function_unary

from . import ops
from .checks import check_flag, check_local_count, check_tensors, check_tracer, checked_options, named
from .errors import notifies_peers
from .groups import ALONE, GroupSpec, spec_of
from .layer_state import CallCache, LayerState
from .masks import masking_of
from .names import name_of
from .options import NO_MASKS, Options
from .registry import Registry
from .step.by_torch import ByTorch, in_evaluation, suits_torch
from .step.call import Call, Normalization, Statistics, this_thread
from .step.derivatives import differentiable_batch_norm
from .step.exchange import exchange_of
from .step.normalize import normalize
from .step.statistics import batch_statistics
from .torch_internals.autograd import has_transforms, is_transforming, level_of_duals

_PLAIN_CLASSES = Tensor, nn.Parameter

special_inputs: Registry[Callable[[Call], Tensor | None]] = Registry()
"""Handlers for special input classes such as DTensor. Each returns None for inputs that it does not handle."""

first_call_checks: Registry[Callable[[Call], bool]] = Registry()
"""Checks of an eager call that is not in the cache. False keeps the call out of the cache."""


def _peers_of_call(*args: Any, **options: Any) -> tuple[Any, Any] | None:
    """Returns the group and the layer of a call of :func:`sync_batch_norm`, whose arguments may be invalid."""
    given = dict(zip(inspect.signature(sync_batch_norm).parameters, args, strict=False)) | options
    return (given.get("process_group"), given.get("layer")) if given.get("training", True) else None


@notifies_peers(_peers_of_call)
def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    process_group: Any = None,
    *,
    num_batches_tracked: Tensor | None = None,
    eps_mode: str = "plus",
    skip_nonfinite: bool = False,
    layer: nn.Module | None = None,
    activation: str | tuple[str, float] | nn.Module | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    zero_masked: bool = False,
) -> Tensor:
    r"""Computes batch normalization with the statistics of all ranks of a group.

    .. math::

        y = \mathrm{act}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \gamma + \beta + r\right)

    The activation and the residual :math:`r` are optional.

    With ``training=True``, mean and biased variance are computed per channel over the combined batch of all ranks.
    Output, gradients and running statistics equal those of one process on the concatenated batch (`Ioffe and Szegedy,
    2015 <https://arxiv.org/abs/1502.03167>`__; merge of the moments: Chan, Golub and LeVeque, 1983). The gradients of
    ``weight`` and ``bias`` are this rank's share of the sum over ranks. A call takes one all-gather in forward and, if
    ``input`` requires a gradient, one all-reduce in backward; all ranks of the group must make it. Batch sizes may
    differ between ranks and may be 0.

    With ``training=False``, the result equals :func:`torch.nn.functional.batch_norm` with the running statistics. No
    rank communicates.

    For backward, the function stores ``input`` and, with an activation, ``residual``. It recomputes the input of the
    activation. Gradients are exact and can be differentiated again.

    Args:
        input: (N, C, \*), float16, bfloat16, float32 or float64, in any memory format; or a DTensor, with the
            statistics of the whole tensor.
        running_mean: (C), any float dtype; None to track nothing. Updated in place in training if all ranks together
            have at least two values per channel.
        running_var: (C), updated like ``running_mean``, with the unbiased variance.
        weight: (C), :math:`\gamma`, any float dtype; None for 1.
        bias: (C), :math:`\beta`, any float dtype; None for 0.
        training: whether to normalize with batch statistics.
        momentum: weight of the new batch statistics in the running statistics; None for a cumulative average, which
            requires ``num_batches_tracked``.
        eps: :math:`\epsilon`, added to the variance. At least 0; above 0 in training.
        process_group: ranks to synchronize with. None for the default group of the job, or for this process if no job
            runs; a :class:`torch.distributed.ProcessGroup`; a ``BaguaProcessGroup``; a description that
            :func:`~bagua_syncbn.sync_group` takes; or a :class:`~bagua_syncbn.communicators.Communicator`.
        num_batches_tracked: scalar, any integer or float dtype. Incremented in place when the running statistics are
            updated.
        eps_mode: ``"plus"``; or ``"clamp"`` to divide by :math:`\sqrt{\max(\mathrm{Var}[x], \epsilon)}`, where
            ``eps`` may be 0 in training. With float32 and half inputs, "clamp" is exact for standard deviations down to
            1e-19, and its second derivatives down to 1e-12; smaller ones need float64 input or an ``eps``.
        skip_nonfinite: whether to skip the update of ``running_mean``, ``running_var`` and ``num_batches_tracked`` if
            the batch statistics are infinite or NaN, as in a step that ``GradScaler`` skips. Decided on the device.
        layer: calling module. Activation checkpointing matches recomputed calls by module and order; all calls without
            a module count as calls of one module.
        activation: ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"elu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``,
            ``"hardswish"``, ``"sigmoid"`` or ``"tanh"``, as in :mod:`torch.nn.functional`; a pair with the slope of
            ``leaky_relu`` or the alpha of ``elu``, such as ``("leaky_relu", 0.2)``; a torch module such as
            ``nn.ReLU()``; or None.
        residual: :math:`r`, (N, C, \*), same dtype and device as ``input``, in any memory format; or None.
        mask: bool, broadcastable to (N, 1, \*). True for positions that count for the statistics. The other positions
            are normalized with the same statistics. Ranks may differ in whether they pass a mask, and all positions of
            a rank may be masked. A mask with fewer dimensions is refused if its first dimension has size N, because it
            could be samples.
        lengths: (N), integers, instead of ``mask``: number of positions that count along the last dimension of an
            ``input`` with at least 3 dimensions. On CUDA, values are not checked but clamped to the dimension.
        zero_masked: whether output and gradient are 0 at masked positions, even if the input is NaN there.

    Returns:
        (N, C, \*), with the dtype and memory format of ``input``.

    Raises:
        TypeError: an argument has the wrong type or dtype; ``input`` or ``residual`` is sparse, nested or in MKL-DNN
            layout; ``input`` is a DTensor, and another tensor is not placed to match or there is a mask; another tensor
            is a DTensor and ``input`` is not.
        ValueError: ``input`` has fewer than 2 dimensions; only one of ``running_mean`` and ``running_var`` is given, or
            both are the same tensor; there is one value per channel in training in a group of one; ``momentum`` is None
            without ``num_batches_tracked``; ``eps``, ``momentum`` or the parameter of ``activation`` is not finite, or
            ``eps`` is too small; ``eps_mode`` or ``activation`` is unknown; ``mask`` or ``lengths`` does not fit
            ``input``, or both are given; this rank is not in ``process_group``, or the ranks of the group do not hold
            each value of a DTensor exactly once.
        RuntimeError: a parameter or buffer does not have C elements, or ``num_batches_tracked`` more than one;
            ``residual`` has another size than ``input``; a tensor is on another device; replicas get a mask;
            :func:`torch.jit.trace` or ``torch.export`` traces training over several ranks; a checkpoint recomputes more
            calls than it ran, or recomputes under forward-mode differentiation.

    All errors are raised before this rank waits for another one and before any buffer changes.
    """
    if training is not True:
        check_flag("training", training)
    buffers = ops.Buffers(running_mean, running_var, num_batches_tracked)
    options = Options(eps, momentum, eps_mode, skip_nonfinite, activation)
    masks = NO_MASKS if mask is lengths is None and zero_masked is False else (mask, lengths, zero_masked)
    group = process_group if training else ALONE
    return batch_norm(Call(input, weight, bias, residual, buffers, options, training, group, layer, masks))


def batch_norm(call: Call) -> Tensor:
    """Computes :func:`sync_batch_norm`. The caller notifies its peers of errors."""
    input = call.input
    if type(input) not in _PLAIN_CLASSES:
        for compute in special_inputs:
            output = compute(call)
            if output is not None:
                return output
        if isinstance(input, Tensor) and not torch.compiler.is_compiling():
            if has_torch_function_unary(input):
                # The output gets the class of the input, and the attributes that the class copies.
                compute_plain = lambda plain: batch_norm(call._replace(input=plain))  # noqa: E731
                return handle_torch_function(compute_plain, (input,), input)
            # __torch_function__ does not apply: the class has none, or torch disabled it inside one.
            if type(input).__torch_dispatch__ is Tensor.__torch_dispatch__:
                return batch_norm(call._replace(input=input.as_subclass(Tensor)))
    is_compiling = torch.compiler.is_compiling()
    hooks = None if is_compiling else this_thread.hooks
    if hooks is None or hooks.prepare is None:
        norm = _prepare(call, is_compiling)
    else:
        norm = hooks.prepare(call, partial(_prepare, call, False))
    if isinstance(norm, ByTorch):
        return norm.normalize(input, call.weight, call.bias, call.residual)
    if norm.statistics is None or (hooks is not None and norm.exchange is not None and is_transforming()):
        return _transformed(call, norm)
    output = normalize(input, call.weight, call.bias, call.residual, norm)
    if hooks is not None and hooks.see_output is not None:
        hooks.see_output(output, *call[:4], norm)
    return output


def _prepare(call: Call, is_compiling: bool) -> Normalization | ByTorch:
    """Returns how to normalize the input of ``call``, in one of four ways.

    1. Evaluation: by the running statistics, locally.
    2. Training in a group of one, where F.batch_norm is exact and fast: by torch.
    3. Training under a transform of torch.func or in forward mode: statistics follow in the differentiable form.
    4. Training: gathers the statistics of all ranks and moves the buffers.
    """
    input = call.input
    try:
        checked = _validate(call, None) if is_compiling else checks_of(call)
        # The compiler of torch 2.12 cannot trace whether two tuples are one.
        masking = masking_of(input, call.masks) if is_compiling or call.masks is not NO_MASKS else None
        if checked.is_local:
            check_local_count(input)
    except (TypeError, ValueError, RuntimeError) as error:
        raise named(error, call.layer) from None
    options = checked.options
    if checked.exchange is None:
        return in_evaluation(call, options, masking)
    if checked.is_local and masking is None and suits_torch(call, options):
        return ByTorch(options, call.tracked_buffers)
    exchange = checked.exchange()
    if not is_compiling and (has_transforms() or level_of_duals() >= 0):
        return Normalization(options, exchange, call.layer, masking)
    positions = None if masking is None else masking.positions
    statistics = batch_statistics(input.detach() if is_compiling else input, call, exchange, options, positions)
    return Normalization(options, exchange, call.layer, masking, statistics)


def _transformed(call: Call, norm: Normalization) -> Tensor:
    """Computes ``call`` under a transform of torch.func or in forward mode."""
    exchange = norm.exchange
    if exchange is None or not is_transforming():
        raise RuntimeError(f"{name_of(call.layer)}: cannot recompute this call: its first run raised an error")
    if norm.statistics is not None:
        raise RuntimeError(
            "sync_batch_norm: activation checkpointing cannot recompute a forward under torch.func or forward-mode "
            "differentiation; remove the checkpoint"
        )

    def gather(input: Tensor) -> Statistics:
        norm.statistics = batch_statistics(input, call, exchange, norm.options, norm.positions)
        return norm.statistics

    return differentiable_batch_norm(*call[:4], norm, gather)


# Stands in for a tensor that is not given.
_NO_TENSOR: Any = SimpleNamespace(dtype=None, device=None, shape=None, layout=None, stride=lambda: None)

# Checked calls without a layer, by mode, number of channels and of dimensions.
_caches: dict[Any, CallCache] = {}
_MOST_CACHES = 256


def checks_of(call: Call) -> CallCache:
    """Returns the results of the checks of ``call``, from the cache if an equal call was checked before.

    The key holds all that the checks and the choice of the exchange depend on, except for values.

    Raises:
        TypeError, ValueError, RuntimeError: a tensor or an option is wrong, see :func:`sync_batch_norm`.
    """
    input, weight, bias, residual, (mean, var, batches), options, training, group, layer, _, accumulate = call
    if is_tracing():  # a comparison would become part of the trace
        return _validate(call, None)
    w, b = _NO_TENSOR if weight is None else weight, _NO_TENSOR if bias is None else bias
    m, v = _NO_TENSOR if mean is None else mean, _NO_TENSOR if var is None else var
    n = _NO_TENSOR if batches is None else batches
    ready = (group if type(group) is GroupSpec else spec_of(group)).communicator_if_ready()
    try:
        shape = input.shape
        place: Any = group is not ALONE  # call.synchronizes
        r = (
            None
            if residual is None
            else (residual.__class__, residual.dtype, residual.device, residual.layout, residual.shape == shape)
        )
        if shape[1].__class__ is not int:  # a symbol, on whose value the trace would come to depend
            return _validate(call, None)
        if layer is None:
            caches, of_layer, place = _caches, None, (place, shape[1], len(shape))
        else:
            state = layer.__dict__.get("_sync_state") or layer.__dict__.setdefault("_sync_state", LayerState())
            caches, of_layer = state.caches, (layer.__class__, layer.momentum, state.origin)
        key = (
            options, training, ready, accumulate is None, mean is var, of_layer,
            input.__class__, input.dtype, input.device, input.layout, len(shape), shape[1], r,
            w.__class__, w.dtype, w.device, w.shape, b.__class__, b.dtype, b.device, b.shape,
            m.__class__, m.dtype, m.device, m.shape, m.stride(), v.__class__, v.dtype, v.device, v.shape, v.stride(),
            n.__class__, n.dtype, n.device, n.shape,
        )  # fmt: skip
        cached = caches.get(place)
        if cached is not None and cached.key == key:
            return cached
    except (AttributeError, IndexError, RuntimeError, ValueError):  # a wrong tensor, or an option that is an array
        return _validate(call, None)
    checked = _validate(call, key)
    # Not if the group was only now made: another job could make its own for the next call.
    if ready is not None and checked.key is not None:
        if len(_caches) == _MOST_CACHES:
            _caches.clear()
        caches[place] = checked
    return checked


def _validate(call: Call, key: tuple[Any, ...] | None) -> CallCache:
    """Checks ``call`` and returns the results, with ``key``, or None for results that must not be cached."""
    input, buffers, training, layer = call.input, call.buffers, call.training, call.layer
    check_tensors(call[:4], buffers, training, layer)
    if not torch.compiler.is_compiling():
        for check in first_call_checks:
            if not check(call):
                key = None
    options = checked_options(call.options, training)
    if not training:
        if buffers.running_mean is None or buffers.running_var is None:
            raise ValueError("running_mean, running_var: expected tensors with training=False, got None")
        return CallCache(key, options, None)
    if not torch.compiler.is_compiling() and call.masks is not NO_MASKS:
        masking_of(input, call.masks)  # raises before this rank waits for others, to make the group
    check_tracer(call.group)
    if options.momentum is None and buffers.running_mean is not None and buffers.num_batches_tracked is None:
        raise ValueError("num_batches_tracked: expected a tensor, because momentum is None; got None")
    spec = spec_of(call.group)
    communicator = spec.communicator("" if torch.compiler.is_compiling() else name_of(layer))
    exchange = exchange_of(call, options, communicator)
    return CallCache(key, options, exchange, communicator.size == 1)
