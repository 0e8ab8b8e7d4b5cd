"""The benchmarks run, and the documentation shows the recorded results."""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

if not all(map(find_spec, ("matplotlib", "sklearn"))):  # imported by tests that use them: imports take seconds
    pytest.skip("the benchmarks need more packages: pip install -e '.[bench]'", allow_module_level=True)

import benchmarks.__main__
from bagua_syncbn.communicators import TorchCommunicator
from benchmarks import peers, recorded, report
from benchmarks.recorded import of_section
from benchmarks.sections import SECTIONS, local, stored
from benchmarks.sections.networks import NETWORKS
from tests.helpers.workers import run_fresh

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
RECORDED = {file.name: json.loads(file.read_text()) for file in sorted((ROOT / "benchmarks/results").glob("*.json"))}


def parts_of(chart):
    """Returns the texts of a chart and all coordinates."""
    parts = list(ElementTree.parse(chart).iter())
    places = [place for part in parts for name in "dxy" for place in re.findall(r"[\d.]+", part.get(name, ""))]
    return [(part.tag, (part.text or "").strip()) for part in parts], [float(place) for place in places]


def assert_alike(drawn, kept):
    (texts, places), (kept_texts, kept_places) = parts_of(drawn), parts_of(kept)
    assert texts == kept_texts
    assert places == pytest.approx(kept_places, abs=1)  # versions of matplotlib differ by parts of a pixel


def test_a_run_measures_every_case_and_shows_its_tables(tmp_path):
    from benchmarks import charts

    output, threads = tmp_path / "results.json", torch.get_num_threads()
    arguments = ["--quick", "--seconds", "0.001", "--shapes", "2x3x4x4", "5x6", "--ranks", "2"]
    arguments += ["--sections", "local", "host", "stored", "gpu", "exchange", "layers"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        patch.setattr(sys, "argv", ["benchmarks", *arguments, "--output", str(output)])
        benchmarks.__main__.main()
        over_gloo = peers.find(torch.device("cpu"))[peers.OVER_GLOO](4, 4)
    assert type(over_gloo.process_group) is TorchCommunicator  # and not its subclass with shared memory
    dist.destroy_process_group()  # the section gpu creates it
    torch.set_num_threads(threads)
    results = json.loads(output.read_text())
    inputs = [((2, 3, 4, 4), "planar"), ((2, 3, 4, 4), "interleaved"), ((5, 6), "interleaved")]
    for section in ("local", "gpu"):
        assert {(tuple(c["shape"]), c["layout"]) for c in of_section(results, section)} == set(inputs)
    assert len(of_section(results, "layers")) == 2
    compared = {"ours", peers.OVER_GLOO, "local", "naive"}
    assert all(compared <= set(case["microseconds"]) for case in of_section(results, "layers"))
    assert all(len(samples) >= 3 for case in results["cases"] for samples in case.get("microseconds", {}).values())
    measured = [module for name, module in SECTIONS.items() if name != "training"]
    names = ["machine", *(name for module in measured for name in module.TABLES)]
    assert list(report.tables(results)) == names
    assert all(f"## {name}\n" in shown.getvalue() for name in names)
    assert [path.stem for path in charts.draw_all(results, tmp_path)] == list(charts.CHARTS)


def test_inputs_of_our_kernels_and_of_torch_have_separate_rows():
    sizes = [(layout, least - rest) for layout, least in local.LEAST.items() for rest in (0, 1)]
    cases = [
        {"section": "local", "shape": [size], "layout": layout, "microseconds": {"ours": [number], "torch": [1]}}
        for number, (layout, size) in enumerate(sizes, 1)
    ]
    rows = local.process_table({"cases": cases}).splitlines()[2:]
    assert [[cell.strip() for cell in row.split("|")[2:4]] for row in rows] == [
        ["1", f"{number:.2f} ({number:.2f}-{number:.2f})"] for number in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize(("network", "share"), [
    ("convolution, norm, ReLU", 0.55),
    ("convolution, norm, SiLU", 0.40),
    ("ResNet-50", 0.85),
])  # fmt: skip
def test_networks_store_the_documented_shares(network, share):
    pytest.importorskip(NETWORKS[network].needs)
    batch, models = stored.prepare(network, quick=True)
    assert stored.stored_bytes(models["recomputed"], batch) <= share * stored.stored_bytes(models["plain"], batch)


def test_pages_and_charts_show_the_recorded_results(tmp_path):
    from benchmarks import charts

    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert all(any(f"<!-- begin {name} " in text for text in texts) for name in RECORDED)
    assert [report.update_page(text, RECORDED) for text in texts] == texts
    for results in RECORDED.values():
        charts.draw_all(results, tmp_path)
    kept = ROOT / "docs" / "charts"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in kept.iterdir()}
    for path in tmp_path.iterdir():
        assert_alike(path, kept / path.name)
    assert recorded.where(RECORDED["stored.json"]) in (kept / "stored.svg").read_text("utf-8")


def test_measuring_does_not_need_matplotlib():
    run_fresh("import sys; sys.modules['matplotlib'] = None; import benchmarks.__main__").check_returncode()
