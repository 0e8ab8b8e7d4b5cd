"""How ranks talk in a step, knowing nothing of masks, layouts and kernels. Read ``protocol`` first."""

from .faults import check_ranks
from .probes import tell_peers
from .protocol import RankSync
from .signatures import name_of
from .strategies import FIXED_STATISTICS, LocalSync, Sync, sync_of

__all__ = [
    "FIXED_STATISTICS",
    "LocalSync",
    "RankSync",
    "Sync",
    "check_ranks",
    "name_of",
    "sync_of",
    "tell_peers",
]
