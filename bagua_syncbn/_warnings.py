"""Warnings that point to the line of the user's code that caused them."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Any, TypeAlias

import torch

Line: TypeAlias = tuple[str, int, str, Any]
"""File, line number, module and registry of warnings: the arguments of :func:`warnings.warn_explicit`."""

# Python files between the user's code and a warning.
_INTERNAL = (
    *(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__)),
    contextlib.__file__,
    "<frozen importlib",
)


def line_of_caller() -> Line:
    """Returns the innermost line of code outside of this package and torch; the outermost line if there is none."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_INTERNAL) and frame.f_back is not None:
        frame = frame.f_back
    names = frame.f_globals
    return frame.f_code.co_filename, frame.f_lineno, names["__name__"], names.setdefault("__warningregistry__", {})


def warn(text: str, category: type[Warning] = UserWarning, line: Line | None = None) -> None:
    """Warns about ``line``, by default the caller's."""
    warnings.warn_explicit(text, category, *(line or line_of_caller()))
