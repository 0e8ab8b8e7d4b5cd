"""The core knows nothing of the extras: what the layer imports, and a layer that trains without them."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import bagua_syncbn

PACKAGE = Path(bagua_syncbn.__file__).parent
# Folders and files that attach to the core from outside.
OUTSIDE = (
    *("agreement", "communicators", "cuda", "extras", "conversion", "data_parallel", "verification", "contrib"),
    *("dry_run", "sharded", "vacancy", "with_bagua", "models", "sync_group"),
)
# All of these but torch's engine, which a layer needs to train over two ranks.
HIDDEN = (
    *(name for name in OUTSIDE if name != "communicators"),
    *("communicators.bagua", "communicators.hosts", "communicators.shared"),
)


def imported_by(module):
    """Returns the modules of this package that ``module`` imports, also within functions, and their parents."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    is_package = path.is_dir()
    package = module.split(".") if is_package else module.split(".")[:-1]
    found = {".".join(package[:depth]) for depth in range(2, len(package) + 1)}
    for node in ast.walk(ast.parse((path / "__init__.py" if is_package else path.with_suffix(".py")).read_text())):
        if isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else node.module
            found |= {base, *(f"{base}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    names = (name for name in found if name.startswith(f"{PACKAGE.name}."))
    paths = {name: PACKAGE.joinpath(*name.split(".")[1:]) for name in names}
    return {name for name, path in paths.items() if path.is_dir() or path.with_suffix(".py").exists()}


def reached_from(module):
    reached, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imported_by(name)
    return reached


def test_nothing_that_the_layer_imports_imports_an_extra():
    reached = reached_from("bagua_syncbn.sync_batchnorm")
    assert "bagua_syncbn.step.normalize" in reached
    assert not [name for name in reached if name.split(".")[1] in OUTSIDE]
    for name in HIDDEN:
        path = PACKAGE.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").exists()


PAIRS = "ops groups", "ops step", "groups ops", "groups step", "groups communicators", "communicators ops"


@pytest.mark.parametrize("pair", PAIRS)
def test_ops_communicators_and_the_exchange_depend_in_one_direction(pair):
    room, other = (f"bagua_syncbn.{name}" for name in pair.split())
    assert not [name for name in reached_from(room) if name == other or name.startswith(f"{other}.")]


def test_only_three_places_name_bagua():
    named = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.name.partition(".")[0] == "bagua" for name in node.names)
    }
    assert named <= {"communicators", "with_bagua.py", "contrib", "models.py", "conversion", "info.py"}


# A process of its own for each rank, in which the package is a folder without its __init__ and the hidden parts.
ALONE = """
import sys, types
import torch, torch.distributed as dist
rank, store, folder, *hidden = sys.argv[1:]
package = types.ModuleType("bagua_syncbn")
package.__path__ = [folder]
sys.modules["bagua_syncbn"] = package
sys.modules.update(dict.fromkeys(f"bagua_syncbn.{name}" for name in hidden))
import bagua_syncbn.communicators
from bagua_syncbn.sync_batchnorm import SyncBatchNorm1d
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
torch.manual_seed(0)
whole, grad_output = torch.randn(2, 6, 4, dtype=torch.float64)
layer = SyncBatchNorm1d(4, dtype=torch.float64)
input = whole[int(rank) :: 2].clone().requires_grad_()
for _ in range(3):
    layer(input).backward(grad_output[int(rank) :: 2])
(slope,) = torch.autograd.grad(layer(input), input, grad_output[int(rank) :: 2], create_graph=True)
slope.square().sum().backward()
print(layer.running_var.tolist(), input.grad.tolist(), flush=True)
dist.destroy_process_group()
"""


def test_a_layer_trains_over_ranks_without_the_extras(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(ALONE)]
    ends = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(PACKAGE), *HIDDEN], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    found = [ast.literal_eval(f"[{end.communicate(timeout=300)[0].decode().replace('] [', '], [')}]") for end in ends]
    torch.manual_seed(0)
    whole, grad_output = torch.randn(2, 6, 4, dtype=torch.float64)
    layer = nn.BatchNorm1d(4, dtype=torch.float64)
    for _ in range(3):
        layer(whole.requires_grad_()).backward(grad_output)
    (slope,) = torch.autograd.grad(layer(whole), whole, grad_output, create_graph=True)
    slope.square().sum().backward()
    for rank, (running_var, grad) in enumerate(found):
        torch.testing.assert_close(torch.tensor(running_var, dtype=torch.float64), layer.running_var)
        torch.testing.assert_close(torch.tensor(grad, dtype=torch.float64), whole.grad[rank::2])


# In a process of its own, because tests import these modules too.
ATTACHED = """
import bagua_syncbn
from bagua_syncbn import errors, functional
from bagua_syncbn.agreement import history
from bagua_syncbn.communicators import c10d
from bagua_syncbn.groups import engines
from bagua_syncbn.step import exchange
for attached in (
    functional.first_call_checks, functional.special_inputs, exchange.exchange_makers, errors.error_handlers,
    c10d.transports, history.first_message_hooks,
):
    print(*(one.__module__.removeprefix("bagua_syncbn.") for one in attached))
print(*(engine.__name__.removeprefix("bagua_syncbn.") for engine in engines))
"""


def test_an_import_attaches_all_that_works_without_being_called():
    attached = subprocess.run([sys.executable, "-c", ATTACHED], capture_output=True, text=True, check=True).stdout
    assert attached.splitlines() == [
        "cuda",
        "sharded",
        "agreement.exchanges",
        "agreement.errors",
        "communicators.shared communicators.hosts",
        "extras.watch",
        "communicators.torch_engine communicators.bagua",
    ]


def private_parts_in(path):
    """Yields the private parts of torch that a file uses, by an import or as an attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute) and node.attr != "__dict__":
            names = [ast.unparse(node)]
        for name in names:
            root, *parts = name.split(".")
            if root in ("torch", "dist") and any(part.startswith("_") and not part.endswith("__") for part in parts):
                yield name


# Base classes of batch normalization, which torch's own documentation names; parts of ProcessGroup's backends.
ALLOWED = ("torch.nn.modules.batchnorm._BatchNorm", "torch.nn.modules.batchnorm._NormBase")


def test_private_parts_of_torch_are_in_one_folder():
    found = {path: set(private_parts_in(path)) - {*ALLOWED} for path in PACKAGE.rglob("*.py")}
    use_them = [path for path, parts in found.items() if parts]
    assert {path.parent for path in use_them} == {PACKAGE / "torch_internals"}
