"""Messages of ranks in a call, and how ranks find out that they differ. Read ``protocol`` first."""

from .errors import raise_for_all, tell_peers, tells_peers
from .exchanges import LOCAL_EXCHANGE, Exchange, exchange_of, sum_over_ranks
from .faults import check_ranks
from .signatures import ConvertedModel, Origin, name_of

__all__ = [
    "LOCAL_EXCHANGE",
    "ConvertedModel",
    "Exchange",
    "Origin",
    "check_ranks",
    "exchange_of",
    "name_of",
    "raise_for_all",
    "sum_over_ranks",
    "tell_peers",
    "tells_peers",
]
