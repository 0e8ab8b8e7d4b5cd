"""Groups of ranks that synchronize: what a user gives for one, and what its ranks exchange tensors by."""

from .communicator import LOCAL, Communicator, LocalCommunicator
from .rules import NODE, RankGroup, Ranks, Rule, is_ranks, said_by, text_of_ranks
from .spec import ALONE, DESTROYED, EVERYONE, FORKED, Engine, GroupSpec, describe_kind, engines, first_user, spec_of

__all__ = [
    "ALONE",
    "DESTROYED",
    "EVERYONE",
    "FORKED",
    "LOCAL",
    "NODE",
    "Communicator",
    "Engine",
    "GroupSpec",
    "LocalCommunicator",
    "RankGroup",
    "Ranks",
    "Rule",
    "describe_kind",
    "engines",
    "first_user",
    "is_ranks",
    "said_by",
    "spec_of",
    "text_of_ranks",
]
