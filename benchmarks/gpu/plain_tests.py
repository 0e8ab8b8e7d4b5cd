"""Runs files of tests where there is no pytest: ``plain_tests.py FILE...``. Knows as much of pytest as they use.

That is parameters, fixtures of a module, ``pool`` of the tests' conftest.py, ``raises`` and ``skip``.
"""

import functools
import importlib.util
import inspect
import itertools
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Skipped(Exception):  # noqa: N818
    pass


def skip(reason: str) -> None:
    raise Skipped(reason)


def parametrize(names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
    """Remembers what to call the function with, in the order that pytest takes."""
    split = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)

    def mark(function: Any) -> Any:
        rows = [dict(zip(split, row if len(split) > 1 else [row], strict=True)) for row in values]
        function.rows = [old | row for row, old in itertools.product(rows, getattr(function, "rows", [{}]))]
        return function

    return mark


def fixture(function: Any = None, **_: Any) -> Any:
    if function is None:
        return fixture
    function.is_fixture = True
    return function


@contextmanager
def raises(kind: Any, match: str = "") -> Iterator[Any]:
    caught = SimpleNamespace(value=None)
    try:
        yield caught
    except kind as error:
        caught.value = error
        if not re.search(match, str(error)):
            raise
    else:
        raise AssertionError(f"nothing raised {kind}")


def make_pytest() -> ModuleType:
    module = ModuleType("pytest")
    mark = SimpleNamespace(parametrize=parametrize, gpu="gpu")
    names = {"mark": mark, "fixture": fixture, "raises": raises, "skip": skip, "__file__": __file__}
    vars(module).update(names)
    return module


class Fixtures:
    """Those of a module and the few of pytest and conftest.py, made when they are first asked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._made, self._open = module, {}, []  # type: ignore[var-annotated]

    def get(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        if name == "tmp_path_factory":
            return SimpleNamespace(mktemp=lambda prefix: Path(tempfile.mkdtemp(prefix=prefix)))
        if name == "pool":
            from workers import WorkerPool

            pool = WorkerPool()
            self._open.append(pool.close)
            return pool
        function = getattr(self._module, name)
        value = function(**{needed: self.get(needed) for needed in inspect.signature(function).parameters})
        if inspect.isgenerator(value):
            self._open.append(functools.partial(next, value, None))
            return next(value)
        return value

    def close(self) -> None:
        while self._open:
            self._open.pop()()


def run_file(path: Path) -> tuple[int, int]:
    """Returns how many tests passed and failed."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module  # where the ranks of a pool look for their functions
    sys.path.insert(0, str(path.parent))
    specification.loader.exec_module(module)
    import torch

    if getattr(module, "pytestmark", None) == "gpu" and not torch.cuda.is_available():
        print(f"{path.name}: torch sees no CUDA device")
        return 0, int("FAIL_WITHOUT_CUDA" in os.environ)
    passed = failed = 0
    fixtures = Fixtures(module)
    for name, test in list(vars(module).items()):
        if not name.startswith("test_"):
            continue
        for row in getattr(test, "rows", [{}]):
            torch.manual_seed(0)
            said = f"{name} {row or ''}"
            try:
                needed = [n for n in inspect.signature(test).parameters if n not in row]
                test(**row, **{n: fixtures.get(n) for n in needed})
            except Skipped as reason:
                print(f"skipped {said}: {reason}", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED {said}\n{traceback.format_exc()}", flush=True)
            else:
                passed += 1
    fixtures.close()
    return passed, failed


def main() -> None:
    sys.modules["pytest"] = make_pytest()
    sys.path += [str(ROOT / "tests" / "helpers"), str(ROOT)]
    results = [run_file(Path(path).resolve()) for path in sys.argv[1:]]
    passed, failed = (sum(counts) for counts in zip(*results, strict=True))
    print(f"{passed} passed, {failed} failed")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
