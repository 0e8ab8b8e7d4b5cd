"""The dtypes of inputs, in the order of ``csrc/dtypes.h``."""

import torch

ATEN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that torch's own batch normalization takes."""

DTYPES = (*ATEN_DTYPES,)
"""All dtypes of inputs; any that torch does not take come last."""

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of inputs that torch takes beside parameters in float32."""
