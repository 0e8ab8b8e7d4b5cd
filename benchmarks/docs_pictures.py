"""Pictures of the documentation that show how the package works: ``python -m benchmarks.docs_pictures``."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import bagua_syncbn

from .picture import WIDTH, Picture

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
_LEFT, _RIGHT, _SIDE = 20, 270, 230


def step() -> Picture:
    picture = Picture("One layer, one step, two ranks", "time runs down; nothing else crosses between ranks")
    for rank, x in enumerate((_LEFT, _RIGHT)):
        picture.text(x + _SIDE / 2, 68, f"rank {rank}", "title", "middle")

    def both(name: str, notes: Sequence[str], arrow: bool = True) -> None:
        for x, note in zip((_LEFT, _RIGHT), notes, strict=True):
            picture.box(x, _SIDE, name, note)
            if arrow:
                picture.arrow(x + _SIDE / 2, picture.height + 40)
        picture.height += 58 if arrow else 40

    def together(name: str, note: str) -> None:
        picture.box(_LEFT, WIDTH - 2 * _LEFT, name, note, filled=True)
        for x in (_LEFT, _RIGHT):
            picture.arrow(x + _SIDE / 2, picture.height + 40)
        picture.height += 58

    picture.text(WIDTH / 2, 68, "forward", "small", "middle")
    picture.height = 80
    both("batch_norm_stats", ["mean, variance, count of x₀", "mean, variance, count of x₁"])
    together("all_gather: 2C + 5 numbers from each rank", "every rank has the rows of all ranks")
    both("batch_norm_gather_stats", ["merge; running statistics", "the same bits"])
    both("batch_norm_elemt", ["y₀ from x₀", "y₁ from x₁"], arrow=False)
    picture.height += 22
    picture.text(WIDTH / 2, picture.height, "backward", "small", "middle")
    picture.height += 10
    both("batch_norm_backward_reduce", ["sums; own grad_weight, grad_bias"] * 2)
    together("all_reduce: 2C + 6 numbers", "sums over the batches of all ranks")
    both("batch_norm_backward_elemt", ["gradient of x₀", "gradient of x₁"], arrow=False)
    picture.height += 14
    return picture


def mask() -> Picture:
    picture = Picture(
        "lengths and masks: the filled positions make the statistics", "two ranks, two samples each, one channel"
    )
    for rank, lengths in enumerate(((12, 5), (9, 0))):
        picture.text(16, picture.height + 36, f"rank {rank}")
        for length in lengths:
            for place in range(12):
                x = 72 + 22 * place
                picture.rectangle(x, picture.height + 8, 20, 20, "blue" if place < length else "line-grid")
            picture.text(344, picture.height + 23, f"length {length}", "small")
            picture.height += 22
        picture.height += 12
    picture.text(16, picture.height + 14, "The statistics are those of the 26 filled values, on both ranks.", "small")
    picture.height += 28
    return picture


def groups() -> Picture:
    """Which ranks a group joins, for each way to choose it."""
    picture = Picture("Which ranks synchronize", "a job of 8 ranks on 2 hosts; ranks of one color share statistics")
    left, cell = 196, 36
    for host in range(2):
        picture.text(left + cell * (4 * host + 2) - 3, picture.height + 8, f"host {host}", "small", "middle")
    picture.height += 16
    rows = [
        ("None: all ranks", [0] * 8),
        ('"node": each host', [0] * 4 + [1] * 4),
        ("2: every 2 ranks", [0, 0, 1, 1, 2, 2, 3, 3]),
        ("[[0, 3], [1, 2], [4, 5, 6, 7]]", [0, 1, 1, 0, 2, 2, 2, 2]),
        ("LOCAL: each rank alone", [None] * 8),
    ]
    for name, members in rows:
        picture.text(left - 10, picture.height + 21, name, anchor="end")
        for rank, member in enumerate(members):
            x = left + cell * rank
            style = "line-grid" if member is None else ("blue", "orange", "sky", "red")[member]
            picture.rectangle(x, picture.height + 3, cell - 6, 28, style)
            on = "on" if member in (0, 1, 3) else "text"
            picture.text(x + cell / 2 - 3, picture.height + 21, str(rank), on, "middle")
        picture.height += 38
    picture.height += 6
    return picture


def conversion() -> Picture:
    """A model before and after conversion, with the report that conversion gives."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.InstanceNorm2d(8))
    picture = Picture("Conversion changes the class, not the object", "nn.Sequential, before and after")
    report = str(bagua_syncbn.conversion_report(model)).splitlines()
    before, marks = [type(layer).__name__ for layer in model], [id(layer) for layer in model]
    bagua_syncbn.convert_sync_batchnorm(model)
    assert [id(layer) for layer in model] == marks
    for name, layer in zip(before, model, strict=True):
        changed = name != type(layer).__name__
        for x, shown in ((_LEFT, name), (_RIGHT, type(layer).__name__)):
            picture.box(x, _SIDE, shown, filled=changed and x == _RIGHT, height=28)
        picture.arrow_right(_LEFT + _SIDE, picture.height + 14, 20)
        picture.height += 36
    picture.height += 10
    notes = ["Parameters, buffers, hooks, mode and references stay.", "conversion_report(model) says:", *report]
    for line in notes:
        picture.text(_LEFT, picture.height + 8, line, "small")
        picture.height += 17
    picture.height += 8
    return picture


def running() -> Picture:
    """Running mean of a layer over 6 steps of 4 micro-batches: as usual, accumulated, frozen after two steps."""
    torch.manual_seed(0)
    batches = [[torch.randn(8, 1) + 1 for _ in range(4)] for _ in range(6)]
    curves = {}
    for name in ("as usual", "accumulate_statistics", "freeze_statistics after step 2"):
        layer, values = bagua_syncbn.SyncBatchNorm1d(1, momentum=0.3), [0.0]
        for number, batch in enumerate(batches):
            if name.startswith("freeze") and number == 2:
                bagua_syncbn.freeze_statistics(layer)
            if name.startswith("accumulate"):
                with bagua_syncbn.accumulate_statistics(layer):
                    for micro_batch in batch:
                        layer(micro_batch)
                values += [values[-1]] * 3 + [layer.running_mean.item()]
            else:
                for micro_batch in batch:
                    layer(micro_batch)
                    values.append(layer.running_mean.item())
        curves[name] = values
    picture = Picture("running_mean over 6 steps of 4 micro-batches", "the mean of the data is 1")
    styles = dict(zip(curves, (("orange", 1.8, ""), ("blue", 1.8, ""), ("red", 1.5, "5 3")), strict=True))
    for name, (style, *_) in styles.items():
        picture.rectangle(12, picture.height, 12, 12, style)
        picture.text(29, picture.height + 10.5, name)
        picture.height += 18
    left, right, top, bottom = 34, WIDTH - 14, picture.height + 6, picture.height + 166
    highest = max(max(values) for values in curves.values())

    def place(number: float, value: float) -> tuple[float, float]:
        return left + (right - left) * number / 24, bottom - (bottom - top) * value / highest

    for number in range(0, 25, 4):
        picture.line([place(number, 0), place(number, highest)], "grid")
        if number:
            picture.text(place(number - 2, 0)[0], bottom + 15, f"step {number // 4}", "small", "middle")
    for level in (0, 0.5, 1):
        picture.text(left - 6, place(0, level)[1] + 4, f"{level:g}", "small", "end")
    for name, values in curves.items():
        style, width, dashes = styles[name]
        stairs = [point for n, v in enumerate(values) for point in ((place(n, v)), (place(min(n + 1, 24), v)))]
        picture.line(stairs, style, width, dashes)
    picture.height = bottom + 26
    return picture


def hang() -> Picture:
    """Where to look when a job hangs: questions, and the answer of each."""
    picture = Picture("It hangs: where do the ranks stand?", "py-spy dump --pid PID on each rank, then from the top")
    questions = [
        ("Has the process of a rank ended?", "Read its traceback first."),
        ("Do some ranks not train at all?", "One rank alone: evaluate with eval(),"),
        ("Is one rank out of batches?", "Pass empty batches until all are done."),
        ("Is a layer in eval() on one rank?", "Set the mode alike on all ranks."),
        ("Does a branch depend on the data?", "Make it alike, or filter its layers."),
        ("Is it the very first training step?", "Groups: same ones, same order."),
        ("None of these?", "Set a short timeout= and read the error."),
    ]
    second = {1: "or recalibrate_statistics on all."}
    for number, (question, answer) in enumerate(questions):
        last = number == len(questions) - 1
        picture.box(12, 250, question, height=34)
        picture.arrow_right(262, picture.height + 17, 26, "" if last else "yes")
        picture.text(296, picture.height + (14 if number in second else 21), answer, "small")
        picture.text(296, picture.height + 28, second.get(number, ""), "small")
        if not last:
            picture.arrow(137, picture.height + 34, "no")
        picture.height += 34 if last else 52
    picture.height += 14
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    draw.__name__: draw for draw in (step, mask, groups, conversion, running, hang)
}


def draw_all(folder: Path) -> None:
    for name, draw in PICTURES.items():
        folder.joinpath(f"{name}.svg").write_text(draw().svg(f"benchmarks/{Path(__file__).name}"), encoding="utf-8")


if __name__ == "__main__":
    draw_all(FOLDER)
