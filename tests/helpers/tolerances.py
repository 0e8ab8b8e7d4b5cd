"""Tolerances against the float64 reference: ``|actual - expected| <= atol + rtol * |expected|``.

==========  ======  ======  ======================================================================================
dtype       rtol    atol    why
==========  ======  ======  ======================================================================================
float64     1e-11   1e-11   some thousand roundings of 1.1e-16
float32     2e-5    2e-5    some hundred roundings of 6e-8; sums of cancelling terms leave an absolute error
float16     1e-3    5e-5    computed in float32, rounded once at the end: half a unit in the last place is 4.9e-4
bfloat16    8e-3    5e-5    as float16; half a unit in the last place is 3.9e-3
==========  ======  ======  ======================================================================================
"""

import torch
from torch import Tensor

TOLERANCES = {
    torch.float64: (1e-11, 1e-11),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (1e-3, 5e-5),
    torch.bfloat16: (8e-3, 5e-5),
}

DTYPES = list(TOLERANCES)


def assert_close(actual: Tensor, expected: Tensor, what: str, *, roundings: int = 1) -> None:
    """Compares ``actual`` with a float64 reference of the same shape; errors begin with ``what``.

    ``roundings`` is the number of roundings to the dtype: a buffer is rounded in each step.
    """
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=rtol * roundings,
        atol=atol * roundings,
        msg=lambda message: f"{what}: {message}",
    )
