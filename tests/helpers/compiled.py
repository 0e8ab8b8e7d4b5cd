"""A cache of compiled objects in build/tests, by the contents of their sources: the next run finds them there."""

import fcntl
import hashlib
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "tests"
KEPT = 14 * 24 * 3600  # seconds after the last use


@cache
def version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def compile_once(command: Sequence[str], source: Path, trees: Sequence[Path]) -> Path:
    """Returns the object of ``source``, or the header precompiled; beside it, in a .txt, lies what the compiler said.

    Args:
        command: the compiler and its flags.
        source: the file.
        trees: the folders with all headers that it includes, but for those of the system and what lies in a folder
            cpu/; where they lie does not matter.
    """
    text = "\n".join([version(command[0]), *command, source.name])
    for number, tree in enumerate(trees):
        text = text.replace(str(tree), f"<{number}>")
    digest = hashlib.sha256(text.encode())
    for path in (path for tree in trees for path in sorted(tree.rglob("*.*"))):
        if path == source or (path.suffix not in (".cpp", ".cu") and "cpu" not in path.parts):
            digest.update(path.name.encode() + path.read_bytes())
    target = PLACE / f"{source.stem}-{digest.hexdigest()[:20]}{'.gch' if source.suffix == '.h' else '.o'}"
    PLACE.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
        if not target.exists():
            _compile(command, source, target)
    target.touch()
    return target


def _compile(command: Sequence[str], source: Path, target: Path) -> None:
    for old in PLACE.iterdir():
        if old.stat().st_mtime < time.time() - KEPT:
            old.unlink(missing_ok=True)
    unfinished = target.with_suffix(".part")
    result = subprocess.run([*command, str(source), "-o", str(unfinished)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    target.with_suffix(".txt").write_text(result.stderr)
    unfinished.replace(target)
