"""The benchmarks: that they run, what they make of samples, and that the documentation shows what was recorded."""

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("sklearn", reason="the benchmarks need scikit-learn: pip install -e '.[bench]'")

import benchmarks.__main__
from benchmarks import docs_pictures, noise, peers, report
from benchmarks.recorded import of_section
from benchmarks.sections import SECTIONS, gpu, stored
from benchmarks.sections.networks import NETWORKS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
RECORDED = {file.name: json.loads(file.read_text()) for file in sorted((ROOT / "benchmarks/results").glob("*.json"))}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Results of a run on tiny inputs, and what was printed."""
    output, threads = tmp_path_factory.mktemp("bench") / "results.json", torch.get_num_threads()
    arguments = ["--quick", "--seconds", "0.001", "--shapes", "2x3x4x4", "5x6", "--ranks", "2", "--default-malloc"]
    arguments += ["--sections", "ops", "local", "host", "stored", "anew", "gpu", "exchange", "layers"]
    arguments += ["--output", str(output)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        patch.setattr(sys, "argv", ["benchmarks", *arguments])
        benchmarks.__main__.main()
    dist.destroy_process_group()  # the section gpu made it
    torch.set_num_threads(threads)
    return json.loads(output.read_text()), shown.getvalue()


def test_every_case_is_measured(smoke):
    results, *_ = smoke
    inputs = [((2, 3, 4, 4), "planar"), ((2, 3, 4, 4), "interleaved"), ((5, 6), "interleaved")]
    for section in ("ops", "local", "gpu"):
        assert {(tuple(c["shape"]), c["layout"]) for c in of_section(results, section)} == set(inputs)
    seen = {(c["ranks"], tuple(c["shape"]), c["layout"]) for c in of_section(results, "layers")}
    assert seen == {(2, *i) for i in (inputs[0], inputs[2])}
    for case in results["cases"]:
        assert all(len(samples) >= 3 for samples in case.get("microseconds", {}).values())


def test_all_peers_are_measured_or_skipped_by_name(smoke):
    results, shown = smoke
    for job in of_section(results, "peers"):
        assert set(job["measured"]) | set(job["skipped"]) == set(peers.MAKERS)
        assert {"ours", "local", "naive"} <= set(job["measured"])
        assert all(job["skipped"].values())
    if not torch.cuda.is_available():
        assert "expected input tensor to be on GPU" in shown  # why torch's layer was skipped, in its own words


def test_what_is_stored_for_backward(smoke):
    shares = {case["network"]: case["bytes"]["recomputed"] / case["bytes"]["plain"] for case in smoke[0]["cases"]
              if case["section"] == "stored"}  # fmt: skip
    assert shares["convolution, norm, ReLU"] <= 0.55
    assert shares["convolution, norm, SiLU"] <= 0.40


@pytest.mark.parametrize(
    ("network", "share"), [("CSP blocks with SiLU", 0.45), ("EfficientNet-B0", 0.50), ("ResNet-50", 0.85)]
)
def test_what_known_networks_store_for_backward(network, share):
    pytest.importorskip(NETWORKS[network].needs or "torch")
    _, batch, models = stored.prepare(network, quick=True)
    assert stored.stored_bytes(models["recomputed"], batch) <= share * stored.stored_bytes(models["plain"], batch)


def test_tables_and_charts_of_a_run(smoke, tmp_path):
    results, shown = smoke
    measured = [module for name, module in SECTIONS.items() if name not in ("compiled", "training")]
    names = ["machine", "peers", *(name for module in measured for name in module.TABLES)]
    assert list(report.tables(results)) == names
    assert all(f"## {name}\n" in shown for name in names)
    drawn = report.draw_all(results, tmp_path)
    assert [path.stem for path in drawn] == list(report.CHARTS)
    another = report.draw_all({**results, "date": "another"}, tmp_path / "another")
    assert all(path.read_text() != other.read_text() for path, other in zip(drawn, another, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there")
def test_torchs_kernels_for_cuda_take_these_arguments():
    """Without a GPU they refuse the device, which they do after they have taken the arguments."""
    inputs = [tuple(torch.randn(2, 2, 4, 3, 5).unbind())]
    calls = gpu.make_ops(inputs, True) | gpu.make_layers(inputs, True)
    dist.destroy_process_group()
    refused = [call for name, call in calls.items() if name.startswith(("aten ", "torch "))]
    assert len(refused) == 6
    for call in refused:
        with pytest.raises(NotImplementedError, match="Could not run 'aten::"):
            call()


def compare_naive():
    x, grad = (torch.randn(3, 4, 5, 5, requires_grad=True) for _ in range(2))
    results = []
    for name in ("ours", "naive"):
        layer = peers.MAKERS[name](4, 4)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y, (x, *layer.parameters()), grad), layer.running_var])
    return [(ours - naive).abs().max().item() for ours, naive in zip(*results, strict=True)]


def test_the_naive_peer_computes_the_same(pool):
    for gaps in pool.run(compare_naive, 2):
        assert max(gaps) < 1e-5


def test_the_pages_and_their_charts_show_what_was_recorded(tmp_path):
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert all(any(f"<!-- begin {name} " in text for text in texts) for name in RECORDED)
    for text in texts:
        assert report.update_page(text, RECORDED) == text
        assert report.update_page(text.replace("| naive", "| other"), RECORDED) == text  # whatever was there
    for results in RECORDED.values():
        report.draw_all(results, tmp_path)
    drawn, kept = ({path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
                   for folder in (tmp_path, ROOT / "docs" / "charts"))  # fmt: skip
    assert drawn == kept


def test_pictures_of_the_documentation_are_drawn_by_their_code(tmp_path):
    docs_pictures.draw_all(tmp_path)
    for picture in tmp_path.iterdir():
        assert picture.read_text("utf-8") == docs_pictures.FOLDER.joinpath(picture.name).read_text("utf-8")


def test_the_page_shows_the_batch_noise_of_the_demo():
    model, images, _ = noise.trained(noise.STEPS)
    found = noise.noise(model, images)
    assert f"```text\n{found.at(2)}\n```" in (ROOT / "docs" / "verification.md").read_text("utf-8")
    assert found.svg() == (ROOT / "docs" / "pictures" / "noise.svg").read_text("utf-8")


def test_pictures_are_small_and_follow_the_mode_of_the_reader():
    for picture in (ROOT / "docs").rglob("*.svg"):
        text = picture.read_text(encoding="utf-8")
        assert len(text) < 20_000, picture
        assert "prefers-color-scheme:dark" in text, picture
        assert ElementTree.fromstring(text).tag.endswith("svg")
