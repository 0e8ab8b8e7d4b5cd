"""Exchanges that compare the ranks, errors that all ranks raise, and reports. Read ``protocol`` first."""

from . import protocol  # noqa: F401  # registers its exchange
