"""How ranks talk in a step, knowing nothing of masks, layouts and kernels. Read ``protocol`` first."""

from .protocol import CallSite, RankSync, call_site, check, check_ranks, name_of, tell_peers
from .strategies import FIXED_STATISTICS, FixedStatistics, LocalSync, Sync, sync_of

__all__ = [
    "FIXED_STATISTICS",
    "CallSite",
    "FixedStatistics",
    "LocalSync",
    "RankSync",
    "Sync",
    "call_site",
    "check",
    "check_ranks",
    "name_of",
    "sync_of",
    "tell_peers",
]
