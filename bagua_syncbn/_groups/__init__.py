"""Groups of ranks that synchronize: ``process_group`` arguments, and the interface of communicators."""

from .communicator import LOCAL, Communicator, LocalCommunicator, ProcessGroupLike
from .spec import DESTROYED, EVERYONE, FORKED, GroupSpec, RankGroup, engines, replaced_groups, spec_in_file, spec_of
from .texts import CAUSES, ranks_by_text, text_of_argument, text_of_ranks

__all__ = [
    "CAUSES",
    "DESTROYED",
    "EVERYONE",
    "FORKED",
    "LOCAL",
    "Communicator",
    "GroupSpec",
    "LocalCommunicator",
    "ProcessGroupLike",
    "RankGroup",
    "engines",
    "ranks_by_text",
    "replaced_groups",
    "spec_in_file",
    "spec_of",
    "text_of_argument",
    "text_of_ranks",
]
