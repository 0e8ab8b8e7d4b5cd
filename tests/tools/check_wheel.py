"""``python tests/tools/check_wheel.py dist/NAME.whl``: the promises of the one wheel, read from the file."""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def undefined_symbols(library: Path) -> list[str]:
    lines = subprocess.run(["nm", "-D", "-C", "--undefined-only", library], capture_output=True, text=True, check=True)
    return [line.split(maxsplit=1)[1] for line in lines.stdout.splitlines()]


def needed_libraries(library: Path) -> list[str]:
    lines = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"NEEDED.*\[(.*)\]", lines)


def check(wheel: Path) -> list[str]:
    """Returns what is wrong with ``wheel``."""
    problems = []
    if "-cp310-abi3-" not in wheel.name:
        problems.append(f"name: expected a cp310-abi3 wheel, got {wheel.name}")
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if "bagua_syncbn/build_info.json" not in names or "bagua_syncbn/py.typed" not in names:
            problems.append("contents: expected build_info.json and py.typed, got neither or one of them")
        library = Path(archive.extract("bagua_syncbn/_C.abi3.so", directory))
        for symbol in undefined_symbols(library):
            if "at::" in symbol or "c10::" in symbol:
                problems.append(f"symbols: expected none of at:: and c10::, got {symbol}")
        for needed in needed_libraries(library):
            # Not libtorch_cuda, libc10 or libpython: the file loads beside a torch without CUDA, and any Python.
            if not re.match(
                r"(libtorch_cpu|libstdc\+\+|libm|libgcc_s|libc|ld-linux\S*|librt|libdl|libpthread)\.so", needed
            ):
                problems.append(f"libraries: expected libtorch_cpu and those of the system, got {needed}")
    audit = subprocess.run([sys.executable, "-m", "abi3audit", "--strict", wheel], capture_output=True, text=True)
    if audit.returncode:
        problems.append(f"abi3audit: {audit.stdout}{audit.stderr}")
    return problems


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    sys.exit("\n".join(found) if found else 0)
