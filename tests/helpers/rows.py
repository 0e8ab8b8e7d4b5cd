"""Tables of tests with rows that repeat a promise with other values."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rows(table: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """Returns rows for ``parametrize``; `make test` runs those whose value, or first value, is in ``first``."""
    given = [row if isinstance(row, tuple) else (row,) for row in table]
    return [pytest.param(*row, marks=() if row[0] in first else pytest.mark.all_rows) for row in given]
