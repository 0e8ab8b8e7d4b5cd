"""Files of results, and the commit that they are of. Needs nothing but Python."""

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def write(results: dict[str, Any], path: Path) -> None:
    """Writes the results with one case to a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {name: value for name, value in results.items() if name != "cases"}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in results["cases"])
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n{lines}\n]}}\n', encoding="utf-8")


def find_commit() -> str | None:
    """Returns the commit that is checked out, and whether the package was changed since; None without a checkout."""

    def git(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    try:
        commit = git("rev-parse", "--short", "HEAD")
        if commit.returncode:
            return None
        changed = git("diff", "--quiet", "HEAD", "--", "bagua_syncbn", "csrc").returncode
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + (" and changes" if changed else "")
