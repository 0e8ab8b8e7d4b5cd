"""Selects the kernels for CUDA tensors: native kernels once they agree with plain torch on the device, else ATen's."""

from .._step.call import Call
from ..functional import first_call_checks
from .comparison import agreed
from .selection import EXPERIMENTAL, check_kernels, cuda_kernels

__all__ = ["EXPERIMENTAL", "agreed", "check_kernels", "cuda_kernels"]


def _is_checked(call: Call) -> bool:
    return not call.input.is_cuda or check_kernels(call.input)


first_call_checks.append(_is_checked)
