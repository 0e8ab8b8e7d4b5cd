"""Step of each peer over two ranks, in steps of the layer that does not synchronize."""

import math
from typing import Any

from ..core import cases as recorded
from ..core.batches import layouts
from ..core.cases import of_section, ratios
from ..core.machine import where
from ..core.tables import quartiles
from ..ranks.report import measured_peers
from .picture import WIDTH, Picture

PEERS = {
    "ours": ("bagua_syncbn", "blue"),
    "naive": ("naive all-reduce", "orange"),
    "fairscale": ("fairscale", "red"),
    "torch_sync": ("nn.SyncBatchNorm", "muted"),
}
_LEFT, _ROOM, _STEP = 150, WIDTH - 150 - 20, 22


def draw(results: dict[str, Any]) -> Picture | None:
    chosen = [
        case
        for case in of_section(results, "layers")
        if case["ranks"] == 2 and case["threads"] == 1 and case["layout"] == layouts(case["shape"])[0]
    ]
    if not chosen:
        return None
    chosen.sort(key=recorded.elements)
    picture = Picture("A step over two ranks, in steps of nn.BatchNorm", where(results))
    peers = measured_peers(results)
    picture.legend([PEERS[name][::-1] for name in peers])
    rows = [{name: quartiles(ratios(case, name, "local")) for name in peers if name in case["microseconds"]}
            for case in chosen]  # fmt: skip
    ends = [value for row in rows for low, _, high in row.values() for value in (low, high)]
    first, last = math.floor(math.log2(min(ends))), math.ceil(math.log2(max(ends)))

    def place(value: float) -> float:
        return _LEFT + _ROOM * (math.log2(value) - first) / (last - first)

    top, bottom = picture.height + 4, picture.height + 4 + _STEP * len(rows)
    for power in range(first, last + 1):
        x = place(2.0**power)
        picture.line([(x, top), (x, bottom)], "text" if power == 0 else "grid")
        picture.text(x, bottom + 15, f"{2.0**power:g}", "small", "middle")
    for number, (case, row) in enumerate(zip(chosen, rows, strict=True)):
        y = top + _STEP * (number + 0.5)
        picture.text(_LEFT - 10, y + 4, " x ".join(map(str, case["shape"])), anchor="end")
        for offset, (name, (low, middle, high)) in enumerate(row.items()):
            style, height = PEERS[name][1], y + 6 * (offset - (len(row) - 1) / 2)
            picture.line([(place(low), height), (place(high), height)], style, 2)
            picture.rectangle(place(middle) - 3, height - 3, 6, 6, style)
    picture.height = bottom + 22
    picture.text(_LEFT, picture.height + 6, "medians and quartiles of the rounds; logarithmic", "small")
    picture.height += 18
    return picture
