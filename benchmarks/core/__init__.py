"""What all benchmarks share: timing, statistics and tables, inputs, counters, and facts about the machine."""
