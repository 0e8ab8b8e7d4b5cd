"""Small groups that behave like large groups: ranks sum statistics in float64 instead of gathering them."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from tests.helpers.workers import WorkerPool


def as_large(function: Callable[..., Any], *args: Any) -> Any:
    """Runs ``function`` on a rank whose groups are treated as large."""
    with patch("bagua_syncbn.communicators.c10d.FEWEST_SUMMED", 2):
        return function(*args)


class LargeGroups:
    """The pool, with groups that are treated as large."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def run(self, function: Callable[..., Any], ranks: int, *args: Any, **options: Any) -> list[Any]:
        return self._pool.run(as_large, ranks, function, *args, **options)
