"""What synchronization costs on this machine, and what the alternatives would cost: ``python -m benchmarks``.

Each folder has the sections of one kind of run, and says in ``__init__.py`` which. docs/benchmarks.md says what is
measured and how.
"""
