"""Parts that all benchmarks share: timing, statistics and tables, inputs, counters, facts about the machine."""
