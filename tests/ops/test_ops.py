"""The ops in a single process: definition, schema, fake kernels, no host reads."""

import pytest
import torch

from bagua_syncbn import _ops as ops
from tests.helpers.observed import ForbidHostReads
from tests.helpers.op_calls import op_calls, op_of

pytestmark = pytest.mark.reference_too


NAMES = list(op_calls())


@pytest.mark.parametrize("name", NAMES)
def test_schemas_fakes_and_gradients_pass_opcheck(name):
    torch.library.opcheck(op_of(ops, name), (), op_calls((2, 3, 4, 5), layout="channels_last")[name])


# Skips the check that traces, which takes nearly all the time.
FAST_CHECKS = "test_schema", "test_autograd_registration", "test_faketensor"


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_shapes_and_dtypes(name):
    for given in (
        ((5, 3), torch.float32),
        ((2, 3, 4, 5), torch.float64, torch.float32, False),
        ((2, 3, 4, 5), torch.float16),
        ((1, 1, 1), torch.bfloat16, torch.float32),
        ((0, 3, 4), torch.float32),
    ):
        torch.library.opcheck(op_of(ops, name), (), op_calls(*given)[name], test_utils=FAST_CHECKS)


@pytest.mark.parametrize("name", NAMES)
def test_reads_nothing_on_the_host(name):
    arguments = op_calls()[name]
    with ForbidHostReads():
        op_of(ops, name)(**arguments)


def test_stats_by_hand():
    input = torch.tensor([[[1.0, 2.0], [-1.0, 5.0]], [[3.0, 6.0], [-1.0, 5.0]]])
    assert ops.batch_norm_stats(input).tolist() == [3.0, 2.0, 3.5, 9.0, 4.0, 0.0]


@pytest.mark.parametrize(("count", "masked"), [*((count, 0) for count in (0, 7, 2**24 - 1, 2**24)), (2**24 + 1, 5)])
def test_float32_rows_hold_exact_counts_of_values(count, masked):
    mask = torch.arange(count + masked).unsqueeze(0) >= masked if masked else None
    packed = ops.batch_norm_stats(torch.zeros((), dtype=torch.float16).expand(1, 1, count + masked), mask=mask)
    assert packed.dtype == torch.float32
    assert int(packed[-2]) + 2**24 * int(packed[-1]) == count
    _, _, merged = ops.batch_norm_gather_stats(packed.expand(3, -1), None, None, None, None, 1e-5)
    assert merged.item() == 3 * count
