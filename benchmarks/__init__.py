"""What synchronization costs on this machine, and what the alternatives would cost: ``python -m benchmarks``.

    peers/          the layers that are compared, one file each
    measures/       what is measured besides time: dispatched ops, bytes, memory, waiting
    rounds.py       how time is measured: in turns, by medians
    workloads.py    shapes, tensors and the functions that are timed
    kernels.py      sections ops and local: one process, no ranks
    jobs.py         starts the ranks of a job; rank.py is what each of them runs
    layers.py       section layers: whole layers on ranks, peer beside peer
    collectives.py  section collectives: the messages on their own
    training.py     section training: a network on real data
    scale/          the model of jobs larger than this machine
    report/         tables, and docs/benchmarks.md and docs/benchmark_tables.md, from recorded results
    charts/         charts from recorded results, one file each
    results/        recorded results

docs/benchmarks.md says what is measured and how.
"""
