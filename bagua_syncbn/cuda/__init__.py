"""Selects the kernels for CUDA tensors: native kernels once they agree with plain torch on the device, else ATen's."""

from ..functional import first_call_checks
from ..step.call import Call
from .selection import EXPERIMENTAL, check_kernels, cuda_kernels

__all__ = ["EXPERIMENTAL", "check_kernels", "cuda_kernels"]


@first_call_checks.register
def _is_checked(call: Call) -> bool:
    return not call.input.is_cuda or check_kernels(call.input)
