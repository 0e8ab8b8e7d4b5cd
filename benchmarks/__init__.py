"""Measures synchronization and its alternatives on this machine: ``python -m benchmarks``.

``sections`` has one file per section, ``timing.py`` times them, and ``results`` holds the data of docs/benchmarks.md.
"""
