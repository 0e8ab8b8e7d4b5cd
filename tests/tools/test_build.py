"""What setup.py decides to build, by the tools that are there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def decide(checkout, **environment):
    """Builds all but the library; returns the exit status, the output and what was recorded."""
    result = subprocess.run(
        [sys.executable, "setup.py", "build_py", "--build-lib", "lib"],
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


def test_with_all_tools(checkout):
    status, output, info = decide(checkout)
    assert status == 0
    assert f"bagua_syncbn: {info['build']} build: {info['build_reason']}" in output
    assert info["build"] in ("cpu", "cuda")
    assert info["build_torch"]
    assert info["build_compiler"]


def test_without_a_compiler(checkout):
    status, _, info = decide(checkout, PATH="/nowhere", CUDA_HOME="/nowhere")
    assert status == 0
    assert (info["build"], info["build_reason"]) == ("python", "found without compiler")
    assert info["build_compiler"] is None


@pytest.fixture
def launcher(tmp_path):
    """A command that runs the one after it, under the name of a compiler cache."""
    path = tmp_path / "bin" / "ccache"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\n[ "$1" != --version ] || echo a cache\nexec "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_launcher_before_the_compiler(checkout, launcher):
    _, _, expected = decide(checkout, CXX="g++", BAGUA_SYNCBN_BUILD="cpu")
    status, _, info = decide(checkout, CXX=f"{launcher} g++ -m64", BAGUA_SYNCBN_BUILD="cpu")
    assert status == 0
    assert info == expected
    status, output, _ = decide(checkout, CXX=f"{launcher} no-such-compiler", BAGUA_SYNCBN_BUILD="cpu")
    assert status != 0
    assert "expected to find compiler" in output


def test_without_nvcc(checkout):
    (checkout / "csrc" / "cuda").mkdir(exist_ok=True)
    (checkout / "csrc" / "cuda" / "some.cu").touch()
    status, _, info = decide(checkout, NVCC="no-such-nvcc", CUDA_HOME="/nowhere")
    assert status == 0
    assert (info["build"], info["build_reason"]) == ("cpu", "found without nvcc")


def test_asked_for_python(checkout):
    status, _, info = decide(checkout, BAGUA_SYNCBN_BUILD="python")
    assert status == 0
    assert (info["build"], info["build_reason"]) == ("python", "BAGUA_SYNCBN_BUILD=python")


TRAIN = """
import torch, bagua_syncbn
layer = bagua_syncbn.SyncBatchNorm2d(3)
layer(torch.randn(4, 3, 5, 5, requires_grad=True)).square().sum().backward()
assert layer.weight.grad.abs().sum() > 0
print(bagua_syncbn.ops.KERNELS)
"""


def run_python(*arguments, folder, **environment):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )


def test_a_pure_python_installation_trains(checkout, tmp_path):
    shutil.copytree(
        ROOT / "bagua_syncbn",
        checkout / "bagua_syncbn",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("_C.*.so", "build_info.json", "__pycache__"),
    )
    status, output, _ = decide(checkout, BAGUA_SYNCBN_BUILD="python")
    assert status == 0, output
    outside = tmp_path / "outside"
    outside.mkdir()
    trained = run_python("-W", "error", "-c", TRAIN, folder=outside, PYTHONPATH=str(checkout / "lib"))
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.strip() == "reference"
    info = run_python("-m", "bagua_syncbn.info", folder=outside, PYTHONPATH=str(checkout / "lib"))
    assert info.returncode == 0, info.stderr
    assert "BAGUA_SYNCBN_BUILD=python" in info.stdout
    # In the checkout the sources come before what was installed.
    trained = run_python("-c", TRAIN, folder=checkout, PYTHONPATH=str(checkout / "lib"))
    assert trained.returncode == 0, trained.stderr
    assert "was imported from its sources" in trained.stderr
    assert "pip install -e" in trained.stderr


def test_an_editable_installation_without_kernels_removes_those_of_an_earlier_one(checkout):
    package = checkout / "bagua_syncbn"
    (package / "_C.abi3.so").touch()
    code = "import setuptools.build_meta as backend, sys; backend.build_editable(sys.argv[1])"
    environment = os.environ | {"BAGUA_SYNCBN_BUILD": "python"}
    subprocess.run([sys.executable, "-c", code, str(checkout)], cwd=checkout, env=environment, check=True)
    assert not (package / "_C.abi3.so").exists()
    assert json.loads((package / "build_info.json").read_text())["build"] == "python"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"BAGUA_SYNCBN_BUILD": "cpu", "CXX": "no-such-compiler"}, "BAGUA_SYNCBN_BUILD=cpu: expected to find compiler"),
        ({"BAGUA_SYNCBN_BUILD": "cuda", "NVCC": "no-such-nvcc", "CUDA_HOME": "/nowhere"}, "expected to find nvcc"),
        ({"BAGUA_SYNCBN_BUILD": "gpu"}, "BAGUA_SYNCBN_BUILD: expected one of python, cpu, cuda, got 'gpu'"),
    ],
)
def test_what_is_asked_for_and_missing_is_named(checkout, environment, message):
    status, output, info = decide(checkout, **environment)
    assert status != 0
    assert message in output
    assert info == {}


@pytest.mark.skipif(not (shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()), reason="needs nvcc")
def test_cuda_sources_are_compiled_beside_a_torch_without_cuda(checkout, launcher):
    (checkout / "csrc" / "cuda").mkdir(exist_ok=True)
    source = "__global__ void k(float* x) { x[0] = 1; }\nvoid launch(float* x) { k<<<1, 1>>>(x); }\n"
    (checkout / "csrc" / "cuda" / "added.cu").write_text(source)
    shutil.copytree(ROOT / "bagua_syncbn", checkout / "bagua_syncbn", dirs_exist_ok=True)
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-lib", "lib"],
        cwd=checkout,
        env=os.environ
        | {"BAGUA_SYNCBN_BUILD": "cuda", "BAGUA_SYNCBN_CUDA_ARCHS": "90", "BAGUA_SYNCBN_CXXFLAGS": "-O1"}
        | {"CXX": f"{launcher} g++"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    code = "import torch, bagua_syncbn._C as c; from bagua_syncbn import ops; print(c.__file__, ops.KERNELS)"
    # From an empty directory, so that what is imported is what was built.
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout / "csrc",
        env=os.environ | {"PYTHONPATH": str(checkout / "lib")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(checkout / "lib") in loaded.stdout
    assert loaded.stdout.strip().endswith(", cuda")
    # Of libtorch_cuda nothing is needed: what is wanted of it is wanted weakly.
    (library,) = (checkout / "lib").rglob("_C.*.so")
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    strong = [line.split()[-1] for line in symbols.stdout.splitlines() if line.split()[0] == "U"]
    assert [name for name in strong if "cuda" in name] == ["aoti_torch_device_type_cuda"]  # in libtorch_cpu
    assert " w aoti_torch_get_current_cuda_stream" in symbols.stdout
    info = json.loads((checkout / "lib" / "bagua_syncbn" / "build_info.json").read_text())
    assert info["build"] == "cuda"
    assert "release" in info["build_nvcc"]
    assert info["build_cuda_archs"] == ["90"]
