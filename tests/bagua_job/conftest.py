"""Tests over the installed Bagua. Without Bagua, no test in this folder is collected."""

from importlib.metadata import packages_distributions

import pytest
import torch

if "bagua" not in packages_distributions():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def pool():
    """Ranks of a Bagua job on this machine, with the fake native core of `native.py`."""
    from tests.bagua_job.native import join_job
    from tests.helpers.workers import WorkerPool

    torch.set_num_threads(1)  # the ranks need the cores
    workers = WorkerPool(join_job)
    yield workers
    workers.close()
