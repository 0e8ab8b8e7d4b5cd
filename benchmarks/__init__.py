"""Costs of synchronization on this machine, and of the alternatives: ``python -m benchmarks``.

Each folder has the sections of one kind of run, and says in ``__init__.py`` which. docs/benchmarks.md says what is
measured and how.
"""
