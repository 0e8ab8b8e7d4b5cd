"""Conversion of a model's layers to synchronized layers and back.

This package imports the layer; the layer does not import this package.
"""

from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .converters import register_converter
from .patching import patch_torch_converter
from .report import conversion_report

__all__ = [
    "conversion_report",
    "convert_sync_batchnorm",
    "patch_torch_converter",
    "register_converter",
    "revert_sync_batchnorm",
]
