"""The dtypes of inputs, in the order of ``csrc/dtypes.h``."""

import torch

ATEN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Those that torch's own batch normalization takes."""

DTYPES = (*ATEN_DTYPES,)
"""All of them; those that torch does not take come last."""

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""Those of which torch takes inputs beside parameters in float32."""
