"""The step: statistics, normalization, derivatives of any order, and messages."""
