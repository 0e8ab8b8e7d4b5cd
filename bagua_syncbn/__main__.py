"""``python -m bagua_syncbn [--json]``: see :mod:`bagua_syncbn.info`."""

from .info import main

main()
