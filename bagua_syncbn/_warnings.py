"""Warnings that point to the line of the user's code that caused them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import torch

_P = ParamSpec("_P")

# Python files between the user's code and a warning.
_INTERNAL = (
    *(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__)),
    contextlib.__file__,
    "<frozen importlib",
)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns about the innermost line outside of this package and torch, or the outermost line if there is none."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_INTERNAL) and frame.f_back is not None:
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    module = names.get("__name__", "<string>")  # code of exec may have no name
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


class _Context(contextlib._GeneratorContextManager[None]):
    """Context manager that warns if it is dropped without being entered, because it then has no effect."""

    def __call__(self, function: Any) -> Any:
        self.gen.close()  # each call of the decorated function enters a new context
        return super().__call__(function)

    def __del__(self) -> None:
        generator: Any = vars(self).get("gen")  # None after a TypeError for the arguments
        if generator is not None and inspect.getgeneratorstate(generator) == inspect.GEN_CREATED:
            warn(f"{generator.__name__.lstrip('_')}: has no effect without a with statement")


def context(function: Callable[_P, Iterator[None]]) -> Callable[_P, contextlib.AbstractContextManager[None]]:
    """Decorator like :func:`contextlib.contextmanager` for functions that users might call without ``with``."""

    make: Any = _Context

    @functools.wraps(function)
    def create(*args: _P.args, **kwargs: _P.kwargs) -> contextlib.AbstractContextManager[None]:
        return make(function, args, kwargs)

    return create
