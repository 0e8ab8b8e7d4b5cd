"""The core works without the extras, and folders depend on each other in one direction only."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import torch
from torch import nn

import bagua_syncbn
from tests.helpers.steps import draw, step
from tests.helpers.workers import run_fresh

PACKAGE = Path(bagua_syncbn.__file__).parent
# Extras: folders that attach to the core from outside. Training over two ranks needs torch's engine in communicators.
EXTRAS = [
    "_reliability", "_cuda", "bagua", "contrib", "data_parallel", "memory", "statistics", "vacancy", "verification",
    "conversion.dry_run",
]  # fmt: skip

# Imports the package as a folder, without running __init__, and trains a converted layer on two forked ranks, in which
# extras cannot be imported.
ALONE = """
import os, sys, types
import torch, torch.distributed as dist
path, store, *extras = sys.argv[1:]
package = types.ModuleType("bagua_syncbn")
package.__path__ = [path]
sys.modules["bagua_syncbn"] = package
sys.modules.update(dict.fromkeys(f"bagua_syncbn.{name}" for name in extras))

def train(rank):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layer = convert_sync_batchnorm(torch.nn.BatchNorm1d(4, dtype=torch.float64))
    own = slice(rank, None, 2)
    for order in (1, 1, 2):
        found = step(layer, draw(6, 4)[own], draw(6, 4, seed=2)[own], order=order)
    dist.destroy_process_group()
    return found["running_var"].tolist(), found["input.grad"].tolist()

import bagua_syncbn.communicators
from bagua_syncbn.conversion import convert_sync_batchnorm
from tests.helpers.steps import draw, step
for rank in range(2):
    if os.fork() == 0:
        sys.stdout.write(f"{rank, train(rank)}\\n")
        sys.stdout.flush()
        os._exit(0)
for _ in range(2):
    os.wait()
"""


def test_a_converted_layer_needs_no_extra(tmp_path):
    for name in EXTRAS:
        path = PACKAGE.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").exists()
    done = run_fresh(ALONE, str(PACKAGE), str(tmp_path / "store"), *EXTRAS)
    assert done.returncode == 0, done.stderr
    found = dict(map(ast.literal_eval, done.stdout.splitlines()))
    assert found.keys() == {0, 1}
    layer = nn.BatchNorm1d(4, dtype=torch.float64)
    for order in (1, 1, 2):
        expected = step(layer, draw(6, 4), order=order)
    for rank in range(2):
        wanted = expected["running_var"], expected["input.grad"][rank::2]
        torch.testing.assert_close(tuple(torch.tensor(each, dtype=torch.float64) for each in found[rank]), wanted)


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


# Rooms that a room must not import, even through others.
APART = {"_ops": {"_groups", "_step"}, "_groups": {"_ops", "_step", "communicators"}, "communicators": {"_ops"}}


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
