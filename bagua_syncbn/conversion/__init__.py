"""What happens to a model: its layers become synchronized ones, and local ones again.

This room knows the layer; the layer does not know it.
"""

from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .fusing import fuse_activations
from .patching import patch_torch_converter
from .recomputing import recompute_outputs
from .registry import register_converter
from .report import conversion_report

__all__ = [
    "conversion_report",
    "convert_sync_batchnorm",
    "fuse_activations",
    "patch_torch_converter",
    "recompute_outputs",
    "register_converter",
    "revert_sync_batchnorm",
]
