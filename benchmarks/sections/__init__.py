"""The sections, one per file: inputs, measurements and tables."""

from typing import Any

from . import exchange, gpu, host, layers, local, stored, training

IN_ONE_PROCESS: dict[str, Any] = {
    "local": local,
    "host": host,
    "stored": stored,
    "gpu": gpu,
}
ON_RANKS: dict[str, Any] = {"exchange": exchange, "layers": layers, "training": training}
SECTIONS = IN_ONE_PROCESS | ON_RANKS
