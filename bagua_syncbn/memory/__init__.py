"""Less memory for activations: fused activations and recomputed outputs; see ``docs/memory.md``."""

from .fusing import fuse_activations
from .recomputing import recompute_outputs

__all__ = ["fuse_activations", "recompute_outputs"]
