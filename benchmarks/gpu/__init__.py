"""``make gpu``: builds, tests, checks and measures the CUDA kernels on a machine with a GPU. ``prove.py`` runs it."""
