"""Exchanges that compare ranks, errors that all ranks raise, and logs of long waits. Read ``README.md`` first."""

from . import protocol  # noqa: F401  # registers its exchange
