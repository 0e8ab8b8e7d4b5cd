"""Agreement of the ranks: exchanges that compare them, and errors of which peers learn. Read ``protocol`` first."""

from ..errors import at_error
from ..step.exchange import EXCHANGES
from .errors import tell_peers
from .exchanges import compared_exchange

EXCHANGES.append(compared_exchange)
at_error.append(tell_peers)
