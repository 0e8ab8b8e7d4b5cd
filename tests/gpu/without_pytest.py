"""Runs tests for a GPU where pytest is missing; knows what they use of it: ``without_pytest.py FILE... [-k WORD]``."""

import inspect
import itertools
import os
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]


class Skipped(Exception):  # noqa: N818
    pass


def skip(reason):
    raise Skipped(reason)


def parametrize(names, values, **_):
    split = names.split(",") if isinstance(names, str) else names

    def mark(function):
        rows = [dict(zip(split, row if len(split) > 1 else [row], strict=True)) for row in values]
        function.rows = [old | row for old, row in itertools.product(getattr(function, "rows", [{}]), rows)]
        return function

    return mark


def value_of(name, module, made):
    """A fixture: of pytest, of conftest.py, or of the module; each is made once."""
    if name not in made:
        if name == "pool":
            made[name] = import_module("workers").WorkerPool()
        elif name == "tmp_path_factory":
            made[name] = SimpleNamespace(mktemp=lambda prefix: Path(tempfile.mkdtemp(prefix=prefix)))
        else:
            function = getattr(module, name)
            made[name] = next(
                function(**{n: value_of(n, module, made) for n in inspect.signature(function).parameters})
            )
    return made[name]


def main():
    fixture = lambda function=None, **_: function or (lambda given: given)  # noqa: E731
    sys.modules["pytest"] = ModuleType("pytest")
    mark = SimpleNamespace(parametrize=parametrize, gpu=None)
    vars(sys.modules["pytest"]).update(mark=mark, fixture=fixture, skip=skip)
    sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "helpers")]
    import torch

    files, word = sys.argv[1:], ""
    if "-k" in files:
        *files, _, word = files
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device" if "FAIL_WITHOUT_CUDA" in os.environ else 0)
    passed, failed, made = 0, 0, {}
    for module in [import_module(Path(file).stem) for file in files]:
        chosen = [function for name, function in vars(module).items() if name.startswith("test_") and word in name]
        for test, row in [(one, row) for one in chosen for row in getattr(one, "rows", [{}])]:
            torch.manual_seed(0)
            try:
                test(
                    **row, **{n: value_of(n, module, made) for n in inspect.signature(test).parameters if n not in row}
                )
                passed += 1
            except Skipped as reason:
                print(f"skipped {test.__name__} {row}: {reason}", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED {test.__name__} {row}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed", flush=True)
    os._exit(min(failed, 1))  # the pool's processes are daemons; destroying a communicator can hang


if __name__ == "__main__":
    main()
