"""How ranks talk in a step, knowing nothing of masks, layouts and kernels. Read ``protocol`` first."""

from .protocol import (
    CallSite,
    RankSync,
    call_site,
    check,
    check_ranks,
    compiled_words,
    kind_of,
    name_of,
    note_compilation,
    options_of,
    tell_peers,
)

__all__ = [
    "CallSite",
    "RankSync",
    "call_site",
    "check",
    "check_ranks",
    "compiled_words",
    "kind_of",
    "name_of",
    "note_compilation",
    "options_of",
    "tell_peers",
]
