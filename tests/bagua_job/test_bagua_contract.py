"""The contract once more, over Bagua's communicator."""

# ruff: noqa: F401 - pytest runs what is imported

from tests.contract.test_accumulation import test_ranks_with_uneven_and_empty_micro_batches
from tests.contract.test_contract import (
    test_ranks_equal_one_process,
    test_ranks_equal_one_process_in_drawn_cases,
    test_ranks_equal_one_process_with_each_option,
    test_ranks_with_masks_equal_one_process,
)
from tests.contract.test_ways import test_a_repetition_is_the_call_that_it_repeats_whatever_has_changed_since
from tests.step.test_double_backward import test_third_derivatives_equal_one_process
from tests.step.test_forward_in_backward import test_a_forward_in_a_backward_pass_is_a_new_one
from tests.step.test_fused import test_fused_ranks_equal_the_formula_in_one_process
from tests.step.test_recomputation import test_each_call_is_repeated_as_itself_without_a_message
from tests.step.test_recompute_outputs import test_recomputed_outputs_are_the_same_bits
from tests.step.test_transforms import test_transforms_over_ranks_equal_one_process
