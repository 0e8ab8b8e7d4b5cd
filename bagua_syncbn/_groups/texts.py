"""Formats ranks and arguments for messages; texts are short for any number of ranks and any argument."""

from collections.abc import Iterable
from typing import Any

CAUSES = "Likely causes: a peer is in eval(), needs no gradients, ended, raised, runs different code, or is late"
"""Why a rank waits for its peers."""

_MOST = 8  # maximum number of ranks in a text, and of texts in a message


def text_of_ranks(ranks: Iterable[int]) -> str:
    """Returns ranks as text: "rank 3", "ranks 0, 1" or "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 504 more"."""
    ranks = list(ranks)
    more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST]))}{more}"


def ranks_by_text(texts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Groups ranks with equal texts. Takes (rank, text) pairs in ascending order; returns pairs of strings.

    Returns at most eight pairs; if there are more, the last pair combines all remaining texts.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks.setdefault(text, []).append(rank)
    groups = list(ranks.items())
    if len(groups) > _MOST:
        others = sorted(rank for _, which in groups[_MOST - 1 :] for rank in which)
        groups = [*groups[: _MOST - 1], ("others", others)]
    return [(text_of_ranks(which), text) for text, which in groups]


def text_of_argument(value: Any) -> str:
    """Returns the start of ``repr(value)``; the type's name if the repr has several lines, as for models."""
    if isinstance(value, (list, tuple)) and "\n" in repr(value):
        return f"[{', '.join(map(text_of_argument, value)):.200}]"
    text = repr(value)
    return type(value).__name__ if "\n" in text else text[:200]
