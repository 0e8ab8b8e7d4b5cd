import os
from pathlib import Path

import pytest
import torch
from workers import WorkerPool

os.environ["KINETO_CONFIG"] = str(Path(__file__).with_name("kineto.conf"))  # for the ranks too

try:
    import hypothesis
except ImportError:  # a machine with a GPU, whose tests do without
    pass
else:
    # The same examples on every run: a failure that comes and goes helps nobody.
    hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("project")


@pytest.fixture(scope="session")
def pool():
    """Ranks on this machine, see :mod:`workers`."""
    torch.set_num_threads(1)  # the ranks need the cores
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        if os.environ.get("FAIL_WITHOUT_CUDA"):
            pytest.fail("FAIL_WITHOUT_CUDA is set and torch sees no CUDA device")
        pytest.skip("no CUDA device")
