"""Exchanges that compare the ranks, errors that all ranks raise, and reports. Read ``protocol`` first."""

from . import exchanges, probes, watch  # noqa: F401  # each registers itself
