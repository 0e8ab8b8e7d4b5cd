"""Fixtures for all tests: rank processes, the emulated CUDA library, seeds."""

import gc
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from bagua_syncbn._ops import native
from tests.helpers.emulated import CSRC, build_library, find_headers, load_library
from tests.helpers.workers import WorkerPool, forget_compilations, summing

# Failed assertions in helpers show values, as in test files.
pytest.register_assert_rewrite(
    *(f"tests.helpers.{name}" for name in ("cases", "comparison", "observed", "replicated", "steps"))
)

# TF32 errors in cuBLAS and cuDNN are 100 times the tolerances. Ranks inherit the variable.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
torch.backends.cudnn.allow_tf32 = False
os.environ["KINETO_CONFIG"] = str(Path(__file__).parent / "helpers" / "kineto.conf")  # the ranks inherit it


@pytest.fixture(scope="session")
def pools():
    """Rank processes with native kernels and with the reference ops; they start at their first use."""
    torch.set_num_threads(1)  # the ranks need the cores
    workers = {"native": WorkerPool(), "reference": WorkerPool(BAGUA_SYNCBN_KERNELS="reference")}
    yield workers
    for each in workers.values():
        each.close()


@pytest.fixture
def pool(request, pools):
    """The rank processes, see `helpers/workers.py`."""
    return pools[getattr(request, "param", "native")]


@pytest.fixture
def large(pool):
    yield summing(pool)
    pool.forget_job()


@pytest.fixture(params=["gathered", "summed"])
def groups(request, pool):
    """The pool, with groups that gather statistics and with groups that sum them."""
    return request.getfixturevalue("large") if request.param == "summed" else pool


@pytest.fixture(scope="module")
def single_threaded():
    """Runs operations in one thread, since ranks or replicas in threads need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def library():
    """The CUDA ops on emulated kernels, see `helpers/emulated.py`."""
    headers = find_headers()
    if headers is None or shutil.which("g++") is None or not CSRC.exists():
        pytest.skip("needs g++, the headers of the CUDA toolkit and the sources")
    return load_library(build_library(headers))


@pytest.fixture(autouse=True)
def reset_state():
    torch.manual_seed(0)
    forget_compilations()


def pytest_sessionstart():
    """Refuses to test plain torch unless it is requested: otherwise, no test of the kernels would run."""
    if native.KERNELS == "reference" and native.WANTED != "reference":
        raise pytest.UsageError(
            f"bagua_syncbn in {Path(native.__file__).parents[1]} has no native kernels; run `make test`, or build them "
            "by `pip install -e .`. To test plain torch, set BAGUA_SYNCBN_KERNELS=reference"
        )


def pytest_generate_tests(metafunc):
    """Tests with the mark ``reference_too`` also run with the reference ops; tests without ranks, on one rank."""
    test = metafunc.definition
    if test.get_closest_marker("reference_too"):
        marks = []
        if "pool" not in metafunc.fixturenames:
            metafunc.fixturenames.append("pool")
            marks = [] if test.get_closest_marker("ranks") else [pytest.mark.ranks(1)]
        metafunc.parametrize("pool", ["native", pytest.param("reference", marks=marks)], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs tests with the mark ``ranks(n)`` on n ranks; with ``new_job=True`` in a new job.

    Tests that use the fixture ``groups`` run with both kinds of groups.
    """
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    ranks = "groups" if "groups" in pyfuncitem.fixturenames else "pool"
    pool, arguments = pyfuncitem._request.getfixturevalue(ranks), pyfuncitem.funcargs
    test = partial(pyfuncitem.obj, **{name: arguments[name] for name in pyfuncitem._fixtureinfo.argnames})
    is_new = mark.kwargs.get("new_job", False)
    if is_new:
        pool.forget_job()
    pool.run(test, *mark.args, timeout=mark.kwargs.get("timeout", 300))
    if is_new:
        pool.forget_job()
    return True


def pytest_collection_finish():
    gc.freeze()  # garbage collection skips torch's modules after this


def pytest_runtest_setup(item):
    if item.get_closest_marker("reference_too") and "pool" not in item.callspec.params:
        pytest.fail("reference_too: expected the mark on a test, got it on a row, which runs once")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        if os.environ.get("FAIL_WITHOUT_CUDA"):
            pytest.fail("FAIL_WITHOUT_CUDA is set and torch sees no CUDA device")
        pytest.skip("no CUDA device")
