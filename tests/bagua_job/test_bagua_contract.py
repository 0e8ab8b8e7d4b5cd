"""The contract over Bagua's communicator."""

# ruff: noqa: F401 - pytest runs the imported tests

from tests.contract.test_accumulation import test_accumulation_takes_uneven_and_empty_micro_batches
from tests.contract.test_contract import (
    test_ranks_equal_one_process,
    test_ranks_equal_one_process_in_drawn_cases,
    test_ranks_equal_one_process_with_each_option,
    test_ranks_with_masks_equal_one_process,
)
from tests.contract.test_ways import test_recomputation_uses_the_original_call
from tests.step.test_double_backward import test_third_derivatives_equal_one_process
from tests.step.test_forward_in_backward import test_a_forward_inside_backward_is_a_new_call
from tests.step.test_fused import test_fused_ranks_equal_the_formula_in_one_process
from tests.step.test_recomputation import test_recomputed_calls_send_nothing
from tests.step.test_recompute_outputs import test_recomputed_outputs_are_the_same_bits
from tests.step.test_transforms import test_transforms_over_ranks_equal_one_process
