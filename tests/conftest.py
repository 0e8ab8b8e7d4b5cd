"""Fixtures of all tests: the pool of worker processes, the emulated CUDA library, seeds."""

import gc
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.emulated import CSRC, build_library, find_headers, load_library
from tests.helpers.large_groups import LargeGroups
from tests.helpers.workers import WorkerPool, forget_compilations

# Assertions in helpers say what they compared, as in the files of tests.
pytest.register_assert_rewrite(
    *(f"tests.helpers.{name}" for name in ("cases", "comparison", "observed", "replicated", "training"))
)

# TF32 in cuBLAS and cuDNN has errors a hundred times the tolerances; the variable holds for ranks as well.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
torch.backends.cudnn.allow_tf32 = False
os.environ["KINETO_CONFIG"] = str(Path(__file__).parent / "helpers" / "kineto.conf")  # for the ranks too

try:
    import hypothesis
except ImportError:  # tests for a GPU do without
    pass
else:
    # Equal examples on every run: a failure that comes and goes helps nobody.
    hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("project")


@pytest.fixture(scope="session")
def pool():
    """Ranks on this machine, see `helpers/workers.py`."""
    torch.set_num_threads(1)  # the ranks need the cores
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture
def large(pool):
    """The pool, in groups that add statistics up as large ones do."""
    yield LargeGroups(pool)
    pool.forget_job()


@pytest.fixture(params=["pool", "large"])
def groups(request):
    """The pool, in groups that gather statistics, and in groups that add them up."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def single_threaded():
    """One thread in each operation: replicas in threads need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def library():
    """The CUDA ops over emulated kernels, see `helpers/emulated.py`."""
    headers = find_headers()
    if headers is None or shutil.which("g++") is None or not CSRC.exists():
        pytest.skip("needs g++, the headers of the CUDA toolkit and the sources")
    return load_library(build_library(headers))


@pytest.fixture(autouse=True)
def begun_anew():
    torch.manual_seed(0)
    forget_compilations()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test with the mark ``ranks(n)`` on each of n ranks; with ``new_job=True`` in a job of its own."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    pool, arguments = pyfuncitem._request.getfixturevalue("pool"), pyfuncitem.funcargs
    test = partial(pyfuncitem.obj, **{name: arguments[name] for name in pyfuncitem._fixtureinfo.argnames})
    is_new = mark.kwargs.get("new_job", False)
    if is_new:
        pool.forget_job()
    pool.run(test, *mark.args, timeout=mark.kwargs.get("timeout", 300))
    if is_new:
        pool.forget_job()
    return True


def pytest_collection_modifyitems(items):
    """The files that take longest come first: at the end, they would be waited for."""
    items.sort(key=lambda item: item.path.stem not in ("test_values", "test_compile", "test_divergence"))


def pytest_collection_finish():
    gc.freeze()  # no collection looks at the modules of torch again


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        if os.environ.get("FAIL_WITHOUT_CUDA"):
            pytest.fail("FAIL_WITHOUT_CUDA is set and torch sees no CUDA device")
        pytest.skip("no CUDA device")
