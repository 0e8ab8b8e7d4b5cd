"""Jobs of Bagua: the engine of their layers, and data parallelism in one call."""

from .with_bagua import with_bagua

__all__ = ["with_bagua"]
