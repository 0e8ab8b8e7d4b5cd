"""What synchronization costs on this machine, and what the alternatives would cost: ``python -m benchmarks``.

    core/      timing, statistics, tables, counters, facts about the machine: what all share
    cpu/       one process: sections ops, local and host
    ranks/     jobs of several ranks: sections layers and training
    gpu/       ``make gpu``: builds, tests and measures the CUDA kernels
    peers/     the layers that are compared
    charts/    charts of recorded results, one file each
    results/   recorded results
    report.py  tables of recorded results, for the end of a run and for docs/benchmarks.md

docs/benchmarks.md says what is measured and how.
"""
