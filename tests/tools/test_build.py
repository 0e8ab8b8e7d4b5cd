"""setup.py decides what to build from the available tools. .ci/installs.py tests ways to install."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from bagua_syncbn._ops import native
from tests import conftest
from tests.helpers.workers import run_fresh

ROOT = Path(__file__).parents[2]
PACKAGE = {"__init__.py", "_sources.py", "version.py"}  # files that setup.py needs


@pytest.fixture
def checkout(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    package = tmp_path / "bagua_syncbn"
    package.mkdir()
    for name in PACKAGE:
        shutil.copy(ROOT / "bagua_syncbn" / name, package)
    write_tool(tmp_path / "bin" / "g++", "echo a compiler")  # that accepts any source
    return tmp_path


# setuptools and sysconfig must see the real platform before it changes. sys.modules["torch"] = None hides torch, as pip
# does. The new process has imported torch; without its module, setup.py finds the torch of PYTHONPATH.
SETUP = """
import json, os, runpy, setuptools, sys, sysconfig
sysconfig.get_config_vars()
_, folder, environment, sys.platform, sys.executable, isolated, *sys.argv = sys.argv
os.chdir(folder)
os.environ.clear()
os.environ.update(json.loads(environment))
sys.path[:0] = os.environ.get("PYTHONPATH", "").split()
torch = sys.modules.pop("torch")
if isolated:
    sys.modules["torch"] = None
runpy.run_path("setup.py")
"""


# Without the variables that setup.py reads.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("CXX", "NVCC", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST") and not name.startswith("BAGUA_SYNCBN")
}


def decide(checkout, platform=sys.platform, python=sys.executable, isolated="", also=(), **environment):
    """Runs setup.py without compiling, then the commands ``also``. Returns exit status, output and build_info.json."""
    given = platform, python, isolated, "setup.py", "build_py", "--build-lib", "lib", *also
    tools = {"PATH": f"{checkout}/bin:{os.environ['PATH']}"}
    result = run_fresh(SETUP, str(checkout), json.dumps(ENVIRONMENT | tools | environment), *given)
    recorded = checkout / "lib" / "bagua_syncbn" / "build_info.json"
    return (
        result.returncode,
        result.stdout + result.stderr,
        json.loads(recorded.read_text()) if recorded.exists() else {},
    )


def write_tool(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def write_torch(folder, version="2.13.0", cuda="13.0", hip=None):
    """Writes the files of torch that setup.py reads. Returns the environment that makes Python find them."""
    torch = folder / "site" / "torch"
    torch.mkdir(parents=True)
    torch.joinpath("__init__.py").touch()
    torch.joinpath("version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n")
    return {"PYTHONPATH": str(torch.parent)}


def test_an_isolated_build_finds_torch(checkout, tmp_path):
    """pip isolates builds with variables; uv uses an interpreter outside the environment, found on PATH or in the
    checkout."""
    assert decide(checkout, isolated="yes")[2]["build_torch"] == torch.__version__
    status, _, info = decide(checkout, isolated="yes", python="/nowhere/python", PATH="/nowhere")
    assert (status, info["build_reason"]) == (0, "no torch 2.10 or later and no compiler")
    nowhere = {"PATH": "/nowhere", "BAGUA_SYNCBN_BUILD": "cpu"}
    status, output, _ = decide(checkout, isolated="yes", python="/nowhere/python", **nowhere)
    assert status != 0
    assert output.endswith("if torch is installed, activate its environment or pass --no-build-isolation\n")
    write_torch(tmp_path, "2.11.0")
    find = f'[ -z "$PYTHONPATH$PYTHONNOUSERSITE" ] && echo {tmp_path}/site/torch/__init__.py'
    isolation = {"PYTHONPATH": "/nowhere", "PYTHONNOUSERSITE": "1", "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    own = tmp_path / "own" / "python3.13"
    for python in (own, checkout / ".venv" / "bin" / "python3", tmp_path / "bin" / "python3"):
        write_tool(python, find)
        info = decide(checkout, isolated="yes", python=str(own), **isolation)[2]
        assert info["build_torch"] == "2.11.0", python
        python.unlink()


NO_NVCC = {"NVCC": "no-such-nvcc", "CUDA_HOME": "/nowhere"}
CPU_TORCH, ROCM_TORCH = {"cuda": None}, {"cuda": None, "hip": "6.4"}


@pytest.mark.parametrize(("environment", "torch", "nvcc", "outcome"), [
    ({"PATH": "/nowhere"}, {}, None, "python: no compiler"),
    ({}, {"version": "2.9.1"}, "13.0", "python: no torch 2.10 or later (found 2.9)"),
    ({"BAGUA_SYNCBN_BUILD": "python"}, {}, None, "python: BAGUA_SYNCBN_BUILD=python"),
    ({}, {}, None, "cpu: no nvcc 12.4 or later"),
    ({"BAGUA_SYNCBN_BUILD": "", "CXX": ""}, {}, None, "cpu: no nvcc 12.4 or later"),
    ({}, {}, "12.3", "cpu: no nvcc 12.4 or later (found 12.3)"),
    ({}, {}, "12.4", "cuda: found all tools"),
    # CUDA kernels are built for a CPU build of torch only on request (for another machine), and never for ROCm.
    ({}, CPU_TORCH, "13.0", "cpu: no torch for CUDA"),
    ({"BAGUA_SYNCBN_CUDA_ARCHS": ""}, CPU_TORCH, "13.0", "cpu: no torch for CUDA"),
    ({"BAGUA_SYNCBN_CUDA_ARCHS": "native"}, CPU_TORCH, "13.0", "cpu: no torch for CUDA"),
    ({"BAGUA_SYNCBN_CUDA_ARCHS": "all"}, CPU_TORCH, "13.0", "cuda: found all tools"),
    ({"BAGUA_SYNCBN_BUILD": "cuda"}, CPU_TORCH, "13.0", "cuda: BAGUA_SYNCBN_BUILD=cuda"),
    ({"BAGUA_SYNCBN_CUDA_ARCHS": "all"}, ROCM_TORCH, "13.0", "cpu: no torch for CUDA"),
    ({"BAGUA_SYNCBN_BUILD": "cuda"}, ROCM_TORCH, "13.0", "BAGUA_SYNCBN_BUILD=cuda needs torch for CUDA"),
    ({"BAGUA_SYNCBN_BUILD": "cuda"}, {}, None, "BAGUA_SYNCBN_BUILD=cuda needs nvcc 12.4 or later"),
    ({"BAGUA_SYNCBN_BUILD": "cpu", "CXX": "no-such-compiler"}, {}, None, "BAGUA_SYNCBN_BUILD=cpu needs compiler"),
    # The variable of other packages does not matter without CUDA kernels.
    ({"TORCH_CUDA_ARCH_LIST": "7.0 Ampere"}, CPU_TORCH, "13.0", "cpu: no torch for CUDA"),
    ({"TORCH_CUDA_ARCH_LIST": "7.0 Ampere", "CXX": "no-such-compiler"}, {}, "13.0", "python: no compiler"),
    ({"TORCH_CUDA_ARCH_LIST": "7.0 Ampere", "BAGUA_SYNCBN_BUILD": "cpu"}, {}, "13.0", "cpu: BAGUA_SYNCBN_BUILD=cpu"),
    ({"BAGUA_SYNCBN_BUILD": "gpu"}, {}, None, "BAGUA_SYNCBN_BUILD: expected one of python, cpu, cuda, got 'gpu'"),
], ids=str)  # fmt: skip
def test_tools_decide_the_build_and_a_forced_build_names_missing_tools(
    checkout, tmp_path, environment, torch, nvcc, outcome
):
    tools = NO_NVCC
    if nvcc:
        tools = {"NVCC": write_tool(tmp_path / "bin" / "nvcc", f"echo release {nvcc}, V{nvcc}.99")}
    status, output, info = decide(checkout, **tools | environment, **write_torch(tmp_path, **torch))
    if info:
        assert (status, f"{info['build']}: {info['build_reason']}") == (0, outcome)
        assert (info["build_compiler"] is None) == (info["build"] == "python")
    else:
        assert status != 0
        assert outcome in output


@pytest.mark.parametrize(("platform", "forced", "outcome"), [
    ("darwin", {}, "bagua_syncbn: python build: no Linux"),
    ("win32", {"BAGUA_SYNCBN_BUILD": "cpu"}, "BAGUA_SYNCBN_BUILD=cpu needs Linux"),
])  # fmt: skip
def test_other_systems_run_no_compiler(checkout, tmp_path, platform, forced, outcome):
    touched = tmp_path / "touched"
    compiler = write_tool(tmp_path / "bin" / "g++", f"touch {touched}; exit 1")  # on macOS, a call may open a dialog
    assert outcome in decide(checkout, platform, CXX=compiler, **forced)[1]
    assert not touched.exists()


def test_the_compiler_may_have_a_launcher(checkout, tmp_path):
    launcher = write_tool(tmp_path / "bin" / "ccache", '[ "$1" != --version ] || echo a cache\nexec "$@"')
    _, _, expected = decide(checkout, CXX="g++", BAGUA_SYNCBN_BUILD="cpu")
    assert decide(checkout, CXX=f"{launcher} g++ -m64", BAGUA_SYNCBN_BUILD="cpu")[2] == expected != {}


COMPILER, OLD_NVCC = (
    "working compiler for C++17, GCC 11 or clang 13 or later",
    """
case "$*" in *-E*) echo "#error GNU version" >&2; exit 1; esac; echo release 13.0, V13
""",
)
OLD_COMPILER = """
case "$*" in *-std=c++17*) echo "In file f.cpp:
f.cpp:1: error: expected C++03
see --help" >&2; exit 1; esac; echo g++ 4.8
"""


@pytest.mark.parametrize(("build", "tool", "script", "lacks"), [
    ("cpu", "g++", OLD_COMPILER, f"{COMPILER} (f.cpp:1: error: expected C++03)"),
    ("cpu", "g++", "echo no libmpfr.so >&2; exit 127", f"{COMPILER} (no libmpfr.so)"),
    ("cpu", "g++", f'exec {shutil.which("g++")} "$@" -std=c++11', f"{COMPILER} ("),
    ("cuda", "nvcc", OLD_NVCC, "working nvcc (#error GNU version)"),
], ids=["old", "broken", "real", "nvcc"])  # fmt: skip
def test_a_compiler_that_fails_is_not_used_and_its_error_is_shown(checkout, build, tool, script, lacks):
    write_tool(checkout / "bin" / tool, script)
    given = {"BAGUA_SYNCBN_CUDA_ARCHS": "80"} if build == "cuda" else NO_NVCC
    status, output, info = decide(checkout, **given)
    assert (status, info["build"]) == (0, "python" if build == "cpu" else "cpu"), output
    assert info["build_reason"].startswith(f"no {lacks}")
    assert "\n" not in info["build_reason"]
    status, output, _ = decide(checkout, **given, BAGUA_SYNCBN_BUILD=build)
    assert status != 0
    assert f"BAGUA_SYNCBN_BUILD={build} needs {lacks}" in output
    assert output.endswith("\nBAGUA_SYNCBN_BUILD=python needs no tools\n")
    assert script != OLD_COMPILER or "\nsee --help\n" in output  # all lines of the compiler


@pytest.fixture
def cuda_tools(tmp_path):
    """A fake nvcc that supports some GPUs, and a torch for CUDA."""
    known = '[ "$1" = --list-gpu-code ] && echo sm_70 sm_80 sm_89 sm_90 sm_120 || echo release 12.8'
    write_tool(tmp_path / "cuda" / "bin" / "nvcc", known)
    return write_torch(tmp_path) | {"CUDA_HOME": str(tmp_path / "cuda"), "NVCC": ""}


# Output of nvidia-smi, the two variables, and the architectures or a text in the output.
@pytest.mark.parametrize(("seen", "ours", "torchs", "archs"), [
    # Machine code is for local GPUs that nvcc supports.
    ("echo 9.0; echo 8.9; echo 10.0; echo 9.0", "", "", "89, 90"),
    ("echo 10.0", "", "", "80, 90, 120"),
    ("echo 8.9", "all", "8.0", "80, 90, 120"),
    ("echo no devices were found; exit 9", "native", "", "cpu build: no GPU"),
    # Common spellings are accepted.
    ("", "8.9,sm_90 compute_80;", "", "80, 89, 90"),
    ("", "90a;9.0;12.0f", "", "90, 90a, 120f"),
    ("", "", "7.0 8.0;9.0a+PTX", "70, 80, 90a"),
    ("", "foo", "", "BAGUA_SYNCBN_CUDA_ARCHS: expected .*such as 80;90, .*70, 80, 89, 90, 120[)], got foo"),
    ("", "80;75", "", "BAGUA_SYNCBN_CUDA_ARCHS: expected .*, got 75"),
    ("", "", "Hopper", "TORCH_CUDA_ARCH_LIST: .*, got hopper; set BAGUA_SYNCBN_CUDA_ARCHS, or .*BUILD=cpu"),
])  # fmt: skip
def test_architectures_are_those_of_local_gpus_or_of_a_variable(
    checkout, tmp_path, cuda_tools, seen, ours, torchs, archs
):
    write_tool(tmp_path / "bin" / "nvidia-smi", seen)
    cuda_tools["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    cuda_tools |= {"BAGUA_SYNCBN_CUDA_ARCHS": ours, "TORCH_CUDA_ARCH_LIST": torchs}
    status, output, info = decide(checkout, **cuda_tools)
    if archs[0].isdigit():
        assert info["build_cuda_archs"] == archs.split(", ")
        assert f"for compute capability {archs} and PTX for later ones" in output
    else:
        assert re.search(archs, output)
        assert (status != 0) == ("got" in archs)


def commands_of(checkout, **environment):
    """Builds with compilers that only log their arguments. Returns the log's lines, and checks the printed progress."""
    log = checkout / "log"
    write_tool(checkout / "c++", f'echo "$@" >>{log}; echo a compiler')
    nvcc = Path(environment["CUDA_HOME"], "bin", "nvcc")
    nvcc.write_text(nvcc.read_text().replace("|| echo", f'|| echo "$@" >>{log}; echo'))
    status, output, _ = decide(
        checkout, also=["build_ext", "--build-temp", "temp"], CXX=f"{checkout}/c++", **environment
    )
    assert status == 0, output
    lines = [line for line in log.read_text().splitlines() if not line.startswith("--")]
    files = sum(" -c " in line for line in lines)
    assert all(f"bagua_syncbn: compiled {number} of {files}\n" in output for number in range(1, files + 1))
    return lines


@pytest.mark.parametrize(("build", "archs", "ptx"), [
    ("cpu", "80", []), ("cuda", "80;90a", ["90"]), ("cuda", "70;80", ["80"]), ("cuda", "120", ["90"]),
])  # fmt: skip
def test_a_build_compiles_its_sources_with_additional_flags_last_and_ptx_for_newer_gpus(
    checkout, cuda_tools, build, archs, ptx
):
    given = {"BAGUA_SYNCBN_CUDA_ARCHS": archs, "BAGUA_SYNCBN_BUILD": build, "BAGUA_SYNCBN_CXXFLAGS": "-O1"}
    commands = commands_of(checkout, **cuda_tools, **given)
    assert [*{code for line in commands for code in re.findall(r"code=compute_(\w+)", line)}] == ptx
    compiled = [line.split(" -c ")[1].split()[0] for line in commands if " -c " in line]
    paths = (str(path.relative_to(checkout)) for path in checkout.glob("csrc/**/*.c*") if path.suffix != ".cuh")
    expected = {path for path in paths if build == "cuda" or "/cuda/" not in path}
    assert sorted(compiled) == sorted(expected)
    assert all(line.rindex("-O1") > line.index("-O3") for line in commands if ".cpp " in line and " -c " in line)


@pytest.mark.parametrize("folder", ["lib", "."])
def test_a_build_removes_modules_deleted_since_the_last_build_and_no_sources(checkout, folder):
    old = checkout / "bagua_syncbn" / "old.py"
    for change in (old.touch, old.unlink):
        change()
        decide(checkout, also=["build_py", "--build-lib", folder], BAGUA_SYNCBN_BUILD="python")
        built = {path.name for path in checkout.glob(f"{folder}/bagua_syncbn/*.py")}
        assert built == PACKAGE | ({"old.py"} if old.exists() else set())


def test_a_free_threaded_python_gets_no_kernels(checkout, monkeypatch):
    """It has no stable ABI."""
    code = SETUP.replace("get_config_vars()", "get_config_vars()['Py_GIL_DISABLED'] = 1")
    monkeypatch.setitem(globals(), "SETUP", code)
    assert decide(checkout, also=["bdist_wheel"])[2]["build_reason"] == "no Python with the GIL"
    assert [path.name.split("-", 2)[2] for path in checkout.glob("dist/*")] == ["py3-none-any.whl"]


def test_old_setuptools_are_refused_before_they_read_the_project(checkout, monkeypatch):
    code = SETUP.replace("get_config_vars()", "get_config_vars(); setuptools.__version__ = '76.1.0'")
    monkeypatch.setitem(globals(), "SETUP", code)
    checkout.joinpath("pyproject.toml").write_text("[unreadable")
    status, output, _ = decide(checkout)
    assert status != 0
    assert output == "setuptools: expected 77 or later, got 76.1.0; pip install 'setuptools>=77'\n"


def test_a_python_without_the_gil_is_refused():
    code = "import sys; sys._is_gil_enabled = lambda: False; import bagua_syncbn"
    assert "ImportError: bagua_syncbn needs the GIL" in run_fresh(code).stderr


# Imports the copy of a checkout.
KERNELS = """
import sys
sys.path.insert(0, sys.argv[1])
from bagua_syncbn.__main__ import collect_info
print(collect_info()["kernels"])
"""


def test_a_library_built_from_other_sources_is_not_loaded(tmp_path):
    for name in ("bagua_syncbn", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name)
    assert run_fresh(KERNELS, str(tmp_path), BAGUA_SYNCBN_KERNELS="").stdout.startswith("native")
    tmp_path.joinpath("csrc", "changed.h").write_text("// after git pull")
    done = run_fresh(KERNELS, str(tmp_path), BAGUA_SYNCBN_KERNELS="")
    problem = f"bagua_syncbn was not built from the sources in {tmp_path}/csrc: computing in plain torch"
    assert f"RuntimeWarning: {problem}" in done.stderr
    assert done.stdout.startswith(f"reference: {problem}")
    assert done.stdout.endswith("pip install -e .\n")
    tmp_path.joinpath("csrc", "packed_stats.h").unlink()  # in site-packages, csrc would be another package's
    assert run_fresh(KERNELS, str(tmp_path), BAGUA_SYNCBN_KERNELS="").stdout.startswith("native")


@pytest.mark.parametrize(("reason", "warning"), [
    (None, "imported from its sources in .*pip install -e [.]$"),
    ("no torch 2.10 or later", "activate its environment or pass --no-build-isolation[.] Once"),
    ("no torch 2.10 or later and no compiler", "build them in a checkout: pip install -e [.]$"),
    ("no torch 2.10 or later (found 2.9)", "slower. Once these are installed"),
    ("no compiler", "setup.py found no compiler: "),
    ("no working compiler for C++17 (Linux/torch/f.h: error)", "found no working compiler .* slower. Once these are"),
    ("BAGUA_SYNCBN_BUILD=python", None),
    ("no Linux", None),  # nothing helps
], ids=str)  # fmt: skip
def test_an_import_without_kernels_warns_with_a_remedy(tmp_path, reason, warning):
    if reason:
        tmp_path.joinpath("build_info.json").write_text(json.dumps({"build": "python", "build_reason": reason}))
    problem = native._explain_missing_library(tmp_path)
    assert re.search(warning, problem) if warning else problem == ""


def test_tests_without_kernels_run_only_on_request(monkeypatch):
    monkeypatch.setattr(native, "KERNELS", "reference")
    monkeypatch.setattr(native, "WANTED", "native")
    with pytest.raises(pytest.UsageError, match="has no native kernels; run `make test`"):
        conftest.pytest_sessionstart()
    monkeypatch.setattr(native, "WANTED", "reference")
    conftest.pytest_sessionstart()


# Hides modules and functions that Windows (or macOS) lacks, after torch is imported.
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


def test_imports_and_trains_without_posix():
    done = run_fresh(ELSEWHERE, BAGUA_SYNCBN_KERNELS="reference")
    assert done.returncode == 0, done.stderr
