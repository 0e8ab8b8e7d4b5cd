"""Small groups that count as large: their ranks add statistics up, in float64, where others gather them."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from tests.helpers.workers import WorkerPool


def as_large(function: Callable[..., Any], *args: Any) -> Any:
    """Runs on each rank, in groups that count as large ones."""
    with patch("bagua_syncbn.communicators.c10d.FEWEST_ADDED", 2):
        return function(*args)


class LargeGroups:
    """The pool, whose groups all count as large ones."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def run(self, function: Callable[..., Any], ranks: int, *args: Any, **options: Any) -> list[Any]:
        return self._pool.run(as_large, ranks, function, *args, **options)
