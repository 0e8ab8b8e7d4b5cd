"""Runs the Python blocks of README.md and docs/; checks their links and pictures.

An HTML comment before a block selects how to run it:

    none                           in this process, without a job, in one namespace for all blocks of the page
    <!-- ranks: 2 -->              as a script on two ranks launched by torchrun
    <!-- package: apex -->         like none, with a fake package from tests/helpers/fake_packages.py
    <!-- not run: needs Bagua -->  compile only; bagua_job/test_bagua_docs.py runs it
    <!-- not run: needs CUDA -->   compile only
"""

import copy
import inspect
import json
import os
import re
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn.__main__ import collect_info
from bagua_syncbn.conversion import converters
from tests.helpers.fake_packages import PACKAGES, stand_in_for
from tests.helpers.workers import launched_by_torchrun

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = "```python\n"
BLOCK = re.compile(rf"(?:^<!--\s*(?P<marker>[^\n]*?)\s*-->\s*)?^{FENCE}(?P<source>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")
TWO_RANKS = "ranks: 2"
NEEDS_BAGUA = "not run: needs Bagua"
NOT_RUN = {NEEDS_BAGUA, "not run: needs CUDA"}
PACKAGE = "package: "
WIDTH = 88  # columns of code in the built pages


class Block(NamedTuple):
    name: str
    marker: str | None
    code: CodeType

    @property
    def package(self) -> str | None:
        return self.marker.removeprefix(PACKAGE) if self.marker and self.marker.startswith(PACKAGE) else None


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, match.start("source"))
        # Preceded by empty lines, so that tracebacks show the page's line numbers.
        code = compile("\n" * lines_before + match["source"], str(page), "exec")
        blocks.append(Block(f"{page.name}:{lines_before + 1}", match["marker"], code))
    return blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_of_the_docs_runs_in_one_process(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # for pickle
    monkeypatch.setattr(converters, "_converters", converters._converters.copy())
    for block in read_blocks(page):
        if block.marker is None or block.package:
            with stand_in_for(block.package) if block.package else nullcontext():
                exec(block.code, vars(module))


def run_scripts(ports: list[int], directory: str) -> list[str]:
    """Runs all scripts on each rank, each with its own store, because all use the default group."""
    done, before = [], Path.cwd()
    os.chdir(directory)
    with launched_by_torchrun():
        for block, port in zip(blocks_with(TWO_RANKS), ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            exec(block.code, {"__name__": "__main__"})
            assert not dist.is_initialized(), f"{block.name} leaves its process group behind"
            done.append(block.name)
    os.chdir(before)
    return done


def blocks_with(marker: str) -> list[Block]:
    return [block for page in PAGES for block in read_blocks(page) if block.marker == marker]


def test_each_script_of_the_docs_runs_on_two_ranks(pool, tmp_path):
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in blocks_with(TWO_RANKS)]
    done = pool.run(run_scripts, 2, [store.port for store in stores], str(tmp_path))
    pool.forget_job()
    assert done[0] == done[1] == [block.name for block in blocks_with(TWO_RANKS)] != []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_read_and_fits_the_page_and_linked_files_exist(page):
    text, blocks = page.read_text(encoding="utf-8"), read_blocks(page)
    assert len(blocks) == text.count("```python")
    assert {block.marker for block in blocks} <= {None, TWO_RANKS, *NOT_RUN, *(PACKAGE + name for name in PACKAGES)}
    for target in LINK.findall(text):
        assert (page.parent / target).is_file(), f"{page.name} links to {target}"
    # Wider code scrolls in the built documentation. Printed output (text) wraps.
    fenced = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shown = (source.splitlines() for language, source in fenced if not language.startswith(("text", "{")))
    assert [line for lines in shown for line in lines if len(line) > WIDTH] == []


def test_the_reference_lists_public_names_and_documents_group_arguments_once():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in set(bagua_syncbn.__all__) - {"__version__"}:
        assert re.search(rf"^[.][.] (auto\w+|py:data):: {name}\b", page, re.MULTILINE), name
        public = getattr(bagua_syncbn, name)
        parameters = inspect.signature(public).parameters if callable(public) else {}
        if "process_group" in parameters:
            assert parameters["process_group"].annotation == bagua_syncbn.ProcessGroupLike, name


def test_readme_shows_the_version_and_the_signatures_of_the_layer():
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"({bagua_syncbn.__version__})" in page
    layer = bagua_syncbn.SyncBatchNorm
    for name, function in {"SyncBatchNorm": layer, "forward": layer(1).forward}.items():
        parameters = inspect.signature(function).parameters.values()
        bare = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
        assert f"{name}{bare}" in page


def test_the_installation_page_shows_all_facts_about_an_installation():
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert json.loads(page.split("```json\n")[1].split("```")[0]).keys() == collect_info().keys()


def test_the_picture_of_a_conversion_shows_its_report():
    picture = ElementTree.parse(ROOT / "docs" / "pictures" / "conversion.svg")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.InstanceNorm2d(8))
    report = str(bagua_syncbn.conversion_report(model)).splitlines()
    assert [part.text for part in picture.iter()][-len(report) :] == report


RAISES, STAYS = "raises in the first training step", "unchanged, with a warning"
OF_JOB, OF_SEVERAL = f"{RAISES} in a job", f"{RAISES} over several ranks"


def take_a_step(package, module, name, is_synchronized):
    """Trains an unregistered layer, which is synchronized or raises an error."""
    with stand_in_for(package):
        model = bagua_syncbn.convert_sync_batchnorm(nn.Sequential(getattr(import_module(module), name)(8)))
        refusal = pytest.raises(RuntimeError, match=f"{name}: cannot synchronize this forward")
        with nullcontext() if is_synchronized else refusal:
            model(torch.randn(4, 8, 3, 3))
        assert model[0].num_batches_tracked == is_synchronized


@pytest.mark.parametrize(("package", "module", "name", "unregistered", "options"), [
    *(("apex", "apex.parallel", "SyncBatchNorm", RAISES, {name: True}) for name in ("channel_last", "fuse_relu")),
    ("detectron2", "detectron2.layers", "NaiveSyncBatchNorm", OF_SEVERAL, {}),
    ("fairscale", "fairscale.experimental.nn", "SyncBatchNorm", OF_JOB, {}),
    ("mmcv", "mmcv.ops", "SyncBatchNorm", STAYS, {}),
])  # fmt: skip
def test_layers_of_other_packages_convert_as_documented(
    pool, package, module, name, unregistered, options, monkeypatch
):
    page = ROOT / "docs" / "migrating.md"
    (row,) = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{module}.{name}`")]
    assert row.endswith(f"| {unregistered} |")
    monkeypatch.setattr(converters, "_converters", converters._converters.copy())
    with stand_in_for(package):
        layer, images = getattr(import_module(module), name)(8, **options), torch.randn(2, 4, 8, 3, 8)
        inputs = [images[:1], images] if package == "apex" else [images[:1]]  # apex's layer adds a second tensor
        expected = [copy.deepcopy(layer)(*given) for given in inputs]
        if unregistered == STAYS:
            with pytest.warns(UserWarning, match=name):
                bagua_syncbn.convert_sync_batchnorm(nn.Sequential(layer))
        else:
            take_a_step(package, module, name, unregistered != RAISES)
            pool.run(take_a_step, 1, package, module, name, unregistered == OF_SEVERAL)
            pool.run(take_a_step, 2, package, module, name, False)
        for block in read_blocks(page):
            if block.package == package and "register_converter" in block.code.co_names:
                exec(block.code, {"bagua_syncbn": bagua_syncbn, "nn": nn})
        bagua_syncbn.convert_sync_batchnorm(nn.Sequential(layer))
    assert isinstance(layer, bagua_syncbn.SyncBatchNorm)
    torch.testing.assert_close([layer(*given) for given in inputs], expected)


def run_recipe(package: str) -> dict:
    page = {}
    with stand_in_for(package):
        for block in read_blocks(ROOT / "docs" / "recipes.md"):
            if block.marker is None or block.package == package:
                exec(block.code, page)
    return page


def test_recipes_convert_what_they_train():
    (plugin,) = run_recipe("lightning")["trainer"].plugins
    models = {"lightning": plugin.apply(nn.Sequential(nn.BatchNorm2d(8)))}
    models["detectron2"] = run_recipe("detectron2")["Trainer"].build_model(None)
    trainer = run_recipe("ultralytics")["SyncBNTrainer"]()
    trainer._setup_train()
    models["ultralytics"] = trainer.model
    models["modelopt"] = run_recipe("modelopt")["model"]
    for package, model in models.items():
        assert any(isinstance(layer, bagua_syncbn.SyncBatchNorm) for layer in model.modules()), package
    assert type(plugin.revert(models["lightning"])[0]) is nn.BatchNorm2d
