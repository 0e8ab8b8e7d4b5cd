"""Steps that F.batch_norm computes: evaluation, and single-rank training where it is as exact and faster."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops as ops
from .._ops.options import Options
from .call import Call, Normalization, apply_epilogue
from .checks import check_local_count
from .hooks import hooks
from .normalize import normalize
from .steps import Step, masking_in

# Native kernels need five calls from Python, F.batch_norm only one. Above these sizes, the kernels save more time than
# four calls take; see docs/benchmarks.md. F.batch_norm is fast for channels_last until its outputs exceed the caches.
_WORTHWHILE_PLANAR = 2**17
_WORTHWHILE_INTERLEAVED = 2**22


class Evaluation(Step):
    """Evaluation with running statistics."""

    def __init__(self, call: Call, options: Options, key: tuple[Any, ...] | None = None) -> None:
        super().__init__(options, key=key)
        self._casts = options.eps_mode == "clamp" or not _torch_takes(call)  # finish subtracts eps from wide values

    def prepare(self, call: Call) -> Normalization:
        mean, var, _ = call.buffers
        assert mean is not None
        assert var is not None
        if call.mode != "compiled" and (hooks.prepare is not None or hooks.see_output is not None):
            # The buffers may change before a recomputation.
            mean, var = mean.clone(), var.clone()
        masking = None if call.mask is None else masking_in(call)
        masking = masking if masking is not None and masking.zeroes else None
        norm = Normalization(self, call.layer, masking, buffers=(mean, var, None))
        has_epilogue = self.options.activation is not None or call.residual is not None or masking is not None
        if has_epilogue and call.mode == "eager":
            dtype = ops.accumulate_dtype(call.input.dtype)
            invstd = ops.inverse_deviation(var.to(dtype), self.options)
            norm.statistics = mean.to(dtype), invstd, torch.ones((), dtype=torch.int64, device=mean.device)
        return norm

    def finish(self, call: Call, norm: Normalization) -> Tensor:
        if norm.statistics is not None:
            return normalize(call, norm)
        mean, var, _ = norm.buffers
        assert var is not None
        if self.options.eps_mode == "clamp":
            # Subtracts eps, because F.batch_norm adds it: in torch 2.10 its eps cannot be 0.
            var = (var.to(ops.accumulate_dtype(var.dtype)) - self.options.eps).clamp(min=0)
        if self._casts:
            dtype, tensors = ops.accumulate_dtype(call.input.dtype), (mean, var, call.weight, call.bias)
            mean, var, weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in tensors)
            call = call._replace(weight=weight, bias=bias)
        return _by_torch(call, norm, (mean, var, None))


class LocalStep(Step):
    """Training in a single-rank group. Uses F.batch_norm if it is exact and fast, otherwise another step."""

    def __init__(self, call: Call, options: Options, otherwise: Step) -> None:
        super().__init__(options, otherwise.exchange, otherwise.key)
        self._suits_torch, self._otherwise = _suits_torch(call, options), otherwise

    def prepare(self, call: Call) -> Normalization:
        check_local_count(call.input, call.layer)
        if not self._suits_torch or call.has_mask or not _is_fast(call):
            return self._otherwise.prepare(call)
        buffers = ops.NO_BUFFERS if call.buffers[0] is None else call.buffers
        return Normalization(self, call.layer, buffers=buffers)

    def finish(self, call: Call, norm: Normalization) -> Tensor:
        counter = norm.buffers[2]  # None if a checkpoint repeats the call
        if counter is not None:
            counter.add_(1)
        try:
            return _by_torch(call, norm, norm.buffers, self.options.momentum)
        except RuntimeError:  # torch's, under vmap
            if counter is not None:
                counter.sub_(1)
            raise


def _by_torch(call: Call, norm: Normalization, buffers: ops.Buffers, momentum: float | None = None) -> Tensor:
    """Calls F.batch_norm, in training if there is a ``momentum``."""
    input, weight, bias, residual, *_ = call
    options, masking, training = norm.step.options, norm.masking, momentum is not None
    if masking is not None:
        input = masking.clear(input)
    output = F.batch_norm(input, buffers[0], buffers[1], weight, bias, training, momentum or 0.0, options.eps)
    if residual is None and options.activation is None and masking is None:
        return output
    return apply_epilogue(output, residual, options, masking)


def _suits_torch(call: Call, options: Options) -> bool:
    """Returns whether F.batch_norm can compute training calls like ``call`` on a single rank, as exactly as the ops.

    F.batch_norm supports eps and momentum; all other options, except the activation, must have their defaults.
    ``momentum=None`` is not supported, because the host would have to read the factor. On CPU, torch rounds
    intermediate values of half inputs: in bfloat16, outputs are off by several units in the last place.
    """
    supported = Options(options.eps, options.momentum, activation=options.activation)
    if options.momentum is None or options != supported or call.accumulate is not None:
        return False
    if call.mode == "eager" and (options.activation is not None or call.residual is not None):
        return False
    rounds = call.input.device.type == "cpu" and call.input.dtype in ops.HALF_DTYPES
    return not rounds and _torch_takes(call)


def _is_fast(call: Call) -> bool:
    """Returns whether F.batch_norm is faster than the native kernels for ``call``; always in graphs and transforms."""
    if call.mode == "traced":  # the trace also runs for other sizes
        return True
    input = call.input
    if input.numel() == 0:
        return False
    if call.mode != "eager":
        return True
    worthwhile = _WORTHWHILE_INTERLEAVED if input.stride(1) == 1 else _WORTHWHILE_PLANAR
    prefer_native = ops.KERNELS != "reference" and input.device.type == "cpu" and input.numel() >= worthwhile
    return not prefer_native and hooks.see_output is None


def _torch_takes(call: Call) -> bool:
    """Returns whether F.batch_norm accepts the dtypes: one for all tensors, or half input with float32 tensors."""
    tensors, dtype = (*call.buffers[:2], call.weight, call.bias), call.input.dtype
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    is_mixed = dtypes == {torch.float32} and dtype in ops.HALF_DTYPES
    return dtypes <= {dtype} or is_mixed
