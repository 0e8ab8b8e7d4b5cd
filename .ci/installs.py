"""``python .ci/installs.py [NAME...]``: installs the package in every supported way, imports it and trains.

Each method in :data:`INSTALLS` gets an environment that inherits the running Python's torch. A layer trains outside of
the source folder and inside it, where Python finds the sources first. If the import warns that there are no kernels,
the recommended command runs, and a layer trains again. CPU kernels are built without optimization, CUDA
kernels for one architecture: half a minute per build on two cores, five minutes in total. With sccache in CXX, CPU
kernels are optimized, and built only once.
"""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "bagua_syncbn", "csrc")
SOURCES += ("Makefile", ".ci", "benchmarks", "examples")  # for commands.py
FAST_BUILD = {"BAGUA_SYNCBN_CUDA_ARCHS": "90"}
if "sccache" not in os.environ.get("CXX", ""):  # in .ci/run, the cache has the objects of an optimized build
    FAST_BUILD["BAGUA_SYNCBN_CXXFLAGS"] = "-O0"
NO_COMPILER, OLD_COMPILER = {"CXX": "no-such-compiler"}, {"BAGUA_SYNCBN_CXXFLAGS": "-std=c++11"}

TRAIN = """
import torch, bagua_syncbn
model = bagua_syncbn.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model[1].weight.clone()
for size in (2, 4096):  # on the second the native kernels are faster than torch's
    model(torch.randn(size, 3, 5, 5)).square().mean().backward()
    model[1].weight.grad += 1
    optimizer.step()
assert (model[1].weight - before).abs().min() > 0
assert model[1].num_batches_tracked == 2
print(bagua_syncbn._ops.KERNELS)
"""


class Install(NamedTuple):
    """An installation method: pip's arguments and the expected build."""

    source: str  # "wheel", "sdist", or "folder"
    build: str | None  # expected build: "python", "cpu" or "cuda"; None for the wheel, which is built already
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed
    options: tuple[str, ...] = ("--no-build-isolation",)
    editable: bool = False
    lacks: str = ""  # missing during the build, present later


def force(build: str) -> dict[str, str]:
    return FAST_BUILD | {"BAGUA_SYNCBN_BUILD": build}


NO_KERNELS = "was built without native kernels, because setup.py found no "
HAS_NVCC = bool(shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists())
INSTALLS = {
    "wheel": Install("wheel", None),
    "sdist": Install("sdist", "cpu", force("cpu")),
    "isolated-build": Install("folder", "cpu", force("cpu"), options=()),
    "editable": Install("folder", "cpu", force("cpu"), editable=True),
    "cuda": Install("folder", "cuda", force("cuda")),
    "python": Install("folder", "python", force("python")),
    "editable-python": Install("folder", "python", force("python"), editable=True),
    "no-compiler": Install("folder", "python", NO_COMPILER, lacks="compiler"),
    "old-compiler": Install("folder", "python", OLD_COMPILER, lacks="working compiler for C++17"),
    "no-torch": Install("sdist", "python", {"PATH": os.defpath}, lacks="torch"),
}


def make_environment(directory: Path, with_torch: bool = False) -> tuple[Path, Path]:
    """Creates an environment that inherits this one's packages, optionally torch; returns its Python and torch's
    path."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    python = directory / "bin" / "python"
    query = [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
    folder = Path(subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip())
    others = directory.with_name("others")  # outside of the environment, so that pip does not modify it
    others.mkdir()
    hidden = re.compile(r"bagua_syncbn|__editable__" + ("" if with_torch else r"|torch(-.*)?$"))
    for path in (path for packages in site.getsitepackages() for path in Path(packages).iterdir()):
        if not hidden.match(path.name):
            others.joinpath(path.name).symlink_to(path)
    folder.joinpath("others.pth").write_text(f"{others}\n")
    return python, folder / "torch"


def copy_sources(directory: Path) -> Path:
    built = shutil.ignore_patterns("*.so", "build_info.json", "__pycache__")
    directory.mkdir()
    for name in SOURCES:
        path = ROOT / name
        shutil.copytree(path, directory / name, ignore=built) if path.is_dir() else shutil.copy(path, directory)
    return directory


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    """Runs ``command`` in ``folder``; returns stderr and stdout."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NVCC", "PYTHONPATH")}
    done = subprocess.run(command, cwd=folder, env=inherited | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: expected exit status 0\n{done.stdout}{done.stderr}")
    return done.stderr + done.stdout


def train(python: Path, folder: Path, kernels: str, warning: str = "") -> str:
    """Trains in ``folder`` and returns the output. Checks that kernels and warning begin with the given texts."""
    printed = run([python, "-c", TRAIN], folder)
    assert printed.splitlines()[-1].startswith(kernels), printed
    assert f"RuntimeWarning: bagua_syncbn {warning}" in printed if warning else "RuntimeWarning" not in printed, printed
    return printed


def check(install: Install, directory: Path) -> None:
    """Installs in a new environment in ``directory``, and trains there."""
    python, place_of_torch = make_environment(directory / "environment")
    sources, outside = copy_sources(directory / "sources"), directory / "outside"
    outside.mkdir()
    files = {"wheel": "dist/*.whl", "sdist": "dist/*.tar.gz"}
    what = sources if install.source == "folder" else next(ROOT.glob(files[install.source]))
    if install.lacks != "torch":
        place_of_torch.symlink_to(Path(torch.__file__).parent)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    editable = ["--editable"] if install.editable else []
    run([*pip, *install.options, *editable, what], outside, **install.environment)
    if install.lacks == "torch":
        place_of_torch.symlink_to(Path(torch.__file__).parent)

    info = json.loads(run([python, "-W", "ignore", "-m", "bagua_syncbn"], outside))
    build = info["build"]
    assert build == install.build or (install.build is None and build != "python"), info
    kernels = "reference" if build == "python" else "native"
    printed = train(
        python,
        outside,
        kernels,
        NO_KERNELS + install.lacks if install.lacks else "",
    )
    assert ("cuda" in printed.splitlines()[-1]) == (build == "cuda"), printed
    if install.editable:
        train(python, sources, kernels)
    else:
        train(python, sources, "reference", "was imported from its sources")
    if install.lacks:
        command = re.search("build them in a checkout: pip install (.*)", printed)[1]
        run([*pip, "--no-build-isolation", *command.split()], sources, **force("cpu"))
        train(python, outside, "native")


def main() -> None:
    for name in sys.argv[1:] or INSTALLS:
        install, start = INSTALLS[name], time.monotonic()
        if install.build == "cuda" and not HAS_NVCC:
            print(f"{name}: not tried, there is no nvcc")
            continue
        with tempfile.TemporaryDirectory() as directory:
            check(install, Path(directory))
        print(f"{name}: installs and trains, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
