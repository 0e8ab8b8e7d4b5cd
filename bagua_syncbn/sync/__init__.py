"""Messages of ranks in a call, and how ranks find out that they differ. Read ``protocol`` first."""

from .errors import raise_for_all, tell_peers, tells_peers
from .exchanges import LOCAL_EXCHANGE, Exchange, exchange_of
from .signatures import ConvertedModel, Origin, name_of

__all__ = [
    "LOCAL_EXCHANGE",
    "ConvertedModel",
    "Exchange",
    "Origin",
    "exchange_of",
    "name_of",
    "raise_for_all",
    "tell_peers",
    "tells_peers",
]
