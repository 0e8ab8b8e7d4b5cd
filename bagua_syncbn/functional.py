"""Synchronized batch normalization as a function: checks, and choice of the implementation for a call."""

import functools
import inspect
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.overrides import handle_torch_function, has_torch_function_unary

from . import ops, torch_internals
from .checks import check_flag, check_tensors, check_tracer, checked_options, is_distributed, named
from .communicators import EVERYONE, LOCAL, Replica, spec_of
from .options import NO_MASKS, Masks, Options, Tensors
from .statistics.masks import masking_of
from .step.call import Call, follow
from .step.checkpointing import call_in_first_run, is_repetition
from .step.function import synchronized_batch_norm
from .step.recomputation import this_thread
from .step.replicated import replicated_batch_norm
from .sync import FIXED_STATISTICS, sync_of, tells_peers
from .torch_internals import is_capturing, is_transforming, unseen_by_selective_checkpointing


def _peers_of_call(*args: Any, **options: Any) -> tuple[Any, Any] | None:
    """Returns group and layer of a call of :func:`sync_batch_norm`; its arguments may be wrong."""
    given = dict(zip(inspect.signature(sync_batch_norm).parameters, args, strict=False)) | options
    return (given.get("process_group"), given.get("layer")) if given.get("training", True) else None


@tells_peers(_peers_of_call)
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
    r"""Batch normalization with the statistics of all ranks of a group.

    .. math::

        y = \mathrm{act}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \gamma + \beta + r\right)

    where the activation and the residual :math:`r` may be left out.

    With ``training=True`` mean and biased variance are taken per channel over the batches of all ranks together: the
    output, the gradients and the running statistics are those of one process on the concatenated batch (`Ioffe and
    Szegedy, 2015 <https://arxiv.org/abs/1502.03167>`__; merge of the ranks' moments: Chan, Golub and LeVeque, 1983).
    The gradients of ``weight`` and ``bias`` are this rank's share of the sum over ranks. It takes one all-gather
    forward and, if ``input`` requires a gradient, one all-reduce backward; all ranks of the group must make the call.
    Batches may differ in size between ranks, and be empty.

    With ``training=False`` the result is :func:`torch.nn.functional.batch_norm` with the running statistics, on this
    rank alone.

    The backward pass keeps ``input``, with an activation also ``residual``, and no other tensor of this size: it
    recomputes the input of the activation. Gradients are exact, and can be differentiated again.

    Args:
        input: (N, C, \*), of dtype float16, bfloat16, float32 or float64, in any memory format; or a DTensor, with the
            statistics of the whole tensor.
        running_mean: (C), of any float dtype, or None not to track; updated in place in training, except where all
            ranks together have fewer than two values per channel.
        running_var: (C), updated in the same way, with the unbiased variance.
        weight: (C), :math:`\gamma`, of any float dtype, or None for 1.
        bias: (C), :math:`\beta`, of any float dtype, or None for 0.
        training: whether to normalize by the statistics of the batch.
        momentum: weight of the new statistics in the running ones; None for the average over all batches so far, which
            needs ``num_batches_tracked``.
        eps: :math:`\epsilon`, added to the variance; above 0 in training, as torch asks, and never below.
        process_group: the ranks to synchronize with: None for the default group of the job (each process alone where
            there is no job), a :class:`torch.distributed.ProcessGroup`, a ``BaguaProcessGroup``, a description of one
            as :func:`~bagua_syncbn.sync_group` takes it, or a :class:`~bagua_syncbn.communicators.Communicator`.
        num_batches_tracked: scalar, increased by one in place whenever the running statistics are updated; of any
            integer or float dtype.
        eps_mode: ``"plus"``, or ``"clamp"`` for :math:`\sqrt{\max(\mathrm{Var}[x], \epsilon)}` as the divisor, where
            ``eps`` may be 0 in training too. Statistics of float32 and half inputs then hold deviations down to 1e-19,
            and their second derivatives down to 1e-12; smaller ones need float64 input or an ``eps``.
        skip_nonfinite: whether ``running_mean``, ``running_var`` and ``num_batches_tracked`` stay as they are where the
            statistics of all ranks together are infinite or not a number, as in a step that ``GradScaler`` skips. It is
            decided on the device.
        layer: the module that calls. Activation checkpointing repeats the calls of each module in their order; all
            calls without a module count as calls of one module.
        activation: ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"elu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``,
            ``"hardswish"``, ``"sigmoid"`` or ``"tanh"``, as in :mod:`torch.nn.functional`; the slope of
            ``leaky_relu`` and the alpha of ``elu`` with it, as in ``("leaky_relu", 0.2)``; a module of torch for one of
            these, as ``nn.ReLU()``; or None.
        residual: :math:`r`, (N, C, \*), of the dtype of ``input`` and on its device, in any memory format; or None.
        mask: bool, broadcastable to (N, 1, \*): true at the positions whose values make the statistics. The others are
            normalized by the same statistics, which do not depend on them. Some ranks may have a mask and others none,
            and all positions of a rank may be masked. A mask of fewer dimensions is refused if its first dimension has
            N elements and so may stand for samples.
        lengths: (N), integers, in place of ``mask``: how many places along the last dimension of ``input``, which has
            at least 3, make the statistics in each sample, from the first one on. On CUDA, where no host waits to look,
            one below 0 counts as 0, and one above the dimension as all of it.
        zero_masked: whether the output is 0 at masked positions, whatever the input is there; their gradient is 0.

    Returns:
        (N, C, \*), of the dtype and memory format of ``input``.

    Raises:
        TypeError: an argument is of another type or dtype than above; ``input`` or ``residual`` is sparse, nested or in
            the layout of MKL-DNN; ``input`` is a DTensor, and another tensor is not placed accordingly, or there is a
            mask; another tensor is a DTensor and ``input`` is not.
        ValueError: ``input`` has fewer than 2 dimensions; only one of ``running_mean`` and ``running_var`` is given, or
            one tensor as both; a group of one rank has one value per channel in training; ``momentum`` is None without
            ``num_batches_tracked``; ``eps``, ``momentum`` or the parameter of ``activation`` is not finite, or ``eps``
            is too small; ``eps_mode`` or ``activation`` is unknown; ``mask`` or ``lengths`` does not fit ``input``, or
            both are given; this rank is not in ``process_group``, or its ranks do not hold each value of a DTensor
            once.
        RuntimeError: a parameter or buffer does not have C elements, ``num_batches_tracked`` not one, ``residual`` is
            not of the size of ``input``, or one of them is on another device; there is a mask in one of several
            replicas; :func:`torch.jit.trace` or ``torch.export`` runs in training over several ranks; a checkpoint
            repeats more than it ran, or repeats under forward-mode differentiation.

    Each of these is raised before this rank waits for another one or writes to a buffer.
    """
    if training is not True:
        check_flag("training", training)
    buffers = ops.Buffers(running_mean, running_var, num_batches_tracked)
    options = Options(eps, momentum, eps_mode, skip_nonfinite, activation)
    tensors = input, weight, bias, residual
    masks = mask, lengths, zero_masked
    return batch_norm(tensors, buffers, options, training, process_group, layer, masks)


def batch_norm(
    tensors: Tensors,
    buffers: ops.Buffers,
    options: Options,
    training: bool,
    process_group: Any,
    layer: nn.Module | None,
    masks: Masks = NO_MASKS,
) -> Tensor:
    """Calls :func:`sync_batch_norm` with its arguments in records. Callers tell their peers of errors."""
    input, weight, bias, residual = tensors
    if type(input) not in _PLAIN_CLASSES and not torch.compiler.is_compiling():
        if has_torch_function_unary(input):
            return _as_its_class_does(tensors, buffers, options, training, process_group, layer, masks)
        # Its class has no say here: either it never has, or torch has disabled it, as within __torch_function__.
        if isinstance(input, Tensor) and type(input).__torch_dispatch__ is Tensor.__torch_dispatch__:
            tensors = input.as_subclass(Tensor), weight, bias, residual
            return batch_norm(tensors, buffers, options, training, process_group, layer, masks)
    if is_distributed(input):
        from .step.sharded import shards_of  # not above, because it imports torch.distributed.tensor

        tensors, buffers, whole = shards_of(tensors, buffers, training, process_group, layer, masks)
        return whole(batch_norm(tensors, buffers, options, training, process_group, layer, masks))
    is_replica = training and isinstance(process_group, Replica)
    is_compiling = torch.compiler.is_compiling()
    try:
        check_tensors(tensors, buffers, training, layer)
        if input.is_cuda and not is_compiling:
            ops.check_kernels(input)
        arguments = input, buffers, options, training, process_group, layer, masks
        if is_replica or is_compiling or not (this_thread.runs or not torch_internals.has_known_checkpoints):
            call = _call_of(*arguments)
        else:
            call = call_in_first_run(layer, functools.partial(_call_of, *arguments))
            # fairscale's checkpoint_wrapper leaves this attribute: it disables tracking in the first of its two passes.
            tracks = buffers.running_mean is not None
            if tracks and call.buffers.running_mean is None and hasattr(layer, "_track_running_stats_backup"):
                raise RuntimeError(
                    "Repeatable: expected none within fairscale's checkpoint_wrapper, which has the second of its "
                    "passes move running statistics, where a repetition moves none"
                )
    except (TypeError, ValueError, RuntimeError) as error:
        raise named(error, layer) from None
    if is_replica:
        return replicated_batch_norm(input, weight, bias, residual, call, process_group)
    if call.sync is FIXED_STATISTICS:
        return _evaluate(input, weight, bias, residual, call)
    if call.sync.communicator.size == 1 and _suits_torch(input, weight, bias, residual, call):
        return follow(_batch_norm_alone(input, weight, bias, call), residual, call.options)
    return synchronized_batch_norm(input, weight, bias, residual, call)


# Tensors of other classes are computed with as plain ones, and what is computed gets the class that theirs gives it.
_PLAIN_CLASSES = Tensor, nn.Parameter


def _as_its_class_does(tensors: Tensors, *arguments: Any) -> Tensor:
    """Calls :func:`batch_norm` as the class of the input has functions of torch called.

    The output then has the class, and what the class copies from the input.
    """
    input, *others = tensors

    def call(input: Tensor) -> Tensor:
        return batch_norm((input, *others), *arguments)  # type: ignore[arg-type]

    output: Tensor = handle_torch_function(call, (input,), input)
    return output


def _call_of(
    input: Tensor,
    buffers: ops.Buffers,
    options: Options,
    training: bool,
    process_group: Any,
    layer: nn.Module | None,
    masks: Masks,
) -> Call:
    """Returns what a checkpoint repeats of a call: all but the tensors that may have gradients."""
    options = checked_options(options, training)
    mask, lengths, zero_masked = masks
    is_plain = mask is lengths is getattr(layer, "_masking", None) is None and zero_masked is False
    masking = None if is_plain else masking_of(layer, input, masks)
    if not training:
        mean, var = buffers[:2]
        if mean is None or var is None:
            raise ValueError("running_mean, running_var: expected tensors with training=False, got None")
        if not torch.compiler.is_compiling() and this_thread.runs:  # they may move before the repetition
            mean, var = mean.clone(), var.clone()
        masking = masking if masking is not None and masking.zeroes else None
        return Call(options, ops.Buffers(mean, var), FIXED_STATISTICS, layer, masking)
    check_tracer(process_group)
    buffers = _moved_buffers(buffers, options, layer)
    if isinstance(process_group, Replica):
        if masking is not None:
            raise RuntimeError("mask: expected none among replicas of one process; use one process for each device")
        return Call(options, buffers, sync_of(layer, input, options, buffers, LOCAL), layer)
    spec = spec_of(process_group)
    communicator = spec.communicator()
    if communicator.size == 1:
        if spec is EVERYONE and not torch.compiler.is_compiling():
            _warn_if_launched_with_others()
        if not is_tracing() and input.numel() == input.size(1) > 0:
            raise ValueError(
                f"input: expected more than 1 value per channel when training, got input size {input.size()}"
            )
    sync = sync_of(layer, input, options, buffers, communicator)
    return Call(options, buffers, sync, layer, masking)


def _moved_buffers(buffers: ops.Buffers, options: Options, layer: nn.Module | None) -> ops.Buffers:
    """Returns the buffers that a training call moves, with the accumulator that takes the statistics instead."""
    if buffers.running_mean is None:
        return ops.NO_BUFFERS  # num_batches_tracked counts batches of running statistics, so it goes too
    if options.momentum is None and buffers.num_batches_tracked is None:
        raise ValueError("num_batches_tracked: expected a tensor, because momentum is None; got None")
    accumulator: ops.StatisticsAccumulator | None = getattr(layer, "_accumulator", None)
    if accumulator is None:
        return buffers
    if buffers.running_mean is not getattr(layer, "running_mean", None):
        raise RuntimeError(
            "running_mean: expected the buffer of the layer within accumulate_statistics, which moves it at its end; "
            "got another tensor"
        )
    if not torch.compiler.is_compiling() and is_capturing():
        raise RuntimeError(
            "accumulate_statistics: expected no capture of a CUDA graph, because it does not see replays; capture "
            "outside of it"
        )
    return buffers._replace(accumulator=accumulator)


@functools.cache
def _warn_if_launched_with_others() -> None:
    """Warns, once in a process, if a launcher started several ranks and no process group was initialized."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        warnings.warn(
            f"batch normalization is not synchronized: WORLD_SIZE is {size}, and no process group of several ranks was "
            "initialized; call torch.distributed.init_process_group() or bagua.torch_api.init_process_group()",
            stacklevel=2,
        )


def _torch_takes(input: Tensor, tensors: Iterable[Tensor | None]) -> bool:
    """Whether F.batch_norm accepts these dtypes: one for all tensors, or half input with float32 tensors."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    beside_float32 = dtypes == {torch.float32} and input.dtype in ops.HALF_DTYPES
    return dtypes <= {input.dtype} or beside_float32


_DEFAULTS = Options()[2:-1]  # all but eps, momentum and the activation


def _suits_torch(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
) -> bool:
    """Whether F.batch_norm computes training on one rank: if it supports the call, is exact enough and is fast.

    It has eps and momentum; all other options, new ones too, must have their defaults. With ``momentum=None`` the host
    would have to read the factor. torch's CPU kernels for half inputs round intermediate values: in bfloat16 outputs
    are off by several units in the last place.
    """
    options, buffers = call.options, call.buffers
    if options.momentum is None or options[2:-1] != _DEFAULTS:
        return False
    if call.masking is not None or buffers.accumulator is not None:
        return False
    if (options.activation is not None or residual is not None) and not _is_recorded(input):
        return False
    rounds = input.device.type == "cpu" and input.dtype in ops.HALF_DTYPES
    if rounds or not _torch_takes(input, (*buffers[:2], weight, bias)):
        return False
    if is_tracing():
        return True
    # A trace also serves other sizes, so the size must not decide there which is faster.
    if input.numel() == 0:
        return False
    return _is_recorded(input) or not (this_thread.depth or ops.prefer_native(input))


def _is_recorded(input: Tensor) -> bool:
    """Whether a tracer, compiler or transform, and not only autograd, records the call."""
    is_traced = is_tracing() or torch.compiler.is_compiling() or isinstance(input.numel(), torch.SymInt)
    return is_traced or is_transforming()


def _batch_norm_alone(input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    running_mean, running_var, num_batches_tracked, _ = call.buffers
    if running_mean is not None and running_var is not None and is_repetition():
        # The repeated forward pass has counted the batch already.
        num_batches_tracked = None
        with unseen_by_selective_checkpointing():
            running_mean, running_var = running_mean.clone(), running_var.clone()
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    momentum, eps = call.options.momentum, call.options.eps
    assert momentum is not None
    return F.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)


def _evaluate(input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call) -> Tensor:
    mean, var = call.buffers[:2]
    assert mean is not None
    assert var is not None
    options, masking = call.options, call.masking
    eps, is_clamp = options.eps, options.eps_mode == "clamp"
    follows = options.activation is not None or residual is not None or masking is not None
    if follows and not _is_recorded(input):
        dtype = ops.accumulate_dtype(input.dtype)
        var = var.to(dtype)
        invstd = (var.clamp(min=eps) if is_clamp else var + eps).rsqrt()
        count = torch.ones((), dtype=torch.int64, device=input.device)
        call.statistics = mean.to(dtype), invstd, count, None
        return synchronized_batch_norm(input, weight, bias, residual, call)
    if is_clamp:
        # F.batch_norm adds eps again; torch 2.10 accepts no eps of 0.
        var = (var.to(ops.accumulate_dtype(var.dtype)) - eps).clamp(min=0)
    if not _torch_takes(input, (mean, var, weight, bias)):
        dtype = ops.accumulate_dtype(input.dtype)
        mean, var, weight, bias = (None if t is None else t.to(dtype) for t in (mean, var, weight, bias))
    if masking is not None:
        input = masking.clear(input)
    output = F.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)
    return follow(output, residual, options, masking)
