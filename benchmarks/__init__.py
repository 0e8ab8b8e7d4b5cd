"""Costs of synchronization on this machine, and of the alternatives: ``python -m benchmarks``.

``sections`` has a file for each section, ``timing.py`` how all are timed, ``results`` what was recorded for
docs/benchmarks.md.
"""
