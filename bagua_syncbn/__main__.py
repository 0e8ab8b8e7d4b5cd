"""``python -m bagua_syncbn``: see :mod:`bagua_syncbn.info`; with ``verify``: :mod:`bagua_syncbn.verification`."""

import sys

from .info import main
from .verification import main as verify

if sys.argv[1:2] == ["verify"]:
    verify(sys.argv[2:])
else:
    main()
