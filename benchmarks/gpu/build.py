"""Builds the package into a folder by setup.py, whatever setuptools there is, or none: ``build.py FOLDER``.

Old ones cannot read pyproject.toml, and Python 3.12 brings none. Of setuptools, setup.py needs four names to compile.
"""

import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path()


class Command:
    """What the commands of setup.py use of those of setuptools."""

    editable_mode = False
    build_lib = str(TARGET)

    def spawn(self, command: list[str]) -> None:
        subprocess.run(command, check=True)

    def get_ext_fullpath(self, name: str) -> str:
        return str(TARGET / f"{name.replace('.', '/')}.abi3.so")

    def run(self) -> None:
        package = ROOT / "bagua_syncbn"
        shutil.rmtree(TARGET / package.name, ignore_errors=True)
        shutil.copytree(package, TARGET / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def setup(ext_modules: list[Any], cmdclass: dict[str, Any], **_: Any) -> None:
    cmdclass["build_py"]().run()
    for extension in ext_modules:
        cmdclass["build_ext"]().build_extension(extension)


def extension(name: str, sources: list[str], **_: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, sources=sources)


def stand_in(name: str, **names: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(names)


def main() -> None:
    stand_in("setuptools", setup=setup, Extension=extension)
    stand_in("setuptools.command")
    stand_in("setuptools.command.build_ext", build_ext=Command)
    stand_in("setuptools.command.build_py", build_py=Command)
    # setup.py looks for torch where packages are installed; this Python may have it elsewhere.
    found, original = PathFinder.find_spec("torch"), sysconfig.get_path
    if found is not None and found.origin is not None:
        packages = str(Path(found.origin).parents[1])
        sysconfig.get_path = lambda key, *rest: packages if key == "platlib" else original(key, *rest)
    runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")


if __name__ == "__main__":
    main()
