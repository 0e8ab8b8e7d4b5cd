"""Decisions of setup.py on what to build, by the tools that are there. Ways of installing: .ci/installs.py."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_syncbn.ops import native

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    package = tmp_path / "bagua_syncbn"
    package.mkdir()
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "bagua_syncbn" / name, package)
    return tmp_path


# setuptools and sysconfig learn about the real platform before it changes. `site`, if given, is where torch lies.
ON_PLATFORM = """
import runpy, setuptools, sys, sysconfig
sysconfig.get_config_vars()
get_path = sysconfig.get_path
_, sys.platform, site, *sys.argv = sys.argv
sysconfig.get_path = lambda name, *rest: site if site and name.endswith("lib") else get_path(name, *rest)
runpy.run_path("setup.py")
"""


def decide(checkout, platform=sys.platform, site="", **environment):
    """Builds all but the library; returns the exit status, the output and what was recorded."""
    result = subprocess.run(
        [sys.executable, "-c", ON_PLATFORM, platform, str(site), "setup.py", "build_py", "--build-lib", "lib"],
        cwd=checkout,
        env={key: value for key, value in os.environ.items() if key not in ("CXX", "NVCC")} | environment,
        capture_output=True,
        text=True,
    )
    recorded = checkout / "lib" / "bagua_syncbn" / "build_info.json"
    return (
        result.returncode,
        result.stdout + result.stderr,
        json.loads(recorded.read_text()) if recorded.exists() else {},
    )


def write_tool(path, script):
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


NO_NVCC = {"NVCC": "no-such-nvcc", "CUDA_HOME": "/nowhere"}


def test_a_build_with_all_tools_records_what_it_was_made_with(checkout):
    status, output, info = decide(checkout)
    assert status == 0
    assert f"bagua_syncbn: {info['build']} build: {info['build_reason']}" in output
    assert info["build"] in ("cpu", "cuda")
    assert info["build_torch"]
    assert info["build_compiler"]


@pytest.mark.parametrize(("environment", "build", "reason", "lacks"), [
    ({"PATH": "/nowhere", "CUDA_HOME": "/nowhere"}, "python", "found without compiler", ["compiler"]),
    (NO_NVCC, "cpu", "found without nvcc", ["nvcc"]),
    ({"BAGUA_SYNCBN_BUILD": "python"}, "python", "BAGUA_SYNCBN_BUILD=python", []),
], ids=str)  # fmt: skip
def test_missing_tools_decide_what_is_built(checkout, environment, build, reason, lacks):
    status, _, info = decide(checkout, **environment)
    assert status == 0
    assert (info["build"], info["build_reason"], info["build_lacks"]) == (build, reason, lacks)
    assert (info["build_compiler"] is None) == (build == "python")


@pytest.mark.parametrize(("hip", "build"), [("None", "cuda"), ("'6.4.43482'", "cpu")])
def test_cuda_kernels_are_not_built_against_a_torch_for_rocm(checkout, tmp_path, hip, build):
    torch, tools = tmp_path / "site" / "torch", {"NVCC": str(tmp_path / "bin" / "nvcc")}
    torch.joinpath("include").mkdir(parents=True)
    torch.joinpath("version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip: str = {hip}\n")
    write_tool(tmp_path / "bin" / "nvcc", "echo release 12.4")
    status, _, info = decide(checkout, site=torch.parent, **tools)
    assert (status, info["build"], info["build_torch"]) == (0, build, "2.13.0")
    status, output, _ = decide(checkout, site=torch.parent, BAGUA_SYNCBN_BUILD="cuda", **tools)
    assert (status == 0) == (build == "cuda")
    assert ("expected to find CUDA, since torch is built for ROCm" in output) == (build == "cpu")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_than_on_linux_compilers_are_left_alone(checkout, tmp_path, platform):
    touched = tmp_path / "touched"
    write_tool(tmp_path / "bin" / "g++", f"touch {touched}; exit 1")  # without Xcode, macOS asks for it in a window
    tools = {"CXX": str(tmp_path / "bin" / "g++")}
    status, _, info = decide(checkout, platform, **tools)
    assert status == 0
    assert (info["build"], info["build_reason"]) == ("python", "found without Linux")
    status, output, _ = decide(checkout, platform, **tools, BAGUA_SYNCBN_BUILD="cpu")
    assert status != 0
    assert "BAGUA_SYNCBN_BUILD=cpu: expected to find Linux, got none" in output
    assert not touched.exists()


@pytest.mark.parametrize(("environment", "message"), [
    ({"BAGUA_SYNCBN_BUILD": "cpu", "CXX": "no-such-compiler"}, "BAGUA_SYNCBN_BUILD=cpu: expected to find compiler"),
    ({"BAGUA_SYNCBN_BUILD": "cuda", **NO_NVCC}, "expected to find nvcc"),
    ({"BAGUA_SYNCBN_BUILD": "gpu"}, "BAGUA_SYNCBN_BUILD: expected one of python, cpu, cuda, got 'gpu'"),
])  # fmt: skip
def test_a_forced_build_names_the_missing_tools(checkout, environment, message):
    status, output, info = decide(checkout, **environment)
    assert status != 0
    assert message in output
    assert info == {}


def test_a_launcher_before_the_compiler(checkout, tmp_path):
    launcher = tmp_path / "bin" / "ccache"  # under this name, a command that runs the one after it
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\n[ "$1" != --version ] || echo a cache\nexec "$@"\n')
    launcher.chmod(0o755)
    _, _, expected = decide(checkout, CXX="g++", BAGUA_SYNCBN_BUILD="cpu")
    assert decide(checkout, CXX=f"{launcher} g++ -m64", BAGUA_SYNCBN_BUILD="cpu")[2] == expected != {}
    status, output, _ = decide(checkout, CXX=f"{launcher} no-such-compiler", BAGUA_SYNCBN_BUILD="cpu")
    assert status != 0
    assert "expected to find compiler" in output


@pytest.mark.parametrize(("seen", "chosen", "archs"), [
    ("echo no devices were found; exit 9", None, ["80", "90"]),
    ("echo 9.0; echo 8.9; echo 12.0; echo 9.0", None, ["89", "90"]),
    ("echo 12.0", None, ["80", "90"]),
    ("echo 8.9", "all", ["80", "90"]),
    ("echo 8.9", "native", ["89"]),
    ("exit 9", "native", None),
    ("echo 8.9", "70;120", ["70", "120"]),
])  # fmt: skip
def test_machine_code_is_for_the_cards_of_this_machine_that_nvcc_knows(checkout, tmp_path, seen, chosen, archs):
    known = '[ "$1" = --list-gpu-code ] && echo sm_70 sm_80 sm_89 sm_90 sm_90a || echo release 12.4'
    write_tool(tmp_path / "cuda" / "bin" / "nvcc", known)
    write_tool(tmp_path / "bin" / "nvidia-smi", seen)
    tools = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    _, output, info = decide(checkout, **tools, BAGUA_SYNCBN_CUDA_ARCHS=chosen or "")
    if archs is None:
        assert (info["build"], info["build_reason"]) == ("cpu", "found without a card")
    else:
        assert info["build_cuda_archs"] == archs
        assert f"for compute capability {', '.join(archs)} and PTX for later ones" in output.splitlines()[0]


@pytest.mark.parametrize("free_threaded", [False, True])
def test_only_a_python_with_the_gil_has_the_stable_abi(checkout, tmp_path, free_threaded):
    log = tmp_path / "log"
    write_tool(tmp_path / "bin" / "g++", f'echo "$@" | tee -a {log}; for target; do :; done; touch -- "$target"')
    code = ON_PLATFORM.replace("get_config_vars()", f"get_config_vars()['Py_GIL_DISABLED'] = {int(free_threaded)}", 1)
    command = [sys.executable, "-c", code, sys.platform, "", "setup.py", "build_ext", "--build-lib", "lib"]
    environment = os.environ | {"CXX": str(tmp_path / "bin" / "g++"), "BAGUA_SYNCBN_BUILD": "cpu"}
    subprocess.run(command, cwd=checkout, env=environment, check=True)
    (library,) = checkout.rglob("_C.*so")
    assert (library.name == "_C.abi3.so") == ("Py_LIMITED_API" in log.read_text()) == (not free_threaded)


def test_a_python_without_the_gil_is_refused():
    code = "import sys; sys._is_gil_enabled = lambda: False; import bagua_syncbn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: bagua_syncbn: expected Python to run with the GIL" in done.stderr


def test_an_editable_installation_without_kernels_removes_those_of_an_earlier_one(checkout):
    package = checkout / "bagua_syncbn"
    (package / "_C.abi3.so").touch()
    code = "import setuptools.build_meta as backend, sys; backend.build_editable(sys.argv[1])"
    environment = os.environ | {"BAGUA_SYNCBN_BUILD": "python"}
    subprocess.run([sys.executable, "-c", code, str(checkout)], cwd=checkout, env=environment, check=True)
    assert not (package / "_C.abi3.so").exists()
    assert json.loads((package / "build_info.json").read_text())["build"] == "python"


@pytest.mark.parametrize(("recorded", "warning"), [
    (None, "imported from its sources in .*pip install -e [.]$"),
    ({"build": "python", "build_lacks": ["torch"]}, "built without torch, .*With torch installed, .*install -e [.]$"),
    ({"build": "python", "build_lacks": ["compiler"]}, "built without compiler, .*With compiler installed, "),
    ({"build": "python", "build_lacks": []}, None),  # as asked for
    ({"build": "python", "build_lacks": ["Linux"]}, None),  # nothing helps
], ids=str)  # fmt: skip
def test_an_import_without_kernels_says_what_mends_it(tmp_path, recwarn, recorded, warning):
    if recorded:
        tmp_path.joinpath("build_info.json").write_text(json.dumps(recorded))
    native._warn_without_library(tmp_path)
    messages = [str(each.message) for each in recwarn if each.category is RuntimeWarning]
    assert len(messages) == bool(warning)
    assert not warning or re.search(warning, messages[0])


# Modules and functions that Windows has not, nor macOS some of them. torch is imported before it is told where it is.
ELSEWHERE = """
import os, signal, sys, torch
for name in ("fcntl", "grp", "posix", "pwd", "resource", "termios"):
    sys.modules[name] = None
for module in (os, signal):
    for name in ("fork", "sched_getaffinity", "register_at_fork", "sysconf", "uname", "SIGKILL", "SIGUSR1", "SIGALRM"):
        vars(module).pop(name, None)
sys.platform = "win32"
import bagua_syncbn
model = bagua_syncbn.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)))
model(torch.randn(2, 3, 5, 5)).square().mean().backward()
assert model[1].weight.grad.abs().min() > 0
"""


def test_imports_and_trains_without_what_only_posix_has():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BAGUA_SYNCBN_KERNELS": "reference"}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
