"""Agreement of the ranks: exchanges that compare them, and errors of which peers learn. Read ``protocol`` first."""

from ..errors import error_handlers
from ..step.exchange import exchange_makers
from .errors import notify_peers
from .exchanges import compared_exchange

exchange_makers.register(compared_exchange)
error_handlers.register(notify_peers)
