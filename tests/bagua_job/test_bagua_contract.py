"""The contract once more, over Bagua's communicator."""

from test_contract import test_drawn_cases, test_options, test_ranks_equal_one_process

__all__ = ["test_drawn_cases", "test_options", "test_ranks_equal_one_process"]
