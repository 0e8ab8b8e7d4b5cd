"""Folders depend on each other in one direction only, and the core on no extra."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import bagua_syncbn

PACKAGE = Path(bagua_syncbn.__file__).parent


def rooms_that_import():
    """Returns the rooms (folders and files of the package) that each room imports, also for annotations."""
    imported = {}
    for path in PACKAGE.rglob("*.py"):
        *folders, name = path.relative_to(PACKAGE).with_suffix("").parts
        room = imported.setdefault((*folders, name)[0], set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                start = [*folders[: len(folders) - node.level + 1], *(node.module or "").split(".")]
                room.update([start[0]] if start[0] else (alias.name for alias in node.names))
    return {room: others - {room} for room, others in imported.items()}


# Rooms that attach to the core from outside.
EXTRAS = {
    "_reliability", "_cuda", "bagua", "contrib", "data_parallel", "memory", "statistics", "vacancy", "verification"
}  # fmt: skip
# Rooms that a room must not import, even through others.
APART = {
    "_ops": {"_groups", "_step"},
    "_groups": {"_ops", "_step", "communicators"},
    "communicators": {"_ops", "conversion"} | EXTRAS,
    "sync_batchnorm": {"communicators", "conversion"} | EXTRAS,
    "conversion": EXTRAS,
}


def test_no_room_imports_a_room_above_it():
    imported = rooms_that_import()
    order = list(TopologicalSorter(imported).static_order())  # raises CycleError
    for room in order:
        imported[room] = imported[room].union(*(imported[other] for other in imported[room]))
    assert not any(others & imported[room] for room, others in APART.items())
    assert order.index("_ops") < order.index("_step") < order.index("sync_batchnorm") < order.index("conversion")


PRIVATE = re.compile(
    r"^[^#\"]*\b((?:torch|dist)(?:\.\w+)*\._[a-zA-Z][\w.]*)|^(from torch[\w.]* import .*\b_[a-zA-Z]\w*)", re.M
)


def test_private_parts_of_torch_are_in_one_folder():
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "_torch"]
    found = {"".join(parts) for path in files for parts in PRIVATE.findall(path.read_text())}
    assert all("torch.nn.modules.batchnorm" in part for part in found)  # base classes that torch documents
