"""Less memory for activations: fused activations, recomputed outputs and checkpoints; see ``docs/memory.md``."""

from .checkpointing import Repeatable
from .fusing import fuse_activations
from .recomputing import recompute_outputs

__all__ = ["Repeatable", "fuse_activations", "recompute_outputs"]
