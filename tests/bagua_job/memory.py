"""The memory behind Bagua's handles of tensors."""

import ctypes

import torch

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "U8": torch.uint8, "I64": torch.int64}


def memory_of(bagua_tensor):
    """The memory that Bagua's handle names, as NCCL would be given it."""
    dtype = _DTYPES[bagua_tensor.dtype()]
    size = bagua_tensor.num_elements() * dtype.itemsize
    buffer = (ctypes.c_char * size).from_address(bagua_tensor.data_ptr())
    return torch.frombuffer(buffer, dtype=dtype)
