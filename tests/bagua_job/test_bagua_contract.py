"""The contract over Bagua's communicator: ranks equal one process."""

import pytest
import torch

from tests.helpers.cases import Case, check

CASES = [
    Case((3, 5), (4, 6), torch.float32, options={"momentum": None}),
    Case((2, 0, 3), (2, 5, 6), torch.float64, residual=True, options={"activation": "relu"}),
    Case((4, 3), (3, 7), torch.float64, masks="random", zero_masked=True),
    Case((3, 4), (3, 5), torch.float64, order=3),
    *(Case((3, 4), (2, 5, 6), torch.float32, way=way) for way in ("function", "checkpointed", "recomputed")),
    Case((3, 4), (3, 5), torch.float64, way="accumulated"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_one_process(pool, case):
    check(pool, case)
