"""Normalization with F.batch_norm: in evaluation, and in single-rank training where it is as exact and faster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops as ops
from .._ops.options import Options
from .call import Call, Masking, Normalization, apply_epilogue
from .hooks import hooks

# Above these sizes, native kernels save more time than their five Python calls cost; see docs/benchmarks.md.
# F.batch_norm is fast for channels_last until its outputs exceed the caches.
_WORTHWHILE_PLANAR = 2**17
_WORTHWHILE_INTERLEAVED = 2**22


def suits_torch(call: Call, options: Options) -> bool:
    """Returns whether F.batch_norm should compute a training call on a single rank: it is exact and fast.

    F.batch_norm supports eps and momentum; all other options, except the activation, must have their defaults.
    ``momentum=None`` is not supported, because the host would have to read the factor. On CPU, torch rounds
    intermediate values of half inputs: in bfloat16, outputs are off by several units in the last place.
    """
    input, buffers = call.input, call.buffers
    supported = Options(options.eps, options.momentum, activation=options.activation)
    if options.momentum is None or options != supported or call.accumulate is not None:
        return False
    is_recorded = call.mode != "eager"
    if (options.activation is not None or call.residual is not None) and not is_recorded:
        return False
    is_cpu = input.device.type == "cpu"
    rounds = is_cpu and input.dtype in ops.HALF_DTYPES
    if rounds or not _torch_takes(input, (*buffers[:2], call.weight, call.bias)):
        return False
    if call.mode == "traced":
        return True
    if input.numel() == 0:  # not in a trace, which also runs for other sizes
        return False
    if is_recorded:
        return True
    worthwhile = _WORTHWHILE_INTERLEAVED if input.stride(1) == 1 else _WORTHWHILE_PLANAR
    prefer_native = ops.KERNELS != "reference" and is_cpu and input.numel() >= worthwhile
    return not prefer_native and hooks.see_output is None


def _torch_takes(input: Tensor, tensors: Iterable[Tensor | None]) -> bool:
    """Returns whether F.batch_norm accepts these dtypes: one for all tensors, or half input with float32 tensors."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    is_mixed = dtypes == {torch.float32} and input.dtype in ops.HALF_DTYPES
    return dtypes <= {input.dtype} or is_mixed


class ByTorch(NamedTuple):
    """A call that F.batch_norm computes."""

    options: Options
    buffers: ops.Buffers
    training: bool = True
    masking: Masking | None = None

    def normalize(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        options, (mean, var, batches), training, masking = self
        eps, momentum = options.eps, 0.0
        if training:
            assert options.momentum is not None
            momentum = options.momentum
            if batches is not None:
                batches.add_(1)
        elif mean is not None and var is not None:
            if options.eps_mode == "clamp":
                # F.batch_norm adds eps again; torch 2.10 accepts no eps of 0.
                var = (var.to(ops.accumulate_dtype(var.dtype)) - eps).clamp(min=0)
            if not _torch_takes(input, (mean, var, weight, bias)):
                dtype = ops.accumulate_dtype(input.dtype)
                mean, var, weight, bias = (None if t is None else t.to(dtype) for t in (mean, var, weight, bias))
        if masking is not None:
            input = masking.clear(input)
        output = F.batch_norm(input, mean, var, weight, bias, training, momentum, eps)
        if residual is None and options.activation is None and masking is None:
            return output
        return apply_epilogue(output, residual, options, masking)

    def with_copied_buffers(self) -> ByTorch:
        """Returns the call for a recomputation, which leaves the buffers and the counter unchanged."""
        mean, var = (None if buffer is None else buffer.clone() for buffer in self.buffers[:2])
        return self._replace(buffers=ops.Buffers(mean, var))


def in_evaluation(call: Call, options: Options, masking: Masking | None) -> Normalization | ByTorch:
    """Returns how to normalize the input of ``call`` in evaluation: with the running statistics, as constants."""
    mean, var = call.buffers[:2]
    assert mean is not None
    assert var is not None
    if call.mode != "compiled" and hooks.are_set:  # the buffers may change before a recomputation
        mean, var = mean.clone(), var.clone()
    masking = masking if masking is not None and masking.zeroes else None
    has_epilogue = options.activation is not None or call.residual is not None or masking is not None
    if not has_epilogue or call.mode != "eager":
        return ByTorch(options, ops.Buffers(mean, var), False, masking)
    dtype = ops.accumulate_dtype(call.input.dtype)
    invstd = ops.inverse_deviation(var.to(dtype), options)
    count = torch.ones((), dtype=torch.int64, device=mean.device)
    return Normalization(options, None, call.layer, masking, statistics=(mean.to(dtype), invstd, count))
