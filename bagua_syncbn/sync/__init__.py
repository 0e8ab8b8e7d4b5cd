"""How ranks talk in a step, knowing nothing of masks, layouts and kernels. Read ``protocol`` first."""

from .errors import raise_for_all, tell_peers, tells_peers
from .faults import check_ranks
from .protocol import RankSync
from .signatures import name_of
from .strategies import FIXED_STATISTICS, LocalSync, Sync, sum_over_ranks, sync_of

__all__ = [
    "FIXED_STATISTICS",
    "LocalSync",
    "RankSync",
    "Sync",
    "check_ranks",
    "name_of",
    "raise_for_all",
    "sum_over_ranks",
    "sync_of",
    "tell_peers",
    "tells_peers",
]
