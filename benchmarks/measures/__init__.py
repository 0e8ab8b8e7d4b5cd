"""What a step does, counted while it runs: ops, collectives, bytes, waiting, memory. Time is in ``rounds``."""

from .dispatch import DispatchCounter
from .memory import Allocations, record_allocations
from .step import Counts, count_step
from .waiting import CollectiveClock
from .wire import bytes_written

__all__ = [
    "Allocations",
    "CollectiveClock",
    "Counts",
    "DispatchCounter",
    "bytes_written",
    "count_step",
    "record_allocations",
]
