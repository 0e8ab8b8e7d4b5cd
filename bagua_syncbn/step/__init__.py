"""The step: statistics, normalization, derivatives of any order, and what crosses ranks."""
