"""The contract once more, over Bagua's communicator."""

from test_accumulation import test_ranks_with_uneven_and_empty_micro_batches
from test_contract import test_drawn_cases, test_options, test_ranks_equal_one_process
from test_double_backward import test_third_derivatives
from test_fused import test_contract as test_activations_and_residuals
from test_masks import test_ranks_with_masks
from test_recompute_outputs import test_bit_for_bit_over_ranks

__all__ = [
    "test_activations_and_residuals",
    "test_bit_for_bit_over_ranks",
    "test_drawn_cases",
    "test_options",
    "test_ranks_equal_one_process",
    "test_ranks_with_masks",
    "test_ranks_with_uneven_and_empty_micro_batches",
    "test_third_derivatives",
]
