"""Tables of tests with rows that repeat a promise with other values."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rows(table: Iterable[Any], first: Collection[Any], arguments: int = 1) -> list[Any]:
    """Returns rows of one or several ``arguments`` for ``parametrize``.

    `make test` runs rows whose value, or first value, is in ``first``.
    """
    given = [tuple(row) if arguments > 1 else (row,) for row in table]
    return [pytest.param(*row, marks=() if row[0] in first else pytest.mark.all_rows) for row in given]
