"""Verifies that ranks train like one process, and measures whether a model needs synchronization."""

from .noise import BatchNoise, LayerNoise, measure_batch_noise
from .verify import Verdict, verify_synchronization

__all__ = ["BatchNoise", "LayerNoise", "Verdict", "measure_batch_noise", "verify_synchronization"]
