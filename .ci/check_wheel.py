"""``python .ci/check_wheel.py dist/NAME.whl dist/NAME.tar.gz``: checks the contents of a wheel and an sdist."""

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Excludes libtorch_cuda, libc10 and libpython, so that the library loads with CPU builds of torch and any Python.
LIBRARIES = re.compile(r"(libtorch_cpu|libstdc\+\+|libm|libgcc_s|libc|ld-linux\S*|librt|libdl|libpthread)\.so")


def printed(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


def check_library(library: Path) -> Iterator[str]:
    for symbol in printed("nm", "-D", "-C", "--undefined-only", library).splitlines():
        if "at::" in symbol or "c10::" in symbol:
            yield f"symbols: expected none from at:: or c10::, got {symbol}"
        # CPU builds of torch lack libtorch_cuda, so its symbols must be weak; device_type_cuda is in libtorch_cpu.
        if re.search(r" U aoti_torch\w*cuda", symbol) and not symbol.endswith("aoti_torch_device_type_cuda"):
            yield f"symbols: expected weak libtorch_cuda symbols, got {symbol}"
    for needed in re.findall(r"NEEDED.*\[(.*)\]", printed("readelf", "-d", library)):
        if not LIBRARIES.match(needed):
            yield f"libraries: expected only libtorch_cpu and system libraries, got {needed}"


def check_wheel(wheel: Path) -> Iterator[str]:
    """Yields the errors in ``wheel``."""
    if not re.search(r"-cp310-abi3-manylinux_\d+_\d+_", wheel.name):
        yield f"name: expected a cp310-abi3 wheel for manylinux, got {wheel.name}"
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for name in {"bagua_syncbn/build_info.json", "bagua_syncbn/py.typed"} - names:
            yield f"contents: expected {name}"
        for name in (name for name in names if ".so" in name and name != "bagua_syncbn/_C.abi3.so"):
            yield f"contents: expected no library except _C, got {name}"
        yield from check_library(Path(archive.extract("bagua_syncbn/_C.abi3.so", directory)))
    audit = subprocess.run([sys.executable, "-m", "abi3audit", "--strict", wheel], capture_output=True, text=True)
    if audit.returncode:
        yield f"abi3audit: {audit.stdout}{audit.stderr}"


def check_sdist(sdist: Path) -> Iterator[str]:
    """Yields the errors in ``sdist``. installs.py tests that it builds and trains."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("bagua_syncbn/**/*.py"), ROOT / "setup.py", ROOT / "LICENSE"]
    for name in {str(path.relative_to(ROOT)) for path in wanted} - names:
        yield f"contents: expected {name}"
    for name in (name for name in names if name.endswith((".so", "build_info.json"))):
        yield f"contents: expected sources only, got {name}"


def main() -> None:
    found = []
    for path in map(Path, sys.argv[1:]):
        problems = check_wheel(path) if path.suffix == ".whl" else check_sdist(path)
        found += [f"{path.name}: {problem}" for problem in problems]
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
