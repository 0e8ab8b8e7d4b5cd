"""The benchmarks: that they run, what they make of samples, and that the documentation shows what was recorded."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tqdm", reason="the benchmarks need tqdm: pip install -e '.[demo]'")

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables, rounds = load("tables"), load("rounds")
RECORDED = {file.name: json.loads(file.read_text()) for file in sorted((BENCHMARKS / "results").glob("*.json"))}


def run(*arguments):
    command = [sys.executable, BENCHMARKS / "cpu.py", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    output = tmp_path_factory.mktemp("bench") / "smoke" / "cpu.json"
    shown = run("--quick", "--shapes", "2x3x4x4", "5x6", "--seconds", "0.001", "--output", output)
    return output, shown


def test_every_case_is_measured(smoke):
    results = json.loads(smoke[0].read_text())
    sections = ("ops", "local", "ranks")
    threads = {name: {case["threads"] for case in results["cases"] if case["section"] == name} for name in sections}
    seen = {(c["section"], tuple(c["shape"]), c["layout"], c["threads"]) for c in results["cases"]}
    inputs = [((2, 3, 4, 4), "planar"), ((2, 3, 4, 4), "interleaved"), ((5, 6), "interleaved")]
    assert seen == {(s, *i, t) for s in sections for i in inputs for t in threads[s]}
    assert all(1 in counts for counts in threads.values())
    for case in results["cases"]:
        counts = {len(samples) for samples in case["microseconds"].values()}
        assert len(counts) == 1
        assert counts.pop() + case["dropped"] >= 3
        assert all(sample > 0 for samples in case["microseconds"].values() for sample in samples)


def test_the_report_of_a_file_is_what_the_run_has_shown(smoke):
    output, shown = smoke
    report = run("--report", output)
    assert report.removeprefix(f"# {output.name}\n\n").strip() in shown
    assert all(f"## {name}\n" in report for name in tables.TABLES)


def test_small_inputs_are_said_to_be_left_to_torch(smoke):
    local = [case for case in json.loads(smoke[0].read_text())["cases"] if case["section"] == "local"]
    assert {case["path"] for case in local} == {"F.batch_norm"}


def make_case(section, shape, layout, **microseconds):
    return {
        "section": section,
        "shape": shape,
        "layout": layout,
        "threads": 1,
        "path": "ops",
        "microseconds": microseconds,
        "faults": 0,
        "dropped": 0,
        "foreign_cores": 0.0,
    }


def rows(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_ops_are_compared_with_copying_the_bytes_they_move():
    case = make_case(
        "ops",
        [1, 1000, 1000],
        "planar",
        copy=[100.0] * 3,
        stats=[50.0] * 3,
        elemt=[90.0, 100.0, 150.0],
        backward_reduce=[126.0] * 3,
        backward_elemt=[225.0] * 3,
    )
    results = {"machine": {"last_level_cache": 7_999_999}, "cases": [case]}
    header, _, row = rows(tables.ops_table(results))
    cells = dict(zip(header, row, strict=True))
    assert cells["stats"] == "*1.00 (1.00; 1.00-1.00)*"  # 4 MB are less than the cache
    assert cells["elemt"] == "1.00 (0.90; 0.95-1.25)"
    assert cells["backward_reduce"] == "**1.26** (1.26; 1.26-1.26)"
    assert cells["backward_elemt"] == "**1.50** (1.50; 1.50-1.50)"
    assert cells["copy, GB/s"] == "80"
    (summary,) = rows(tables.summary(results))[2:]
    assert summary[1:] == ["1 of 3", "1.00 to 1.50", "none"]


@pytest.mark.parametrize(
    ("shape", "layout", "bound", "over"),
    [
        ([10, 100, 1000], "planar", "0.25", "+0.25"),
        ([10, 100, 1000], "interleaved", "0.4", "+0.10"),
        ([10, 100, 999], "planar", "0.8", "met"),
        ([10, 100, 999], "interleaved", "0.8", "met"),
    ],
)
def test_the_step_of_one_process_is_compared_with_torch_and_with_moving_its_bytes(shape, layout, bound, over):
    case = make_case("local", shape, layout, ours=[500.0] * 2, torch=[1000.0] * 2, copy=[75.0] * 2)
    header, _, row = rows(tables.local_table({"cases": [case]}))
    cells = dict(zip(header, row, strict=True))
    assert (cells["bound"], cells["over"]) == (bound, over)
    assert cells["ours / torch"].replace("*", "") == "0.50 (0.50; 0.50-0.50)"
    assert ("**" in cells["ours / torch"]) == (over != "met")
    assert (cells["floor / torch"], cells["ours / floor"]) == ("0.30", "1.67")


@pytest.mark.parametrize("peer", [True, False])
@pytest.mark.parametrize("bounded", [True, False])
def test_synced_layers_are_compared_from_a_size_on_and_with_the_peer_if_it_is_there(peer, bounded):
    times = {"ours": [610.0], "unsynced": [1000.0], "copy": [100.0], "collectives": [50.0]}
    if peer:
        times["fairscale"] = [6100.0]
    case = make_case("ranks", [15, 100, 1000 if bounded else 999], "planar", **times)
    _, _, row = rows(tables.ranks_table({"cases": [case]}))
    assert row[3:5] == (["**0.61** (0.61; 0.61-0.61)", "+0.01"] if bounded else ["0.61 (0.61; 0.61-0.61)", ""])
    met = ["0.10 (0.10; 0.10-0.10)", "met" if bounded else ""]
    assert row[5:7] == (met if peer else ["not installed", ""])
    assert row[7] == "0.45"


def test_rounds_that_mapped_memory_are_dropped_unless_nearly_all_did():
    quiet, faulty = rounds.Round({"copy": 1e-6}, 0), rounds.Round({"copy": 9e-6}, 500)
    assert rounds.record([quiet, faulty, quiet], True) == {
        "microseconds": {"copy": [1.0, 1.0]},
        "faults": 0,
        "dropped": 1,
    }
    assert rounds.record([quiet, faulty, quiet], False)["microseconds"]["copy"] == [1.0, 9.0, 1.0]
    assert rounds.record([faulty] * 3 + [quiet], True) == {
        "microseconds": {"copy": [9.0, 9.0, 9.0, 1.0]},
        "faults": 500,
        "dropped": 0,
    }


def test_rounds_of_ranks_are_averaged():
    own, other = rounds.Round({"copy": 1.0, "ours": 4.0}, 1), rounds.Round({"copy": 3.0, "ours": 4.0}, 2)
    assert rounds.merge([[own], [other]]) == [rounds.Round({"copy": 2.0, "ours": 4.0}, 3)]


def test_rounds_run_forwards_and_backwards_by_turns():
    calls = []
    workload = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    measured = rounds.run(workload, rounds.Plan({"a": 2, "b": 1}, 2), lambda: None)
    assert "".join(calls) == 2 * "aabbaa"  # the first time to warm up
    assert len(measured) == 2


def test_the_least_disturbed_attempt_counts():
    def quietest(loads, attempts=4, waits=(True,) * 9):
        rest, answers = iter(loads), iter(waits)
        result = rounds.quietest(lambda: {"foreign_cores": next(rest)}, attempts, lambda: next(answers))
        return result["foreign_cores"], list(rest)

    assert quietest([0.0, 1.0]) == (0.0, [1.0])
    assert quietest([1.0, 0.5, 0.7, 0.6, 0.0]) == (0.5, [0.0])
    assert quietest([1.0, 0.5, 0.0], waits=(True, False)) == (0.5, [0.0])
    assert quietest([None, 1.0]) == (None, [1.0])


def test_a_run_does_not_wait_forever_for_others(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(rounds.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(rounds.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(rounds.Load, "foreign_cores", lambda self, own_seconds: 1.0)
    patience = rounds.Patience(5.0, at_a_time=3.0)
    assert [(patience.wait(), clock[0]) for _ in range(3)] == [(True, 3.0), (True, 5.0), (False, 5.0)]


def test_the_page_shows_what_was_recorded():
    text = PAGE.read_text(encoding="utf-8")
    assert RECORDED
    assert all(f"<!-- begin {name} " in text for name in RECORDED)
    assert tables.update_page(text, RECORDED) == text


def test_tables_of_a_page_are_replaced_where_their_results_are_given():
    results = {"cases": [make_case("local", [2, 3, 4], "planar", ours=[1.0], torch=[1.0], copy=[1.0])]}
    block = "<!-- begin cpu.json local -->\nold\n<!-- end -->\n"
    text = f"before\n{block}between\n{block.replace('cpu.json', 'other.json')}after\n"
    updated = tables.update_page(text, {"cpu.json": results})
    assert updated == text.replace("old", f"\n{tables.local_table(results)}\n", 1)
    assert tables.update_page(updated, {"cpu.json": results}) == updated


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_results_are_small(name):
    assert (BENCHMARKS / "results" / name).stat().st_size < 300_000
