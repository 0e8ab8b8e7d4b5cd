"""Groups of ranks that synchronize: ``process_group`` arguments, and the interface of communicators."""

from .communicator import LOCAL, Communicator, LocalCommunicator
from .spec import (
    ALONE,
    DESTROYED,
    EVERYONE,
    FORKED,
    NODE,
    Engine,
    GroupSpec,
    RankGroup,
    Ranks,
    Rule,
    describe_kind,
    description_of,
    engines,
    first_user,
    members_by,
    spec_of,
    text_of,
)
from .texts import ranks_by_text, text_of_ranks

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
    "description_of",
    "engines",
    "first_user",
    "members_by",
    "ranks_by_text",
    "spec_of",
    "text_of",
    "text_of_ranks",
]
