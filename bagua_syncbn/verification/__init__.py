"""Verification: a step on all ranks against the same step in one process, on all their batches together."""

from .verify import Verdict, main, verify_synchronization

__all__ = ["Verdict", "main", "verify_synchronization"]
