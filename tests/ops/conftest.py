"""The emulated CUDA kernels, which tests of the ops share."""

import pytest
from emulated import build, find_headers


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The CUDA kernels for the CPU, compiled once."""
    return build(tmp_path_factory.mktemp("emulator"), find_headers())
