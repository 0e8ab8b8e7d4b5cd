"""``python .ci/commands.py``: runs the commands of README.md and docs/ in a copy of the checkout, page by page.

They run in a new environment that inherits torch and all packages of the running Python, with kernels built as in
installs.py. The script fails if a block fails or runs without kernels.

- ``bash`` blocks run in the checkout.
- ``python`` blocks whose docstring ends with a file name, as in ``\"\"\"torchrun train.py\"\"\"``, are saved to that
  file; the docstring is the command to run.
- ``<!-- printed -->`` before a ``text`` block: the last command must have printed these lines, in any order.
- ``make test`` only runs as ``make -n test``, since ``.ci/run`` runs it; ``git clone`` does not run.
- ``<!-- not run: REASON -->`` before a ``bash`` block: only ``make -n`` for its targets.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from installs import FAST_BUILD, ROOT, copy_sources, make_environment

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"(?:^<!-- (?P<marker>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<source>.*?)^```$", re.M | re.S)
SAVED = re.compile(r'"""(?P<command>[^"\n]*?)(?P<file>\w+\.py)"""\n')


def type_in(checkout: Path, command: str, environment: dict[str, str]) -> str:
    """Runs ``command`` in a shell; returns its output, without a warning about missing kernels."""
    print(f"$ {command.strip()}", flush=True)
    done = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode or "computing in plain torch" in done.stdout:
        raise SystemExit(f"expected exit status 0 and native kernels, got {done.returncode} and\n{done.stdout}")
    return done.stdout


def lines_of(printed: str, shown: list[str]) -> set[str]:
    """Returns the lines of ``printed``; lines that are joined ``shown`` lines are split.

    torchrun's ranks write a line and its newline separately, so two ranks' outputs may end up on the same line.
    """
    one = "|".join(map(re.escape, shown))
    lines = set(printed.splitlines())
    return lines.union(*(re.findall(one, line) for line in lines if re.fullmatch(f"(?:{one})+", line)))


def type_page(page: Path, checkout: Path, environment: dict[str, str]) -> None:
    printed = ""
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        marker, language, source = block["marker"] or "", block["language"], block["source"]
        if language == "bash" and marker.startswith("not run: "):
            for target in re.findall(r"^make (.*)", source, re.M):
                type_in(checkout, f"make -n {target}", environment)
        elif language == "bash":
            source = re.sub(r"^make test\b", "make -n test", re.sub(r"^git clone .*\n", "", source), flags=re.M)
            printed = type_in(checkout, source, environment)
        elif language == "python" and (saved := SAVED.match(source)):
            checkout.joinpath(saved["file"]).write_text(source, encoding="utf-8")
            if saved["command"]:
                printed = type_in(checkout, saved["command"] + saved["file"], environment)
        elif marker == "printed" and not set(source.splitlines()) <= lines_of(printed, source.splitlines()):
            raise SystemExit(f"{page.name} shows\n{source}\nand its command printed\n{printed}")


def main() -> None:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        python, torch = make_environment(Path(folder, "environment"), with_torch=True)
        torch.symlink_to(Path(import_module("torch").__file__).parent)  # for setup.py
        # PATH must not include the other environment's programs.
        for name, module in {"pip": "pip._internal.cli.main", "torchrun": "torch.distributed.run"}.items():
            program = python.with_name(name)
            program.write_text(f"#!{python}\nfrom {module} import main\nmain()\n")
            program.chmod(0o755)
        checkout = copy_sources(Path(folder, "checkout"))
        venv = python.parents[1]
        venv.joinpath("installed-torch").touch()
        given = {"VENV": str(venv), "PATH": f"{python.parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
        left_out = ("PYTHONPATH", "PYTHONUNBUFFERED", "MAKEFLAGS")
        inherited = {name: value for name, value in os.environ.items() if name not in left_out}
        for page in PAGES:
            type_page(page, checkout, inherited | FAST_BUILD | given | {"BAGUA_SYNCBN_CUDA_ARCHS": "native"})
        kernels = type_in(checkout, "python -m bagua_syncbn", inherited | given)
        assert re.search('"kernels": "native', kernels, re.M), kernels
    print(f"commands of the documentation: all run, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
