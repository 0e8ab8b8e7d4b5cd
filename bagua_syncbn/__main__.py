"""Runs :mod:`bagua_syncbn.info`, or :mod:`bagua_syncbn.verification` for ``python -m bagua_syncbn verify``."""

import sys

from .info import main
from .verification import main as verify

if sys.argv[1:2] == ["verify"]:
    verify(sys.argv[2:])
else:
    main()
